"""Documents from the rows of a Parquet file, whose schema is checked here: pyarrow reads a missing column as none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from training_lab.data.documents import Document, Reading, Rejected, decoded
from training_lab.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

READ_BYTES = 4 << 20
PARQUET_ROWS = 1024
TOKEN_COUNT = "token_count"


def parquet_documents(path: Path, reading: Reading) -> Iterator[Document | Rejected]:
    """The text of each row; with it the GPT-2 token count, where a column says it as FineWeb's does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
            columns = [reading.text_field]
            check_text_column(file.schema_arrow, path, reading.text_field)
            schema = file.schema_arrow
            if schema.names.count(TOKEN_COUNT) == 1 and pa.types.is_integer(schema.field(TOKEN_COUNT).type):
                columns.append(TOKEN_COUNT)
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

    column = batch.column(reading.text_field)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    # As bytes, because nobody has checked yet that the column's text is UTF-8.
    contents = column.cast(pa.large_binary()).to_pylist()
    counts = batch.column(TOKEN_COUNT).to_pylist() if TOKEN_COUNT in batch.schema.names else [None] * len(contents)
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
