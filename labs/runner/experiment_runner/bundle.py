"""What is sent: exactly the files of an allow-list, hashed as they are read, in an archive whose bytes depend on them
alone. Whatever looks like a key, or holds a secret, is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from experiment_runner.errors import InputError
from experiment_runner.job import Files
from experiment_runner.redaction import Secrets

KEY_FILES = (".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_*", ".netrc", "_netrc", ".git-credentials",
             ".npmrc", ".pypirc")  # fmt: skip
NO_KEY_FILES = (".env.example", "id_*.py", "id_*.pub")
SKIPPED = ("__pycache__",)
MB = 1_000_000


class SentFile(NamedTuple):
    """One file, as it was read."""

    path: str
    content: bytes
    is_executable: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


class Bundle(NamedTuple):
    """All files that are sent, sorted by path."""

    files: list[SentFile]

    @property
    def num_bytes(self) -> int:
        return sum(len(file.content) for file in self.files)

    def manifest(self) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of each."""
        return {file.path: {"bytes": len(file.content), "sha256": file.sha256} for file in self.files}

    @property
    def sha256(self) -> str:
        """One hash over all paths and contents."""
        listing = [[file.path, file.sha256, file.is_executable] for file in self.files]
        return hashlib.sha256(json.dumps(listing, separators=(",", ":")).encode()).hexdigest()

    def archive(self) -> bytes:
        """A tar archive: the same files give the same bytes, whenever and by whomever they are packed."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for file in self.files:
                entry = tarfile.TarInfo(file.path)
                entry.size = len(file.content)
                entry.mode = 0o755 if file.is_executable else 0o644
                archive.addfile(entry, io.BytesIO(file.content))
        return buffer.getvalue()


def gather(files: Files, base: Path, secrets: Secrets) -> Bundle:
    """Reads the files of an allow-list; `base` is the folder that its root is relative to.

    Raises InputError for a pattern that matches nothing, a symlink, a file that holds keys or a secret, and too much.
    """
    root = (base / files.root).resolve()
    if not root.is_dir():
        raise InputError(f"{root}: files.root is not a folder")
    paths: set[Path] = set()
    for pattern in files.include:
        found = [path for path in matches(root, pattern) if not is_excluded(path.relative_to(root), files.exclude)]
        if not found:
            raise InputError(f"{root}: files.include: {pattern!r} matches no file")
        paths.update(found)
    sent = [read_file(root, path) for path in sorted(paths)]
    for name, text in files.inline.items():
        if name in {file.path for file in sent}:
            raise InputError(f"{root / name}: is both a file and written in the job (files.inline); keep one of them")
        sent.append(SentFile(name, text.encode("utf-8"), False))
    for file in sent:
        refuse_keys(root, file, secrets)
    bundle = Bundle(sorted(sent, key=lambda file: file.path))
    if bundle.num_bytes > files.max_mb * MB:
        largest = max(bundle.files, key=lambda file: len(file.content))
        raise InputError(
            f"{root}: {len(bundle.files)} files of {bundle.num_bytes / MB:.1f} MB exceed files.max_mb = "
            f"{files.max_mb:g}; the largest is {largest.path} ({len(largest.content) / MB:.1f} MB)"
        )
    return bundle


def matches(root: Path, pattern: str) -> Iterator[Path]:
    """The files below the root that a pattern names, links among them: they are refused when they are read."""
    for path in root.glob(pattern):
        relative = path.relative_to(root)
        if not any(part in SKIPPED for part in relative.parts) and (path.is_symlink() or not path.is_dir()):
            yield path


def is_excluded(relative: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(relative.as_posix(), pattern) or fnmatch(relative.name, pattern) for pattern in patterns)


def read_file(root: Path, path: Path) -> SentFile:
    """One file. A link anywhere on the way to it is refused: what it leads to was not allowed out."""
    relative = path.relative_to(root)
    for parent in (path, *path.parents):
        if parent == root:
            break
        if parent.is_symlink():
            raise InputError(f"{parent}: is a symbolic link, and links are not sent; name the file itself")
    if not path.is_file():
        raise InputError(f"{path}: is neither a file nor a folder, and is not sent")
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0))) as file:
            return SentFile(relative.as_posix(), file.read(), os.access(path, os.X_OK))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def refuse_keys(root: Path, file: SentFile, secrets: Secrets) -> None:
    """Raises InputError if a file looks like one of keys, or holds a secret."""
    name = file.path.rpartition("/")[2]
    if any(fnmatch(name, p) for p in KEY_FILES) and not any(fnmatch(name, p) for p in NO_KEY_FILES):
        raise InputError(f"{root / file.path}: files like this hold keys, and are never sent; leave it out")
    found = secrets.find(file.content.decode("utf-8", "replace"))
    if found:
        raise InputError(f"{root / file.path}: holds a secret ({', '.join(found)}), and is not sent; take it out")
