"""From the bytes of one file to its documents: plain text and JSONL, also compressed; Parquet is in `parquet.py`.

Documents are read one after the other, so that a file's size does not matter; and the bytes that are parsed are
hashed on the way, so that they are the bytes that were promised.
"""

from __future__ import annotations

import codecs
import collections
import gzip
import hashlib
import importlib
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from experiment_runner.durable import sha256_of_file
from training_lab.data.documents import Document, Reading, Rejected, changed, decoded, format_of, is_utf16, not_utf8
from training_lab.data.parquet import parquet_documents
from training_lab.errors import UserError

READ_BYTES = 4 << 20
BLANK_LINES = re.compile(r"\n(?:\r?\n)+")
BYTE_ORDER_MARKS_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_documents(path: Path, name: str, sha256: str, reading: Reading) -> Iterator[Document | Rejected]:
    """The documents of the file at `path`, whose format its `name` says.

    Raises UserError if it cannot be used, or if it is not the file with this SHA-256.
    """
    kind, compression = format_of(name)
    try:
        if kind == ".parquet":
            yield from keep_unchanged(path, sha256, parquet_documents(path, reading))
        else:
            parse = jsonl_documents if kind == ".jsonl" else text_documents
            with VerifiedFile(path, compression, sha256) as file:
                yield from parse(file, path, reading)
    except FileNotFoundError as error:
        raise UserError(f"{path}: is gone") from error
    except errors_of_damage(compression) as error:
        raise UserError(f"{path}: its compressed data are cut off or damaged: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


class HashingReader(io.RawIOBase):
    """A file that hashes what is read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        self.digest.update(data)
        buffer[: len(data)] = data
        return len(data)


class VerifiedFile:
    """An open file, decompressed, for a `with` statement. Raises UserError at its end if its bytes did not have the
    hash."""

    def __init__(self, path: Path, compression: str, sha256: str) -> None:
        self.path, self.compression, self.sha256 = path, compression, sha256

    def __enter__(self) -> IO[bytes]:
        self.raw = HashingReader(open(self.path, "rb", buffering=0))
        self.whole = io.BufferedReader(self.raw, READ_BYTES)
        if self.compression == ".gz":
            return io.BufferedReader(gzip.GzipFile(fileobj=self.whole), READ_BYTES)
        if self.compression == ".zst":
            return io.BufferedReader(zstd_module().ZstdFile(self.whole), READ_BYTES)
        return self.whole

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self.raw.file:
            if kind is not None:
                return
            while self.whole.read(READ_BYTES):  # what follows the compressed data belongs to the file, too
                pass
            if self.raw.digest.hexdigest() != self.sha256:
                raise changed(self.path)


def zstd_module() -> Any:
    """Python's zstd, or what stands in for it before 3.14."""
    return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def errors_of_damage(compression: str) -> tuple[type[Exception], ...]:
    """What reading a damaged compressed file raises."""
    own: tuple[type[Exception], ...] = (zstd_module().ZstdError,) if compression == ".zst" else ()
    return (EOFError, gzip.BadGzipFile, zlib.error, *own)


def keep_unchanged(path: Path, sha256: str, documents: Iterator[Document | Rejected]) -> Iterator[Document | Rejected]:
    """The documents of a file that is read here and there and not from end to end: hashed before, and not to be
    touched until they are read."""
    before = path.stat()
    if sha256_of_file(path) != sha256:
        raise changed(path)
    yield from documents
    after = path.stat()
    if (before.st_size, before.st_mtime_ns, before.st_ino) != (after.st_size, after.st_mtime_ns, after.st_ino):
        raise changed(path)


# --- text ---


def text_documents(file: IO[bytes], path: Path, reading: Reading) -> Iterator[Document | Rejected]:
    """The whole file as one document, or each of its paragraphs."""
    if reading.unit == "file" or reading.invalid_text == "skip":
        content = file.read()
        if content.startswith(BYTE_ORDER_MARKS_UTF16) and reading.invalid_text != "skip":
            raise is_utf16(path, "byte 0")
        text = decoded(content, path, reading, lambda byte: f"byte {byte}")
        if text is None:
            yield Rejected(0, "not UTF-8")
            return
        pieces = iter([text])
    else:
        pieces = decoded_pieces(file, path, reading)
    if reading.unit == "file":
        parts: Iterator[str] = iter(["".join(pieces)])
    else:
        parts = filled(paragraphs(pieces))
    for number, part in enumerate(parts):
        yield Document(number, tabs_for_indentation(part) if reading.indentation != "as it is" else part)


def filled(parts: Iterator[str]) -> Iterator[str]:
    """The parts, or an empty one for a text without any, so that it is counted."""
    first = next(parts, "")
    return itertools.chain([first], parts)


def decoded_pieces(file: IO[bytes], path: Path, reading: Reading) -> Iterator[str]:
    """A file's text in pieces of a few MB, cut between characters."""
    done, rest = 0, b""
    errors = "replace" if reading.invalid_text == "replace" else "strict"
    while True:
        chunk = file.read(READ_BYTES)
        data = rest + chunk
        if done == 0 and data.startswith(BYTE_ORDER_MARKS_UTF16):
            raise is_utf16(path, "byte 0")
        try:
            text, used = codecs.utf_8_decode(data, errors, not chunk)
        except UnicodeDecodeError as error:
            raise not_utf8(path, f"byte {done + error.start}") from error
        yield text.removeprefix("\ufeff") if done == 0 else text
        done, rest = done + used, data[used:]
        if not chunk:
            return


def paragraphs(pieces: Iterator[str]) -> Iterator[str]:
    """The parts of a text up to and including each run of blank lines; joined again they are the text."""
    rest = ""
    for piece in pieces:
        text = rest + piece
        body = text.rstrip("\r\n")  # whether a run of blank lines goes on, the next piece says
        searched = len(rest.rstrip("\r\n"))  # before this there is no blank line
        *whole, last = split_paragraphs(body, searched) or [""]
        yield from whole
        rest = last + text[len(body) :]
    yield from split_paragraphs(rest)


def split_paragraphs(text: str, searched: int = 0) -> list[str]:
    """`paragraphs` of a text that is whole, and of which the first `searched` characters hold no blank line."""
    ends = [run.end() for run in BLANK_LINES.finditer(text, searched)]
    return [text[begin:end] for begin, end in itertools.pairwise([0, *ends, len(text)]) if begin < end]


def tabs_for_indentation(text: str) -> str:
    """Each four spaces at the beginning of a line as one tab.

    As spaces they would be a fifth of all text: a model that does no more than repeat its last token, as one with a
    tied head nearly does before training, would then look better than it is (by 0.2 nats with bytes as tokens).
    """
    return re.sub(r"(?m)^(?: {4})+", lambda spaces: "\t" * (len(spaces[0]) // 4), text)


# --- JSONL ---


def jsonl_documents(file: IO[bytes], path: Path, reading: Reading) -> Iterator[Document | Rejected]:
    """The text of each record; lines end at \\n alone, and empty ones are no records."""
    for number, line in enumerate(file, start=1):
        if number == 1 and line.startswith(BYTE_ORDER_MARKS_UTF16):
            raise is_utf16(path, "line 1")
        content = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip(b" \t\r\n")
        if not content:
            continue

        def place(byte: int, number: int = number) -> str:
            return f"line {number}"

        text = decoded(content, path, reading, place)
        if text is None:
            yield Rejected(number, "not UTF-8")
            continue
        value = field_of_record(text, f"{path}: line {number}", reading.text_field)
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # a \ud800 alone, which JSON can write and UTF-8 cannot
            if reading.invalid_text == "refuse":
                raise not_utf8(path, f"line {number}, character {error.start} of its text") from error
            if reading.invalid_text == "skip":
                yield Rejected(number, "not UTF-8")
                continue
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield Document(number, value)


def field_of_record(line: str, place: str, field: str) -> str:
    """The text of one record. Raises UserError if the line is no record that has it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            names = collections.Counter(name for name, _ in pairs)
            twice = names.most_common(1)[0][0]
            raise UserError(f"{place}: the key {twice!r} is there twice")
        return record

    try:
        record = json.loads(line, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: not a JSON object but {type(record).__name__}")
    if field not in record:
        has = ", ".join(sorted(record)[:10]) or "no key at all"
        raise UserError(f"{place}: has no key {field!r}, it has {has}; name the one with the text in data.text_field")
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{place}: {field!r} is not a text but {json.dumps(value)[:40]}")
    return value
