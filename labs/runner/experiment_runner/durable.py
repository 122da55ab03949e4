"""Files that survive a crash: written whole or not at all, synced, hashed, and locked by one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import IO, Any

from experiment_runner.errors import RunnerError

READ_BYTES = 1 << 20
UNFINISHED_PREFIX = ".unfinished-"


def write_atomically(path: Path, content: bytes, aside_suffix: str = "", mode: int = 0o666) -> None:
    """Writes a file aside, syncs it and renames it over `path`, so that nobody ever sees half of it.

    Where several processes may write the same file, each needs an `aside_suffix` of its own. `mode` is the file's, but
    for what the umask takes away.
    """
    aside = path.with_name(f"{UNFINISHED_PREFIX}{path.name}{aside_suffix}")
    try:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()  # one that a crash left may have another mode
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            sync_file(file)
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise RunnerError(f"{path}: cannot write {len(content)} bytes: {error.strerror}") from error


def sync_file(file: IO[Any]) -> None:
    """Makes what was written to a file survive a loss of power."""
    file.flush()
    if sys.platform == "darwin":  # there fsync leaves the data in the disk's own cache
        import fcntl

        try:
            fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
            return
        except OSError:  # a network volume has none
            pass
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes renames and removals in a folder survive a loss of power, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems sync no folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a file's content, read in pieces so that its size does not matter."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while True:
            block = file.read(READ_BYTES)
            if not block:
                return digest.hexdigest()
            digest.update(block)


def json_text(value: Any) -> str:
    """JSON as people read it. Raises ValueError for NaN and infinities."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def try_lock(file: IO[str]) -> bool:
    """Takes the lock of an open file without waiting; False if another process has it. The system frees it when
    the file is closed or the process ends. On a file system without locks it is always free."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the first on Unix, the second on Windows
        return False
    except OSError:
        return True
    return True
