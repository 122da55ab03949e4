"""Parquet: one row a document, whatever type its column has and however its rows are grouped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import left_in_cache, line_of, read_files, refusal, refusal_to_read, source_of, tokenise_files, write

from training_lab.data import parquet
from training_lab.data.build import accepted
from training_lab.data.documents import Document
from training_lab.data.tokenizers import Gpt2Tokenizer
from training_lab.errors import UserError

TEXTS = ["하나\r\n", None, "둘\u2028\0", "", "셋😀", " \n", "\ufefffour"]
DOCUMENTS = [("#0", "하나\r\n"), ("#2", "둘\u2028\0"), ("#4", "셋😀"), ("#6", "four")]
REJECTED = [("#1", "null"), ("#3", "empty"), ("#5", "white space")]


def write_table(name: str, columns: dict[str, Any], **options: Any) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), name, **options)


def at(name: str, places: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(f"{name}{place}", what) for place, what in places]


def unchecked_string(*contents: bytes) -> Any:
    """A string column whose bytes nobody has checked, as other programs write them."""
    array = pa.array(contents, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


# --- rows ---

KINDS: dict[str, Callable[[], Any]] = {
    "string": lambda: pa.array(TEXTS, pa.string()),
    "large_string": lambda: pa.array(TEXTS, pa.large_string()),
    "string_view": lambda: pa.array(TEXTS, pa.string_view()),
    "binary": lambda: pa.array(TEXTS, pa.string()).cast(pa.binary()),
    "large_binary": lambda: pa.array(TEXTS, pa.string()).cast(pa.large_binary()),
    "binary_view": lambda: pa.array(TEXTS, pa.string()).cast(pa.binary()).cast(pa.binary_view()),
    "dictionary": lambda: pa.array(TEXTS, pa.string()).dictionary_encode(),
    "dictionary of binary": lambda: pa.array(TEXTS, pa.string()).cast(pa.binary()).dictionary_encode(),
    "dictionary with small indices": lambda: (
        pa.array(TEXTS).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.large_string()))
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("stores_schema", [True, False])
def test_a_column_of_any_type_of_text_gives_the_same_documents(kind: str, stores_schema: bool) -> None:
    write_table("a.parquet", {"text": KINDS[kind]()}, store_schema=stores_schema)
    found = read_files("a.parquet")
    assert found.documents == at("a.parquet", DOCUMENTS)
    assert found.rejected == at("a.parquet", REJECTED)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
def test_every_compression_of_parquet_is_read(compression: str) -> None:
    write_table("a.parquet", {"text": TEXTS}, compression=compression)
    assert read_files("a.parquet").documents == at("a.parquet", DOCUMENTS)


@pytest.mark.parametrize("rows", [1, 2, 3, 1024])
@pytest.mark.parametrize("group", [1, 2, 1_000_000])
@pytest.mark.parametrize("kind", ["string", "dictionary"])
def test_documents_do_not_depend_on_how_rows_are_grouped_and_read(
    group: int, rows: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "PARQUET_ROWS", rows)
    write_table("a.parquet", {"text": KINDS[kind](), "token_count": range(len(TEXTS))}, row_group_size=group)
    found = read_files("a.parquet")
    assert found.documents == at("a.parquet", DOCUMENTS)
    assert found.rejected == at("a.parquet", REJECTED)
    counts = [d.token_count for _, d in source_of("a.parquet").documents() if isinstance(d, Document)]
    assert counts == [0, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("rows", [1, 1024])
def test_groups_without_rows_are_passed_over(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "PARQUET_ROWS", rows)
    with pq.ParquetWriter("a.parquet", pa.schema([("text", pa.string())])) as writer:
        for texts in ([], ["a"], [], [], ["b", "c"], []):
            writer.write_table(pa.table({"text": pa.array(texts, pa.string())}))
    assert pq.read_metadata("a.parquet").num_row_groups == 6
    assert read_files("a.parquet").documents == [("a.parquet#0", "a"), ("a.parquet#1", "b"), ("a.parquet#2", "c")]


def test_one_large_group_is_read() -> None:
    texts = [f"document {number}" for number in range(5000)]
    write_table("a.parquet", {"text": texts}, row_group_size=1_000_000)
    assert pq.read_metadata("a.parquet").num_row_groups == 1
    assert read_files("a.parquet").texts == texts


@pytest.mark.parametrize("columns", [["text"], ["token_count", "id", "text"], ["text", "id"], ["id", "text", "text.x"]])
def test_other_columns_do_not_matter_whether_there_are_any_and_where_they_stand(columns: list[str]) -> None:
    write_table("a.parquet", {name: TEXTS if name == "text" else range(len(TEXTS)) for name in columns})
    assert read_files("a.parquet").documents == at("a.parquet", DOCUMENTS)


def test_files_of_different_schemas_are_read_together() -> None:
    write_table("1.parquet", {"text": ["a"], "date": ["2020"], "token_count": [1]})
    write_table("2.parquet", {"id": [7], "text": pa.array([b"b"], pa.binary())})
    write_table("3.parquet", {"text": pa.array(["c"]).dictionary_encode(), "token_count": ["not a number"]})
    write_table("4.parquet", {"text": pa.array([], pa.string())})
    write("5.jsonl", '{"text": "d"}\n')
    write("6.txt", "e")
    found = read_files(".")
    assert found.names == ["1.parquet#0", "2.parquet#0", "3.parquet#0", "5.jsonl#1", "6.txt"]
    assert found.texts == ["a", "b", "c", "d", "e"]


def test_another_column_may_hold_the_text() -> None:
    write_table("a.parquet", {"text": [1], "본문": ["yes"]})
    assert read_files("a.parquet", text_field="본문").texts == ["yes"]


@pytest.mark.parametrize("texts", [[], [None, "", " "]])
def test_files_without_a_document_are_refused_and_leave_nothing_behind(texts: list[str | None]) -> None:
    write_table("a.parquet", {"text": pa.array(texts, pa.string())})
    why = "1 null, 1 empty, 1 white space" if texts else "there is none"
    with pytest.raises(UserError) as caught:
        tokenise_files("a.parquet")
    assert line_of(caught.value) == f"data: the source files gives no document ({why}); give text"
    assert left_in_cache() == []


def test_rows_that_are_left_out_are_counted_in_the_manifest_of_the_tokens() -> None:
    write_table("a.parquet", {"text": TEXTS})
    manifest = tokenise_files("a.parquet").manifest
    assert manifest["documents"] == 4
    assert manifest["rejected"]["counts"] == {"null": 1, "empty": 1, "white space": 1}
    assert manifest["rejected"]["examples"] == [[name, reason] for name, reason in at("a.parquet", REJECTED)]


# --- files that are no Parquet ---


@pytest.mark.parametrize(
    ("damage", "hint"),
    [
        (lambda whole: whole[:-1], ""),
        (lambda whole: whole[:-8], ""),
        (lambda whole: whole[: len(whole) // 2], ""),
        (lambda whole: whole[:4], ""),
        (lambda whole: whole[1:], "it does not begin as one"),
        (lambda whole: b"", "it is empty"),
        (lambda whole: b"<!DOCTYPE html>\n<html><body>404</body></html>", "it is an HTML page"),
        (lambda whole: b"\n  <HTML><body>404</body></HTML>", "it is an HTML page"),
        (
            lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "it is a Git LFS pointer",
        ),
        (lambda whole: b"text\nx\n", "it does not begin as one"),
        (lambda whole: b"PAR1" + b"x" * 100 + b"PAR1", ""),
    ],
)
def test_a_file_that_is_no_whole_parquet_file_is_refused_with_what_it_is(
    damage: Callable[[bytes], bytes], hint: str
) -> None:
    write_table("a.parquet", {"text": TEXTS})
    write("a.parquet", damage(Path("a.parquet").read_bytes()))
    assert refusal("a.parquet").startswith(f"a.parquet: not a Parquet file, or damaged: {hint}")
    with pytest.raises(UserError, match="not a Parquet file, or damaged"):
        tokenise_files("a.parquet")
    assert left_in_cache() == []


def test_a_missing_column_is_refused_with_the_columns_that_are_there() -> None:
    write_table("good.parquet", {"text": ["a"]})
    write_table("z.parquet", {"id": [1], "Text": ["a"], "body": ["b"]})
    assert refusal(".") == (
        "z.parquet: has no column 'text', it has id, Text, body; name the one with the text in data.text_field"
    )


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ([1, 2], "int64"),
        ([1.5], "double"),
        ([True], "bool"),
        ([["a"]], "list<"),
        ([{"text": "a"}], "struct<"),
        (pa.array([b"abcd"], pa.binary(4)), "fixed_size_binary[4]"),
        (pa.array([1]).dictionary_encode(), "int64"),
    ],
)
def test_a_column_that_holds_no_text_is_refused_with_its_type(column: Any, kind: str) -> None:
    write_table("a.parquet", {"text": column})
    assert refusal("a.parquet").startswith(f"a.parquet: its column 'text' holds no text but {kind}")


@pytest.mark.parametrize("names", [["text", "text"], ["text", "id", "text"]])
def test_two_columns_of_the_same_name_are_refused(names: list[str]) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * len(names), names=names), "a.parquet")
    assert refusal("a.parquet").startswith("a.parquet: ")


def test_two_columns_of_token_counts_do_not_keep_the_text_from_being_read() -> None:
    names = ["text", "token_count", "token_count"]
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array([1]), pa.array([1])], names=names), "a.parquet")
    assert read_files("a.parquet").texts == ["a"]


# --- text that is not UTF-8 ---


@pytest.mark.parametrize("make", [lambda *rows: pa.array(rows, pa.binary()), unchecked_string])
@pytest.mark.parametrize("rows", [1, 1024])
def test_text_that_is_not_utf8_is_refused_with_its_row_or_replaced_or_left_out(
    make: Callable[..., Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "PARQUET_ROWS", rows)
    write_table("a.parquet", {"text": make(b"a", b"caf\xe9", "가".encode()[:2], b"d")})
    assert refusal("a.parquet").startswith("a.parquet: row 1, byte 3 of its text: not UTF-8")
    replaced = read_files("a.parquet", invalid_text="replace")
    assert replaced.documents == at("a.parquet", [("#0", "a"), ("#1", "caf\ufffd"), ("#2", "\ufffd"), ("#3", "d")])
    skipped = read_files("a.parquet", invalid_text="skip")
    assert skipped.documents == at("a.parquet", [("#0", "a"), ("#3", "d")])
    assert skipped.rejected == at("a.parquet", [("#1", "not UTF-8"), ("#2", "not UTF-8")])


def test_a_row_that_begins_as_utf16_does_is_a_row_that_is_not_utf8() -> None:
    write_table("a.parquet", {"text": [b"a", "b".encode("utf-16")]})
    assert refusal("a.parquet").startswith("a.parquet: row 1, byte 0 of its text: not UTF-8;")
    replaced = read_files("a.parquet", invalid_text="replace").documents
    assert replaced == at("a.parquet", [("#0", "a"), ("#1", "\ufffd\ufffdb\0")])
    assert read_files("a.parquet", invalid_text="skip").rejected == [("a.parquet#1", "not UTF-8")]


# --- the token counts of a file ---


def test_token_counts_that_are_wrong_are_reported_by_document() -> None:
    texts = ["Hello, world", "한국어", "", "four", "five"]
    right = [len(tokens) for tokens in Gpt2Tokenizer().encode(texts)]
    counts = [right[0], right[1] + 1, 99, None, -1]
    write_table("a.parquet", {"token_count": counts, "text": texts})
    manifest = tokenise_files("a.parquet", tokenizer="gpt2").manifest
    assert manifest["token_count_column"] == {
        "checked": 3,
        "mismatches": 2,
        "examples": [
            {"document": "a.parquet#1", "says": right[1] + 1, "has": right[1]},
            {"document": "a.parquet#4", "says": -1, "has": right[4]},
        ],
    }


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int64(), pa.uint64()])
def test_token_counts_that_are_right_are_checked_whatever_their_type(kind: Any) -> None:
    write_table("a.parquet", {"text": ["one", "two"], "token_count": pa.array([1, 1], kind)})
    manifest = tokenise_files("a.parquet", tokenizer="gpt2").manifest
    assert manifest["token_count_column"] == {"checked": 2, "mismatches": 0, "examples": []}


def test_many_wrong_token_counts_are_all_counted_and_some_are_named() -> None:
    write_table("a.parquet", {"text": ["one"] * 100, "token_count": [7] * 100})
    column = tokenise_files("a.parquet", tokenizer="gpt2").manifest["token_count_column"]
    assert (column["checked"], column["mismatches"], len(column["examples"])) == (100, 100, 10)


@pytest.mark.parametrize("columns", [{"token_count": ["1"]}, {"token_count": [1.0]}, {}, {"text.x": [7]}])
def test_a_column_that_holds_no_token_counts_is_not_taken_for_them(columns: dict[str, Any]) -> None:
    write_table("a.parquet", {**columns, "text": ["one"]})
    manifest = tokenise_files("a.parquet", tokenizer="gpt2").manifest
    assert manifest["token_count_column"] == {"checked": 0, "mismatches": 0, "examples": []}


def test_counts_of_gpt2_tokens_say_nothing_about_another_tokenizer() -> None:
    write_table("a.parquet", {"text": ["one"], "token_count": [1]})
    assert tokenise_files("a.parquet", tokenizer="byte").manifest["token_count_column"]["checked"] == 0


# --- files that do not stay as they were ---


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    write_table("new.parquet", {"text": ["x"] * 10})
    Path("new.parquet").replace(path)


def touch(path: Path) -> None:
    os.utime(path)


@pytest.mark.parametrize("change", [grow, replace, touch])
def test_a_file_that_is_changed_while_it_is_read_is_refused(
    change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "PARQUET_ROWS", 1)
    write_table("a.parquet", {"text": ["a"] * 10})
    os.utime("a.parquet", (10**9, 10**9))
    parts = accepted(source_of("a.parquet"), 0)
    next(parts)
    change(Path("a.parquet"))
    with pytest.raises(UserError) as caught:
        list(parts)
    assert line_of(caught.value).startswith("a.parquet: changed while it was read")


def test_a_file_that_was_changed_since_it_was_hashed_is_refused() -> None:
    write_table("a.parquet", {"text": ["aa"]})
    source = source_of("a.parquet")
    write_table("a.parquet", {"text": ["bb"]})
    assert refusal_to_read(source).startswith("a.parquet: changed while it was read")


def test_a_file_that_is_gone_when_it_is_to_be_read_is_named() -> None:
    write_table("a.parquet", {"text": ["a"]})
    source = source_of("a.parquet")
    Path("a.parquet").unlink()
    assert refusal_to_read(source) == "a.parquet: is gone"
