"""From the bytes of one file to its documents: plain text, JSONL and Parquet, the first two also compressed.

Documents are read one after the other, so that a file's size does not matter; and the bytes that are parsed are
hashed on the way, so that they are the bytes that were promised.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

from training_lab.errors import UserError
from training_lab.identity import sha256_of_file

if TYPE_CHECKING:
    import pyarrow as pa

COMPRESSED = (".gz", ".zst")
READ_BYTES = 4 << 20
PARQUET_ROWS = 1024
BYTE_ORDER_MARKS_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


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
    if path.suffix in COMPRESSED:
        return Format(Path(path.stem).suffix, path.suffix)
    return Format(path.suffix, "")


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


def changed(path: Path) -> UserError:
    return UserError(f"{path}: changed while it was read; leave it alone, and give the command again")


# --- text ---


def text_documents(file: IO[bytes], path: Path, reading: Reading) -> Iterator[Document | Rejected]:
    """The whole file as one document, or each of its paragraphs."""
    if reading.unit == "file" or reading.invalid_text == "skip":
        content = file.read()
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


def decoded(content: bytes, path: Path, reading: Reading, place: Callable[[int], str]) -> str | None:
    """Bytes as text, without a byte order mark; None if they are not UTF-8 and are to be skipped."""
    if content.startswith(BYTE_ORDER_MARKS_UTF16):
        if reading.invalid_text == "skip":
            return None
        raise is_utf16(path, place(0))
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


def decoded_pieces(file: IO[bytes], path: Path, reading: Reading) -> Iterator[str]:
    """A file's text in pieces of a few MB, cut between characters."""
    done, rest = 0, b""
    errors = "replace" if reading.invalid_text == "replace" else "strict"
    while True:
        chunk = file.read(READ_BYTES)
        data = rest + chunk
        if done == 0 and data.startswith(BYTE_ORDER_MARKS_UTF16):
            decoded(data, path, reading, lambda byte: f"byte {byte}")
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
        *whole, last = split_paragraphs(body) or [""]
        yield from whole
        rest = last + text[len(body) :]
    yield from split_paragraphs(rest)


def split_paragraphs(text: str) -> list[str]:
    """`paragraphs` of a text that is whole."""
    ends = [run.end() for run in re.finditer(r"\n(?:\r?\n)+", text)]
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
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
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


# --- Parquet ---


def parquet_documents(path: Path, reading: Reading) -> Iterator[Document | Rejected]:
    """The text of each row; with it the GPT-2 token count, where a column says it as FineWeb's does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
            columns = [reading.text_field]
            check_text_column(file.schema_arrow, path, reading.text_field)
            schema = file.schema_arrow
            if schema.names.count("token_count") == 1 and pa.types.is_integer(schema.field("token_count").type):
                columns.append("token_count")
            first = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=columns, use_threads=False):
                yield from batch_documents(batch, first, path, reading)
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file, or damaged: {hint_of(path) or error}") from error


def num_rows(path: Path) -> int:
    """The rows of a Parquet file, 0 if it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError):
        return 0


def check_text_column(schema: pa.Schema, path: Path, name: str) -> None:
    """Raises UserError unless a column of this name holds text. pyarrow reads a missing column as none at all."""
    import pyarrow as pa

    if schema.names.count(name) > 1:
        raise UserError(f"{path}: has several columns {name!r}; leave one of them")
    if name not in schema.names:
        raise UserError(
            f"{path}: has no column {name!r}, it has {', '.join(schema.names)}; name the one with the text in "
            "data.text_field"
        )
    kind = schema.field(name).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    readable = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary)
    if not any(is_kind(value) for is_kind in (*readable, pa.types.is_large_binary, pa.types.is_binary_view)):
        raise UserError(f"{path}: its column {name!r} holds no text but {kind}")


def batch_documents(batch: pa.RecordBatch, first: int, path: Path, reading: Reading) -> Iterator[Document | Rejected]:
    """The documents of some rows, of which the first is row number `first` of the file."""
    import pyarrow as pa

    column = batch.column(0)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    # As bytes, because nobody has checked yet that the column's text is UTF-8.
    contents = column.cast(pa.large_binary()).to_pylist()
    counts = batch.column(1).to_pylist() if batch.num_columns > 1 else [None] * len(contents)
    for number, (content, count) in enumerate(zip(contents, counts, strict=True), start=first):
        if content is None:
            yield Rejected(number, "null")
            continue

        def place(byte: int, number: int = number) -> str:
            return f"row {number}, byte {byte} of its text"

        text = decoded(content, path, reading, place)
        yield Rejected(number, "not UTF-8") if text is None else Document(number, text, count)


def hint_of(path: Path) -> str:
    """What a file that is no Parquet really is, if that can be seen."""
    with open(path, "rb") as file:
        head = file.read(64)
    if not head:
        return "it is empty"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it is an HTML page, such as a server sends with an error"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file that it stands for"
    return "it does not begin as one" if not head.startswith(b"PAR1") else ""
