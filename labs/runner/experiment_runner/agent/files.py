"""Files in, and results out. Links are never followed, and nothing but regular files is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from .place import SENT, SPEC, give_sign_of_life, load, write_out

PIECE_BYTES = 1 << 20
SKIPPED = {"excluded": "excluded by the job", "link": "a symbolic link", "special": "not a regular file"}


def receive() -> None:
    """Unpacks an archive, hashes each file as it lies on the disk, and puts all in place at once. Standard input: a
    line of JSON that says what each file should be, then the tar archive."""
    expected = json.loads(sys.stdin.buffer.readline())
    incoming = SENT.with_name("job.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir()
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for entry in archive:
            content = archive.extractfile(entry) if entry.isreg() and entry.name in expected else None
            if content is None:
                sys.exit(f"unexpected entry {entry.name!r} in the archive")
            path = incoming / entry.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                shutil.copyfileobj(content, file, PIECE_BYTES)
            path.chmod(entry.mode & 0o700)
    found = {name: describe(incoming / name) for name in expected}
    wrong = sorted(name for name in expected if found[name] != expected[name])
    if wrong:
        sys.exit(f"arrived damaged: {', '.join(wrong[:5])}")
    if SENT.is_dir():
        shutil.rmtree(SENT)
    incoming.rename(SENT)
    print(json.dumps(found))


def describe(path: Path) -> dict[str, Any] | None:
    """Size and SHA-256 of a regular file; None for what cannot be read."""
    digest, size = hashlib.sha256(), 0
    try:
        with open_regular(path) as file:
            for piece in iter(lambda: file.read(PIECE_BYTES), b""):
                digest.update(piece)
                give_sign_of_life()  # large results take minutes to hash
                size += len(piece)
    except OSError:
        return None
    return {"bytes": size, "sha256": digest.hexdigest()}


def open_regular(path: Path) -> BinaryIO:
    """A regular file. Raises OSError for a link, a device or a pipe, without waiting for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file")
    return open(descriptor, "rb")


def walk(folder: Path, exclude: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """All that is below a folder but its folders: the POSIX path, and `file` or a key of SKIPPED."""
    for top, folders, names in os.walk(folder):
        for name in sorted(folders + names):
            path = Path(top, name)
            relative, mode = path.relative_to(folder).as_posix(), path.lstat().st_mode
            if any(fnmatch(relative, pattern) for pattern in exclude):
                yield relative, "excluded"
            elif stat.S_ISREG(mode):
                yield relative, "file"
            elif not stat.S_ISDIR(mode):
                yield relative, "link" if stat.S_ISLNK(mode) else "special"


def manifest() -> None:
    """Prints size and SHA-256 of every result, hashed now, and what is left out with its reason."""
    spec = load(SPEC)
    files, skipped = {}, {}
    for path, kind in walk(Path(spec["results"]), spec["exclude"]):
        if any("\ud800" <= character <= "\udfff" for character in path):
            skipped[ascii(path)] = "its name is not UTF-8"
            continue
        described = describe(Path(spec["results"], path)) if kind == "file" else None
        if described is None:
            skipped[path] = SKIPPED.get(kind, "it could not be read")
        else:
            files[path] = described
    print(json.dumps({"files": files, "skipped": skipped}))


def read() -> None:
    """Prints frames of the asked files, each from its offset to its end. Standard input: JSON [[path, offset], ...]."""
    results = Path(load(SPEC)["results"])
    for path, offset in json.load(sys.stdin):
        send(results, path, offset)


def live() -> None:
    """Prints frames of what the live files have grown by. Standard input: JSON {path: bytes that are known}."""
    spec, known = load(SPEC), json.load(sys.stdin)
    for path, kind in walk(Path(spec["results"])):
        if kind == "file" and any(fnmatch(path, pattern) for pattern in spec["live"]):
            send(Path(spec["results"]), path, known.get(path, 0), is_live=True)


def send(folder: Path, path: str, offset: int, is_live: bool = False) -> None:
    """One frame: a line of JSON, then so many bytes as were there when it was asked for, even if the file grows."""
    try:
        file = open_regular(folder / path)
    except OSError as error:
        write_out(json.dumps({"path": path, "error": str(error.strerror)}).encode() + b"\n")
        return
    with file:
        left = max(0, os.fstat(file.fileno()).st_size - offset)
        if is_live and not left:
            return
        write_out(json.dumps({"path": path, "offset": offset, "bytes": left}).encode() + b"\n")
        file.seek(offset)
        while left:
            # A file that shrank goes on with zeros, and is found out by its hash.
            piece = file.read(min(PIECE_BYTES, left)) or bytes(min(PIECE_BYTES, left))
            write_out(piece)
            give_sign_of_life()
            left -= len(piece)
