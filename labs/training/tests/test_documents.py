"""Text files become documents byte by byte: whole, or cut into paragraphs, and never guessed at."""

from __future__ import annotations

import itertools
from hashlib import sha256
from pathlib import Path

import pytest
from reading import (
    compressed,
    left_in_cache,
    line_of,
    read_files,
    refusal,
    refusal_to_read,
    source_of,
    tokenise_files,
    write,
)

from training_lab.data import reading as readers
from training_lab.data.build import accepted
from training_lab.data.reading import paragraphs, split_paragraphs, tabs_for_indentation
from training_lab.errors import UserError

NOT_UTF8 = [
    (b"ab\xffcd", 2),
    ("naïve".encode("latin-1"), 2),
    (b"a\xc0\xaf", 1),  # overlong
    (b"\xed\xa0\x80", 0),  # a surrogate
    (b"a\xf4\x90\x80\x80", 1),  # beyond the last character
    ("가".encode()[:2], 0),  # cut off
    ("한글".encode()[:-1], 3),
    (b"\xef\xbb\xbfab\xff", 5),
]

# --- the text of a file ---


@pytest.mark.parametrize("unit", ["file", "paragraph"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("\ufeff처음\n".encode(), "처음\n"),
        ("\ufeff\ufeffx".encode(), "\ufeffx"),
        (b"a\r\nb\r\nc\r\n", "a\r\nb\r\nc\r\n"),
        (b"a\rb\n\rc", "a\rb\n\rc"),
        (b"a\0b\x1a\x0c\x7f\x1b[0m", "a\0b\x1a\x0c\x7f\x1b[0m"),
        ("\u2028\u0085é\u0065\u0301".encode(), "\u2028\u0085é\u0065\u0301"),
        ("a\ufeffb".encode(), "a\ufeffb"),
        ("😀👩‍👩‍👧‍👦".encode(), "😀👩‍👩‍👧‍👦"),
        (b"no end of line", "no end of line"),
        (b"x", "x"),
    ],
)
def test_the_text_is_the_files_bytes_as_utf8_without_the_byte_order_mark(content: bytes, text: str, unit: str) -> None:
    write("a.txt", content)
    found = read_files("a.txt", documents=unit)
    assert found.texts == [text]
    assert found.files == [{"name": "a.txt", "bytes": len(content), "sha256": sha256(content).hexdigest()}]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("unit", ["file", "paragraph"])
def test_an_empty_file_is_in_the_manifest_and_counted_and_no_document(content: bytes, unit: str) -> None:
    write("empty.txt", content)
    write("full.txt", "x")
    found = read_files(".", documents=unit)
    assert found.texts == ["x"]
    assert [reason for _, reason in found.rejected] == ["empty"]
    assert found.file_names == ["empty.txt", "full.txt"]


@pytest.mark.parametrize("content", [" ", "\n", "   \n\n", "\t\r\n", "\u3000\u2028", "\ufeff \n"])
def test_a_file_of_white_space_alone_is_counted_and_no_document(content: str) -> None:
    write("blank.txt", content)
    write("full.txt", " x ")
    found = read_files(".")
    assert found.documents == [("full.txt", " x ")]
    assert found.rejected == [("blank.txt", "white space")]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_text_is_the_text_that_was_compressed(suffix: str) -> None:
    content = "\ufeff처음\r\n\r\n둘째\n".encode()
    in_file = compressed(content, suffix)
    write(f"a.md{suffix}", in_file)
    found = read_files(f"a.md{suffix}")
    assert found.documents == [(f"a.md{suffix}", "처음\r\n\r\n둘째\n")]
    assert found.files[0]["sha256"] == sha256(in_file).hexdigest()
    assert read_files(f"a.md{suffix}", documents="paragraph").texts == ["처음\r\n\r\n", "둘째\n"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "half", "garbage", "other", "flipped"])
def test_damaged_compressed_text_is_refused_by_name(suffix: str, damage: str) -> None:
    text = b"".join(sha256(bytes([number])).hexdigest().encode() for number in range(200))
    whole = compressed(text, suffix)
    middle = len(whole) // 2
    content = {
        "cut": whole[:-1],
        "half": whole[:middle],
        "garbage": whole + b"garbage",
        "other": b"no compressed data",
        "flipped": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
    }[damage]
    write(f"a.txt{suffix}", content)
    assert refusal(f"a.txt{suffix}").startswith(f"a.txt{suffix}: its compressed data are cut off or damaged: ")


@pytest.mark.parametrize("name", ["a.jsonl.txt", "a.parquet.md", "set.parquet/read.txt", "set.jsonl/read.txt"])
def test_a_whole_text_file_is_named_without_a_place_whatever_else_is_in_its_name(name: str) -> None:
    write(name, "x")
    assert read_files(name).documents == [(name, "x")]


# --- text that is not UTF-8 ---


@pytest.mark.parametrize("unit", ["file", "paragraph"])
@pytest.mark.parametrize(("content", "byte"), NOT_UTF8)
def test_a_file_that_is_not_utf8_is_refused_with_its_name_and_the_byte(content: bytes, byte: int, unit: str) -> None:
    write("good.txt", "x")
    write("폴더/bad.txt", content)
    message = refusal("good.txt", "폴더", documents=unit)
    assert message.startswith(f"폴더/bad.txt: byte {byte}: not UTF-8")
    assert "data.invalid_text" in message


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(("content", "byte"), NOT_UTF8)
def test_the_byte_is_right_wherever_the_pieces_end_in_which_a_file_is_read(
    content: bytes, byte: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "READ_BYTES", size)
    before = "" if content.startswith(b"\xef\xbb\xbf") else "가\r\n\r\n나\n\n"
    write("bad.txt", before.encode() + content)
    place = len(before.encode()) + byte
    assert refusal("bad.txt", documents="paragraph").startswith(f"bad.txt: byte {place}: not UTF-8")


@pytest.mark.parametrize("unit", ["file", "paragraph"])
@pytest.mark.parametrize("content", [content for content, _ in NOT_UTF8])
def test_skipped_is_the_file_that_is_not_utf8_and_no_other(content: bytes, unit: str) -> None:
    write("bad.txt", content)
    write("good.txt", "x")
    found = read_files(".", documents=unit, invalid_text="skip")
    assert found.texts == ["x"]
    assert [reason for _, reason in found.rejected] == ["not UTF-8"]
    assert found.file_names == ["bad.txt", "good.txt"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 4 << 20])
@pytest.mark.parametrize("unit", ["file", "paragraph"])
@pytest.mark.parametrize("content", [content for content, _ in NOT_UTF8])
def test_replaced_is_what_is_not_utf8_and_nothing_else(
    content: bytes, unit: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "READ_BYTES", size)
    write("bad.txt", content)
    found = read_files("bad.txt", documents=unit, invalid_text="replace")
    assert found.texts == [content.decode("utf-8-sig", errors="replace")]
    assert "\ufffd" in found.texts[0]


@pytest.mark.parametrize("unit", ["file", "paragraph"])
@pytest.mark.parametrize("policy", ["refuse", "replace"])
@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
def test_utf16_is_refused_with_the_way_to_convert_it(mark: bytes, policy: str, unit: str) -> None:
    encoding = "utf-16-le" if mark == b"\xff\xfe" else "utf-16-be"
    write("a.txt", mark + "한글\n".encode(encoding))
    message = refusal("a.txt", documents=unit, invalid_text=policy)
    assert message == "a.txt: byte 0: not UTF-8 but UTF-16; convert it: iconv -f UTF-16 -t UTF-8"


def test_utf16_is_no_document_where_what_is_not_utf8_is_skipped() -> None:
    write("a.txt", "ab".encode("utf-16"))
    assert read_files("a.txt", invalid_text="skip")[:2] == ([], [("a.txt", "not UTF-8")])


# --- files that do not stay as they were ---


@pytest.mark.parametrize("unit", ["file", "paragraph"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_file_that_was_changed_since_it_was_hashed_is_refused(suffix: str, unit: str) -> None:
    write(f"a.txt{suffix}", compressed(b"one\n\ntwo", suffix))
    source = source_of(f"a.txt{suffix}", documents=unit)
    write(f"a.txt{suffix}", compressed(b"one\n\ntwO", suffix))
    assert refusal_to_read(source).startswith(f"a.txt{suffix}: changed while it was read")


def test_a_file_that_is_changed_while_it_is_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "READ_BYTES", 8)
    write("a.txt", "one\n\ntwo\n\n" * 10)
    source = source_of("a.txt", documents="paragraph")
    parts = accepted(source, 0)
    next(parts)
    with open("a.txt", "r+b") as file:
        file.seek(-3, 2)
        file.write(b"X")
    with pytest.raises(UserError) as caught:
        list(parts)
    assert line_of(caught.value).startswith("a.txt: changed while it was read")


def test_what_follows_the_compressed_data_belongs_to_the_file() -> None:
    content = compressed(b"x", ".gz") + bytes(20)  # some tapes and tools fill up with zeros
    write("a.txt.gz", content)
    assert read_files("a.txt.gz").texts == ["x"]
    source = source_of("a.txt.gz")
    write("a.txt.gz", content + bytes(1))
    assert refusal_to_read(source).startswith("a.txt.gz: changed while it was read")


def test_a_file_that_is_gone_when_it_is_to_be_read_is_named() -> None:
    path = write("a.txt", "x")
    source = source_of("a.txt")
    path.unlink()
    assert refusal_to_read(source) == "a.txt: is gone"


# --- what becomes of the documents ---


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_inputs_that_give_no_document_are_refused_with_the_reasons_and_leave_nothing_behind(tokenizer: str) -> None:
    write("a.txt", "")
    write("b.txt", "")
    write("c.txt", " \n")
    with pytest.raises(UserError) as caught:
        tokenise_files(".", tokenizer=tokenizer)
    message = line_of(caught.value)
    assert message == "data: the source files gives no document (2 empty, 1 white space); give text"
    assert left_in_cache() == []


def test_a_file_that_is_refused_while_tokens_are_made_leaves_nothing_behind() -> None:
    write("a.txt", "x")
    write("b.txt", b"\xff")
    with pytest.raises(UserError) as caught:
        tokenise_files(".")
    assert line_of(caught.value).startswith("b.txt: byte 0: not UTF-8")
    assert left_in_cache() == []


def test_documents_that_are_left_out_are_counted_in_the_manifest_of_the_tokens() -> None:
    for name, content in {"a": b"", "b": b" ", "c": b"\xff", "d": b"text", "e": b""}.items():
        write(f"{name}.txt", content)
    manifest = tokenise_files(".", invalid_text="skip").manifest
    assert manifest["documents"] == 1
    assert manifest["text_bytes"] == 4
    assert manifest["rejected"] == {
        "counts": {"empty": 2, "white space": 1, "not UTF-8": 1},
        "examples": [["a.txt", "empty"], ["b.txt", "white space"], ["c.txt", "not UTF-8"], ["e.txt", "empty"]],
    }


def test_a_text_that_spells_the_end_of_text_is_ordinary_text() -> None:
    write("alone.txt", "<|endoftext|>")
    write("inside.txt", "a<|endoftext|>b\n<|endoftext|>")
    cache = tokenise_files(".", tokenizer="gpt2")
    assert len(cache.documents) == 2
    assert 50256 not in cache.tokens


def test_a_text_of_one_character_is_a_document() -> None:
    write("a.txt", "x")
    cache = tokenise_files("a.txt")
    assert cache.tokens.tolist() == [ord("x")]


# --- paragraphs ---


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a\nb\n\nc\n", ["a\nb\n\n", "c\n"]),
        ("a\n\n\n\nb", ["a\n\n\n\n", "b"]),
        ("a\n\nb\n\n", ["a\n\n", "b\n\n"]),
        ("\n\na", ["\n\n", "a"]),
        ("a", ["a"]),
        ("a\n", ["a\n"]),
        ("", []),
        ("\n\n\n", ["\n\n\n"]),
        ("a\r\nb\r\n\r\nc\r\n", ["a\r\nb\r\n\r\n", "c\r\n"]),
        ("a\r\n\r\n\r\n\r\nb", ["a\r\n\r\n\r\n\r\n", "b"]),
    ],
)
def test_a_paragraph_ends_after_its_blank_lines(text: str, parts: list[str]) -> None:
    assert split_paragraphs(text) == parts
    assert "".join(split_paragraphs(text)) == text


PARAGRAPHS = [
    "a\nb\n\nc\n",
    "하나\n\n둘\n\n\n\n셋😀\n\n",
    "하나\r\n\r\n둘\r\n\r\n\r\n\r\n셋😀\r\n\r\n",
    "\ufeff\n\n처음\n\n",
    "é\n\n\né\n",
    "a\r\n\r\n\r\nb",
    "x" * 50 + "\n\n" + "y" * 50,
]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("text", PARAGRAPHS)
def test_paragraphs_do_not_depend_on_the_pieces_in_which_a_file_is_read(
    text: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "READ_BYTES", size)
    write("a.txt", text)
    whole = split_paragraphs(text.removeprefix("\ufeff"))
    assert read_files("a.txt", documents="paragraph").texts == [part for part in whole if not part.isspace()]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_paragraphs_do_not_depend_on_where_a_text_is_cut(newline: str) -> None:
    for lines in itertools.product("a\n", repeat=6):
        text = "".join(lines).replace("\n", newline)
        whole = split_paragraphs(text)
        assert "".join(whole) == text
        assert list(paragraphs(iter(text))) == whole, repr(text)
        for cut in range(len(text) + 1):
            assert list(paragraphs(iter([text[:cut], text[cut:]]))) == whole, (text[:cut], text[cut:])


def test_paragraphs_of_mixed_line_ends_do_not_depend_on_where_a_text_is_cut() -> None:
    for characters in itertools.product("a\r\n", repeat=6):
        text = "".join(characters)
        whole = split_paragraphs(text)
        for cut in range(len(text) + 1):
            assert list(paragraphs(iter([text[:cut], text[cut:]]))) == whole, (text[:cut], text[cut:])


def test_paragraphs_are_named_after_their_file_and_place() -> None:
    write("a.txt", "one\n\ntwo\n\nthree")
    write("b.txt", "alone")
    found = read_files("a.txt", "b.txt", documents="paragraph")
    assert found.documents == [
        ("a.txt#0", "one\n\n"),
        ("a.txt#1", "two\n\n"),
        ("a.txt#2", "three"),
        ("b.txt#0", "alone"),
    ]


def test_a_paragraph_of_white_space_is_counted_and_keeps_its_place() -> None:
    write("a.txt", "\n\none\n\n  \n\ntwo")
    found = read_files("a.txt", documents="paragraph")
    assert found.documents == [("a.txt#1", "one\n\n"), ("a.txt#3", "two")]
    assert found.rejected == [("a.txt#0", "white space"), ("a.txt#2", "white space")]


# --- indentation ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("    x\n", "\tx\n"),
        ("        x\n    y\n", "\t\tx\n\ty\n"),
        ("      x\n", "\t  x\n"),
        ("   x\n", "   x\n"),
        ("x    y\n", "x    y\n"),
        ("\t    x\n", "\t    x\n"),
        ("    ", "\t"),
        ("    \r\n    x", "\t\r\n\tx"),
        ("", ""),
    ],
)
def test_only_indentation_by_fours_becomes_tabs(text: str, expected: str) -> None:
    assert tabs_for_indentation(text) == expected


def test_the_indentation_of_a_persons_own_files_stays_as_it_is() -> None:
    write("a.py", "if x:\n    y\n")
    assert read_files("a.py").texts == [Path("a.py").read_text(encoding="utf-8")]
