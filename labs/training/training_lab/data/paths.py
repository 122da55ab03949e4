"""The files that `data.paths` stands for, sorted by the bytes of their names. Nothing is opened here: a pipe would
block, and what is no file is refused or passed over before anybody waits for it."""

from __future__ import annotations

import glob
import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from training_lab.data.documents import COMPRESSED, format_of
from training_lab.errors import UserError

TEXT_SUFFIXES = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".adoc",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift",
    ".js", ".mjs", ".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".jl", ".r", ".m", ".hs", ".ml", ".ex", ".erl",
    ".sh", ".bash", ".zsh", ".sql", ".html", ".htm", ".css", ".scss", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg",
)  # fmt: skip
RECORD_SUFFIXES = (".jsonl", ".parquet")  # as format_of calls them
UNREADABLE = (".zip", ".bz2", ".xz", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".pdf", ".docx", ".doc", ".odt", ".epub")


def find_files(patterns: Iterable[str]) -> list[tuple[str, Path]]:
    """Each file once, by whatever names it is listed, as (its name as POSIX path in NFC, its path).

    Raises UserError for an entry that stands for nothing, or for something that cannot be read as text.
    """
    found: dict[tuple[int, int], tuple[str, Path]] = {}
    named = []
    for pattern in patterns:
        try:
            matched = list(expand(pattern))
        except OSError as error:  # such as a folder that may not be entered, or a name that is too long
            raise UserError(f"data.paths: {error.filename or pattern}: cannot be read: {error.strerror}") from error
        for path in matched:
            if not is_unicode(path.as_posix()):
                raise UserError(f"data.paths: {path}: its name is not UTF-8; rename the file")
            named.append((unicodedata.normalize("NFC", path.as_posix()), path))
    for name, path in sorted(named, key=lambda one: (one[0].encode("utf-8"), os.fsencode(one[1]))):
        status = path.stat()
        found.setdefault((status.st_dev, status.st_ino), (name, path))
    return list(found.values())


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
        matches = matching(path)
        if not matches:
            hint = "; paths are written with / here" if "\\" in pattern else ""
            raise UserError(
                f"data.paths: {pattern}: no such file or folder, and no file matches it (seen from {Path.cwd()}){hint}"
            )
    num_files = 0
    for match in matches:
        for file in files_below(match) if match.is_dir() else [match]:
            check_is_readable(file)
            num_files += 1
            yield file
    if not num_files:
        raise UserError(
            f"data.paths: {pattern}: holds no file that is read from folders: text and source code "
            f"({', '.join(TEXT_SUFFIXES[:3])}, …), {', '.join(RECORD_SUFFIXES)}, and these with {', '.join(COMPRESSED)}"
        )


def matching(pattern: Path) -> list[Path]:
    """The paths that a glob stands for, hidden ones only where it says so; `**` follows no links to folders."""
    parts = pattern.parts
    first = next((number for number, part in enumerate(parts) if glob.has_magic(part)), None)
    if first is None:
        return [pattern] if pattern.is_symlink() else []
    base, inner = Path(*parts[:first]), Path(*parts[first:])
    try:
        found = list(base.glob(str(inner)))
    except ValueError as error:
        raise UserError(f"data.paths: {pattern}: {error}") from error
    shows_hidden = any(part.startswith(".") for part in inner.parts)
    return [
        path for path in found if shows_hidden or not any(part.startswith(".") for part in path.relative_to(base).parts)
    ]


def check_is_readable(path: Path) -> None:
    """Refuses what is not a regular file, or has a format that is not read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"data.paths: {path}: cannot be read: {error.strerror} (a link that leads nowhere?)") from error
    if not stat.S_ISREG(mode):
        raise UserError(f"data.paths: {path}: not a regular file")
    kind, compression = format_of(path.name)
    if kind in UNREADABLE:
        shown = Path(path.stem).suffix if compression else path.suffix
        raise UserError(f"data.paths: {path}: {shown} files are not read; unpack it, or convert it to text")
    if compression and kind == ".parquet":
        raise UserError(f"data.paths: {path}: Parquet is compressed inside; unpack the {compression}")


def files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder and those inside it that are read, but hidden ones, such as the lab's own cache; links to
    folders are not followed."""

    def refuse(error: OSError) -> None:
        raise UserError(f"data.paths: {error.filename}: cannot be listed: {error.strerror}") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place) / name
            if (
                not name.startswith(".")
                and format_of(name).kind in (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
                and path.is_file()
            ):
                yield path
