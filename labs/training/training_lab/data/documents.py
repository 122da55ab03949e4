"""Documents from their sources: texts with names, and a manifest of every file with its SHA-256.

Every file is hashed before it is read as text. Order does not matter here: what follows orders documents by their
content.
"""

from __future__ import annotations

import glob
import http.client
import os
import re
import stat
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from training_lab.config import DataConfig
from training_lab.errors import LabError, UserError
from training_lab.identity import sha256_of_bytes, sha256_of_file
from training_lab.record import write_atomically

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
OTHER_FORMATS = (".jsonl", ".parquet", ".gz", ".zst", ".zip", ".bz2", ".xz")

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


class Document(NamedTuple):
    """One text, and the name of the file and part that it came from."""

    name: str
    text: str


@dataclass(frozen=True)
class Collection:
    """What a source gave: its documents, and what its manifest says."""

    documents: list[Document]
    manifest: dict[str, Any]


class Source(NamedTuple):
    """The files of a source, each as (name in the manifest, path), and what else its manifest says."""

    files: list[tuple[str, Path]]
    facts: dict[str, Any]
    skips_bad_files: bool = False
    prepare: Callable[[str], str] = str
    """What is done to a file's text before it is cut into documents."""


def read_documents(config: DataConfig) -> Collection:
    """All documents of the configured source. Raises UserError for files that cannot be used."""
    if config.source == "synthetic":
        documents = [synthetic_document(number) for number in range(config.synthetic_documents)]
        return Collection(documents, {"source": "synthetic", "documents": len(documents), "generator": "v1"})
    locate: dict[str, Callable[[DataConfig], Source]] = {
        "stdlib": stdlib_source,
        "files": files_source,
        "shakespeare": shakespeare_source,
    }
    return read_source(config, locate[config.source](config))


def read_source(config: DataConfig, source: Source) -> Collection:
    """Reads, hashes and decodes every file of a source."""
    documents: list[Document] = []
    listing: list[dict[str, Any]] = []
    rejected: list[dict[str, str]] = []
    for name, path in source.files:
        try:
            content = path.read_bytes()
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if not source.skips_bad_files:
                raise UserError(f"{path}: byte {error.start}: not UTF-8; convert the file, or leave it out") from error
            rejected.append({"name": name, "reason": f"byte {error.start} is not UTF-8"})
            continue
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        listing.append({"name": name, "bytes": len(content), "sha256": sha256_of_bytes(content)})
        text = source.prepare(text)
        parts = split_paragraphs(text) if config.documents == "paragraph" else [text]
        documents += [Document(f"{name}#{n}" if len(parts) > 1 else name, part) for n, part in enumerate(parts) if part]
    manifest = {
        "source": config.source,
        "unit": config.documents,
        **source.facts,
        "files": listing,
        "rejected": rejected,
    }
    return Collection(documents, manifest)


def split_paragraphs(text: str) -> list[str]:
    """The parts of a text up to and including each run of blank lines; joined again they are the text."""
    return [part for part in re.split(r"(?<=\n\n)(?!\n)|(?<=\n\r\n)(?!\r\n)", text) if part]


def stdlib_source(config: DataConfig) -> Source:
    """The source files of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, names, found in os.walk(root):
        names[:] = sorted(name for name in names if name not in STDLIB_LEFT_OUT)
        files += [Path(folder) / name for name in found if name.endswith(".py")]
    listed = sorted((path.relative_to(root).as_posix(), path) for path in files)
    facts = {
        "python": sys.version.split()[0],
        "text": "four spaces of indentation are one tab",
        "licence": "PSF-2.0 (the Python Software Foundation's licence)",
    }
    return Source(listed, facts, skips_bad_files=True, prepare=tabs_for_indentation)


def tabs_for_indentation(text: str) -> str:
    """Each four spaces at the beginning of a line as one tab.

    As spaces they would be a fifth of all text: a model that does no more than repeat its last token, as one with a
    tied head nearly does before training, would then look better than it is (by 0.2 nats with bytes as tokens).
    """
    return re.sub(r"(?m)^(?: {4})+", lambda spaces: "\t" * (len(spaces[0]) // 4), text)


def files_source(config: DataConfig) -> Source:
    """The user's own files, sorted by the bytes of their names. A file that is listed twice, by whatever names, is
    read once."""
    found: dict[tuple[int, int], tuple[str, Path]] = {}
    matched = sorted((path for pattern in config.paths for path in expand(pattern)), key=os.fsencode)
    for path in matched:
        if not is_unicode(path.as_posix()):
            raise UserError(f"data.paths: {path}: its name is not UTF-8; rename the file")
        status = path.stat()
        found.setdefault((status.st_dev, status.st_ino), (path.as_posix(), path))
    return Source(list(found.values()), {"paths": list(config.paths)})


def is_unicode(name: str) -> bool:
    """Whether a name can be written as UTF-8; one that is not has bytes in it that Python could not read."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def expand(pattern: str) -> Iterator[Path]:
    """The regular files that an entry of `data.paths` stands for."""
    try:
        path = Path(pattern).expanduser()
    except RuntimeError as error:  # ~somebody who does not exist
        raise UserError(f"data.paths: {pattern}: {error}") from error
    matches: Iterable[Path] = [path]
    if not path.exists():
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        if not matches:
            raise UserError(
                f"data.paths: {pattern}: no such file or folder, and no file matches it (seen from {Path.cwd()})"
            )
    num_files = 0
    for match in matches:
        for file in text_files_below(match) if match.is_dir() else [match]:
            check_is_text_file(file)
            num_files += 1
            yield file
    if not num_files:
        raise UserError(f"data.paths: {pattern}: holds no {', '.join(TEXT_SUFFIXES)} file")


def check_is_text_file(path: Path) -> None:
    """Refuses what is not a file of plain text, without opening it: a pipe would block."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"data.paths: {path}: cannot be read: {error.strerror} (a link that leads nowhere?)") from error
    if not stat.S_ISREG(mode):
        raise UserError(f"data.paths: {path}: not a regular file")
    if path.suffix in OTHER_FORMATS:
        raise UserError(f"data.paths: {path}: only plain text is read, not {path.suffix}; unpack or convert it")


def text_files_below(folder: Path) -> Iterator[Path]:
    """The text files of a folder and those inside it; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise UserError(f"data.paths: {error.filename}: cannot be listed: {error.strerror}") from error

    for place, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            path = Path(place) / name
            if path.suffix in TEXT_SUFFIXES and path.is_file():
                yield path


def shakespeare_source(config: DataConfig) -> Source:
    """Tiny Shakespeare, downloaded once and checked against its hash each time."""
    path = Path(config.cache_dir) / "downloads" / SHAKESPEARE_SHA256 / "tinyshakespeare.txt"
    if not path.exists():
        download(SHAKESPEARE_URL, SHAKESPEARE_SHA256, path)
    elif sha256_of_file(path) != SHAKESPEARE_SHA256:
        raise UserError(
            f"{path}: damaged: its SHA-256 is not {SHAKESPEARE_SHA256[:12]}…; delete it to download it again"
        )
    facts = {"url": SHAKESPEARE_URL, "licence": "public domain"}
    return Source([("tinyshakespeare.txt", path)], facts)


def download(url: str, sha256: str, path: Path) -> None:
    """Puts the file at `url` at `path`, if its content has the hash; otherwise nothing is left there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: {path.parent}: cannot be made: {error.strerror}") from error
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            content: bytes = answer.read()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        reason = getattr(error, "reason", None) or error
        raise LabError(f"{url}: cannot be downloaded: {reason}; or put the file at {path} yourself") from error
    got = sha256_of_bytes(content)
    if got != sha256:
        raise LabError(f"{url}: has SHA-256 {got}, expected {sha256}; not used")
    write_atomically(path, content)


def synthetic_document(number: int) -> Document:
    """A made text with something to learn in it: words of unequal frequency, each liking its own followers.

    Integer arithmetic alone, so that every machine makes the same bytes.
    """
    state = mix(number + 1)
    length = 64 << (state >> 8) % 6  # 64 to 2,048, then up to twice as long
    length += (state >> 16) % (length + 1)
    words: list[str] = []
    size, word = 0, 0
    while size < length:
        state = mix(state)
        rank = min((state >> 4) % 64, (state >> 12) % 64, (state >> 20) % 64)
        word = (word * 5 + rank + 1) % 64 if state % 4 else rank
        words.append(WORDS[word] + (".\n" if (state >> 32) % 12 == 0 else " "))
        size += len(words[-1])
    return Document(f"synthetic-{number:06d}", "".join(words)[:length])


def mix(value: int) -> int:
    """One step of SplitMix64 on a Python integer."""
    mask = (1 << 64) - 1
    z = (value + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


WORDS = [f"{first}{second}{end}" for first in "klmn" for second in "aeio" for end in ("", "n", "ra", "s")]
