"""What a document is, how a file's format is told, and bytes as text: what the readers of all formats share."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from training_lab.errors import UserError

COMPRESSED = (".gz", ".zst")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")


class Document(NamedTuple):
    """One text, and where in its file it is."""

    number: int
    """Its part, line or row in the file, from 0 (a line of JSONL: from 1, as editors count)."""
    text: str
    token_count: int | None = None
    """How many GPT-2 tokens the file says that it has."""


class Rejected(NamedTuple):
    """A document that is left out."""

    number: int
    reason: str


class Reading(NamedTuple):
    """How files become documents. Part of what a token cache is made from."""

    unit: Literal["file", "paragraph"] = "file"
    text_field: str = "text"
    invalid_text: Literal["refuse", "replace", "skip"] = "refuse"
    indentation: Literal["as it is", "four spaces as a tab"] = "as it is"


class Format(NamedTuple):
    """How a file is read, as its name says."""

    kind: str
    """`.jsonl`, `.parquet`, or another suffix: plain text."""
    compression: str
    """`.gz`, `.zst` or nothing."""

    @property
    def has_records(self) -> bool:
        return self.kind in (".jsonl", ".parquet")


def format_of(name: str) -> Format:
    """The format of a file; capitals do not matter."""
    path = Path(name.lower())
    compression = path.suffix if path.suffix in COMPRESSED else ""
    kind = Path(path.stem).suffix if compression else path.suffix
    return Format(".jsonl" if kind in JSONL_SUFFIXES else kind, compression)


def changed(path: Path) -> UserError:
    return UserError(f"{path}: changed while it was read; leave it alone, and give the command again")


def decoded(content: bytes, path: Path, reading: Reading, place: Callable[[int], str]) -> str | None:
    """Bytes as text, without a byte order mark; None if they are not UTF-8 and are to be skipped."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if reading.invalid_text == "refuse":
            mark = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
            raise not_utf8(path, place(mark + error.start)) from error
        return content.decode("utf-8-sig", errors="replace") if reading.invalid_text == "replace" else None


def is_utf16(path: Path, place: str) -> UserError:
    return UserError(f"{path}: {place}: not UTF-8 but UTF-16; convert it: iconv -f UTF-16 -t UTF-8")


def not_utf8(path: Path, place: str) -> UserError:
    return UserError(
        f"{path}: {place}: not UTF-8; convert the file, leave it out, or set data.invalid_text to replace or skip"
    )
