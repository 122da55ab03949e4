"""Where text comes from: the files of each source with their hashes, and what its manifest says of them.

A file is known by name, size and SHA-256 before it is opened. What is pinned (a file of FineWeb) need not even be
here as long as its tokens are.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiment_runner.durable import sha256_of_file
from training_lab.config_data import FINEWEB_REVISION, DataConfig
from training_lab.data.documents import Document, Reading, Rejected, format_of
from training_lab.data.download import fetch_file
from training_lab.data.fineweb import FINEWEB_FILES, FINEWEB_LICENCE, FINEWEB_REPO
from training_lab.data.hub import (
    HubFile,
    Listing,
    check_hash,
    chosen_files,
    find,
    find_or_fetch,
    is_offline,
    list_files,
)
from training_lab.data.paths import find_files
from training_lab.data.reading import read_documents
from training_lab.data.synthetic import synthetic_document
from training_lab.errors import LabError, UserError
from training_lab.progress import Progress

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1115394

# The parts of the standard library's folder that are not its source: installed packages, tests (thousands of files,
# some with broken encodings on purpose), generated tables.
STDLIB_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "lib2to3",
    "pydoc_data",
    "encodings",
}


class SourceFile(NamedTuple):
    """One file of a source."""

    name: str
    bytes: int
    sha256: str
    locate: Callable[[], Path]
    """Where it is; one that is pinned is fetched and verified first, if need be."""
    find: Callable[[], Path | None]
    """Where it is, if it is here."""

    def entry(self) -> dict[str, Any]:
        """The file in a manifest."""
        return {"name": self.name, "bytes": self.bytes, "sha256": self.sha256}


class Source(NamedTuple):
    """Text to be read: from files, or (`generated`) made."""

    files: list[SourceFile]
    reading: Reading
    facts: dict[str, Any]
    """What else the manifest says: licence, address, version."""
    generated: int = 0
    """How many documents the generator makes, where there are no files."""

    def documents(self) -> Iterator[tuple[int, Document | Rejected]]:
        """Every document, with the number of its file."""
        for number in range(self.generated):
            yield 0, synthetic_document(number)
        for number, file in enumerate(self.files):
            for document in read_documents(file.locate(), file.name, file.sha256, self.reading):
                yield number, document

    def document_name(self, file: int, number: int) -> str:
        """What a person calls a document: its file, and its place there where a file has more than one."""
        if self.generated:
            return f"synthetic-{number:06d}"
        name = self.files[file].name
        is_whole = self.reading.unit == "file" and not format_of(name).has_records
        return name if is_whole else f"{name}#{number}"


def find_source(config: DataConfig, progress: Progress) -> Source:
    """The configured source. Raises UserError for files that cannot be used."""
    find: dict[str, Callable[[DataConfig, Progress], Source]] = {
        "stdlib": stdlib_source,
        "files": files_source,
        "shakespeare": shakespeare_source,
        "fineweb": fineweb_source,
        "synthetic": synthetic_source,
    }
    return find[config.source](config, progress)


def cache_path(config: DataConfig) -> Path:
    """Where downloads and tokens are kept; ~ is the home folder."""
    return Path(config.cache_dir).expanduser()


def reading_of(config: DataConfig) -> Reading:
    return Reading(config.documents, config.text_field, config.invalid_text)


def hashed_files(listed: list[tuple[str, Path]], progress: Progress) -> list[SourceFile]:
    """Local files with their hashes."""
    files: list[SourceFile] = []
    for name, path in listed:
        progress.show("Hashing the source files", len(files), len(listed), f"{len(files):,} of {len(listed):,} files")
        try:
            size, sha256 = path.stat().st_size, sha256_of_file(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        here = functools.partial(Path, path)
        files.append(SourceFile(name, size, sha256, here, here))
    return files


def stdlib_source(config: DataConfig, progress: Progress) -> Source:
    """The source files of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, names, found in os.walk(root):
        names[:] = sorted(name for name in names if name not in STDLIB_LEFT_OUT)
        paths += [Path(folder) / name for name in found if name.endswith(".py")]
    listed = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    reading = reading_of(config)._replace(indentation="four spaces as a tab")
    facts = {"python": sys.version.split()[0], "licence": "PSF-2.0 (the Python Software Foundation's licence)"}
    return Source(hashed_files(listed, progress), reading, facts)


def files_source(config: DataConfig, progress: Progress) -> Source:
    """The user's own files."""
    files = hashed_files(find_files(config.paths), progress)
    return Source(files, reading_of(config), {"paths": list(config.paths), "licence": "not stated: your own files"})


def shakespeare_source(config: DataConfig, progress: Progress) -> Source:
    """Tiny Shakespeare, downloaded once and checked against its hash each time."""
    path = cache_path(config) / "downloads" / SHAKESPEARE_SHA256 / "tinyshakespeare.txt"

    def locate() -> Path:
        if path.exists():
            check_hash(path, SHAKESPEARE_SHA256, "delete it to download it again")
        elif is_offline():
            raise LabError(f"{SHAKESPEARE_URL}: is not here, and HF_HUB_OFFLINE is set; put the file at {path}")
        else:
            fetch_file(SHAKESPEARE_URL, SHAKESPEARE_SHA256, SHAKESPEARE_BYTES, path, None, progress)
        return path

    def find_it() -> Path | None:
        return locate() if path.exists() else None

    file = SourceFile("tinyshakespeare.txt", SHAKESPEARE_BYTES, SHAKESPEARE_SHA256, locate, find_it)
    return Source([file], reading_of(config), {"url": SHAKESPEARE_URL, "licence": "public domain"})


def fineweb_source(config: DataConfig, progress: Progress) -> Source:
    """Files of FineWeb at one commit; those of the pinned one are known, and nobody is asked."""
    cache_dir, revision = cache_path(config), config.fineweb_revision
    if revision == FINEWEB_REVISION:
        listing = Listing(revision, FINEWEB_FILES)
    else:
        listing = list_files(FINEWEB_REPO, revision, cache_dir, progress)

    files = []
    for name in chosen_files(listing, config.fineweb_files, ".parquet"):
        file = HubFile(FINEWEB_REPO, listing.commit, name, *listing.files[name])
        locate = functools.cache(functools.partial(find_or_fetch, file, cache_dir, progress))
        here = functools.partial(find, file, cache_dir)
        files.append(SourceFile(name, file.bytes, file.sha256, locate, here))
    facts = {"repo": FINEWEB_REPO, "revision": listing.commit, **FINEWEB_LICENCE}
    if revision != listing.commit:
        facts["revision_asked_for"] = revision
    return Source(files, reading_of(config)._replace(text_field="text"), facts)


def synthetic_source(config: DataConfig, progress: Progress) -> Source:
    """Made text: the same bytes on every machine."""
    facts = {"generator": "v1", "documents": config.synthetic_documents, "licence": "none needed: generated"}
    return Source([], Reading(), facts, generated=config.synthetic_documents)
