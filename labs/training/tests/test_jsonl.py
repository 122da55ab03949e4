"""JSONL: one record a line, and what is wrong is named with its line, as an editor counts it."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

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
from training_lab.errors import UserError

LINES = '{"text": "하나"}\n{"id": 7, "text": "둘\\nzwei"}\n{"text": "셋", "text_2": "four"}\n'
DOCUMENTS = [("#1", "하나"), ("#2", "둘\nzwei"), ("#3", "셋")]
SUFFIXES = ["", ".gz", ".zst"]


def lines(*records: Any) -> str:
    """Records as a program writes them."""
    return "".join(json.dumps(record) + "\n" for record in records)


def named(name: str) -> list[tuple[str, str]]:
    return [(f"{name}{place}", text) for place, text in DOCUMENTS]


# --- records ---


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_line_is_a_document_that_is_named_after_it(suffix: str) -> None:
    content = compressed(LINES.encode(), suffix)
    name = f"a.jsonl{suffix}"
    write(name, content)
    found = read_files(name)
    assert found.documents == named(name)
    assert found.files == [{"name": name, "bytes": len(content), "sha256": sha256(content).hexdigest()}]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("cut", [1, 20, 40])
def test_members_of_a_compressed_file_are_read_one_after_the_other_also_where_they_cut_a_line(
    suffix: str, cut: int
) -> None:
    content = LINES.encode()
    parts = [content[:cut], b"", content[cut:]]
    write(f"a.jsonl{suffix}", b"".join(compressed(part, suffix) for part in parts))
    assert read_files(f"a.jsonl{suffix}").documents == named(f"a.jsonl{suffix}")


@pytest.mark.parametrize("unit", ["file", "paragraph"])
def test_a_record_is_one_document_whatever_a_document_of_a_text_file_is(unit: str) -> None:
    write("a.jsonl", lines({"text": "one\n\ntwo"}))
    assert read_files("a.jsonl", documents=unit).documents == [("a.jsonl#1", "one\n\ntwo")]


@pytest.mark.parametrize(
    "content",
    [
        LINES.rstrip("\n"),
        LINES.replace("\n", "\r\n"),
        "\ufeff" + LINES,
        LINES.replace("\n", "  \t\n"),
        LINES.replace("{", " {"),
    ],
    ids=["no last line end", "CRLF", "byte order mark", "white space behind", "white space before"],
)
def test_what_stands_around_the_records_does_not_matter(content: str) -> None:
    write("a.jsonl", content)
    assert read_files("a.jsonl").documents == named("a.jsonl")


def test_blank_lines_are_no_records_and_are_counted_as_lines() -> None:
    write("a.jsonl", '\n\r\n{"text": "three"}\n \t\n\n{"text": "six"}\n\n')
    found = read_files("a.jsonl")
    assert found.documents == [("a.jsonl#3", "three"), ("a.jsonl#6", "six")]
    assert found.rejected == []


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\r"])
def test_a_line_ends_at_a_line_feed_alone(separator: str) -> None:
    escaped = json.dumps(separator)[1:-1] if separator < " " else separator  # JSON forbids control characters as such
    write("a.jsonl", f'{{"text": "a{escaped}b"}}\n{{"text": "c"}}\n')
    assert read_files("a.jsonl").documents == [("a.jsonl#1", f"a{separator}b"), ("a.jsonl#2", "c")]


def test_another_key_may_hold_the_text() -> None:
    write("a.jsonl", lines({"text": "no", "본문": "yes"}, {"본문": "yes, too"}))
    assert read_files("a.jsonl", text_field="본문").texts == ["yes", "yes, too"]


def test_escapes_in_a_record_are_the_characters_that_they_stand_for() -> None:
    write("a.jsonl", '{"text": "\\u00e9\\ud83d\\ude00\\u0000\\/\\t"}\n')
    assert read_files("a.jsonl").texts == ["é😀\0/\t"]


def test_other_keys_may_hold_anything() -> None:
    write("a.jsonl", '{"meta": {"text": [1, {"text": null}]}, "text": "x", "n": 1e400, "m": NaN, "o": ""}\n')
    assert read_files("a.jsonl").texts == ["x"]


def test_records_without_any_text_are_counted() -> None:
    write("a.jsonl", lines({"text": ""}, {"text": "x"}, {"text": " \n"}))
    found = read_files("a.jsonl")
    assert found.documents == [("a.jsonl#2", "x")]
    assert found.rejected == [("a.jsonl#1", "empty"), ("a.jsonl#3", "white space")]


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n', '{"text": " "}\n\n'])
def test_a_file_without_a_document_is_an_error_only_if_there_is_no_other(content: str) -> None:
    write("a.jsonl", content)
    with pytest.raises(UserError) as caught:
        tokenise_files("a.jsonl")
    assert line_of(caught.value).startswith("data: the source files gives no document")
    assert left_in_cache() == []
    write("b.jsonl", lines({"text": "x"}))
    assert tokenise_files(".").manifest["documents"] == 1


def test_a_line_of_20_mb_is_a_document() -> None:
    text = "가나다 " * 2_000_000
    write("a.jsonl", '{"text": "' + text + '"}\n{"text": "short"}\n')
    found = read_files("a.jsonl")
    assert found.names == ["a.jsonl#1", "a.jsonl#2"]
    assert found.texts[0] == text


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_documents_do_not_depend_on_the_pieces_in_which_a_file_is_read(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for suffix in SUFFIXES:
        write(f"{size}/a.jsonl{suffix}", compressed(b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode(), suffix))
    monkeypatch.setattr(readers, "READ_BYTES", size)
    for suffix in SUFFIXES:
        assert read_files(f"{size}/a.jsonl{suffix}").documents == named(f"{size}/a.jsonl{suffix}")


# --- lines that are no records ---


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("garbage", "not JSON"),
        ('{"text": "b"},', "not JSON"),
        ('{"text": "b"} {"text": "c"}', "not JSON"),
        ('{"text": "b"', "not JSON"),
        ('{"text": "b\tc"}', "not JSON"),
        ("{'text': 'b'}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["text"]', "not a JSON object but list"),
        ('"text"', "not a JSON object but str"),
        ("7", "not a JSON object but int"),
        ("null", "not a JSON object but NoneType"),
        ("{}", "has no key 'text', it has no key at all"),
        ('{"title": "x", "body": "y"}', "has no key 'text', it has body, title; name the one with the text"),
        ('{"Text": "x"}', "has no key 'text', it has Text"),
        ('{"meta": {"text": "x"}}', "has no key 'text', it has meta"),
        ('{"text": null}', "'text' is not a text but null"),
        ('{"text": 7}', "'text' is not a text but 7"),
        ('{"text": true}', "'text' is not a text but true"),
        ('{"text": ["x"]}', "'text' is not a text but [\"x\"]"),
        ('{"text": {"text": "x"}}', '\'text\' is not a text but {"text": "x"}'),
        ('{"text": "x", "text": "y"}', "the key 'text' is there twice"),
        ('{"text": "x", "id": 1, "id": 1}', "the key 'id' is there twice"),
    ],
)
def test_a_line_that_is_no_record_with_a_text_is_refused_with_its_number(line: str, problem: str, suffix: str) -> None:
    write(f"a.jsonl{suffix}", compressed(f'{{"text": "a"}}\n\n{line}\n{{"text": "z"}}\n'.encode(), suffix))
    for policy in ("refuse", "replace", "skip"):
        message = refusal(f"a.jsonl{suffix}", invalid_text=policy)
        assert message.startswith(f"a.jsonl{suffix}: line 3: {problem}")
        assert len(message) < 300


def test_the_message_about_a_broken_line_counts_lines_of_the_file_alone() -> None:
    write("a.jsonl", '{"text": "a"}\n\n{"text": oops}\n')
    message = refusal("a.jsonl")
    assert "line 3" in message
    assert "line 1" not in message


def test_garbage_behind_the_last_line_is_refused_with_its_number() -> None:
    write("a.jsonl", LINES + "\0\0\0\0")
    assert refusal("a.jsonl").startswith("a.jsonl: line 4: not JSON")


def test_a_file_that_was_cut_off_in_a_line_is_refused_with_its_number() -> None:
    write("a.jsonl", LINES.encode()[:-10])
    assert refusal("a.jsonl").startswith("a.jsonl: line 3: ")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("missing", [1, 4, 9, 40])
def test_a_compressed_file_that_was_cut_off_is_refused_by_name(suffix: str, missing: int) -> None:
    content = compressed(lines(*({"text": sha256(bytes([i])).hexdigest()} for i in range(100))).encode(), suffix)
    write(f"a.jsonl{suffix}", content[:-missing])
    assert refusal(f"a.jsonl{suffix}").startswith(f"a.jsonl{suffix}: its compressed data are cut off or damaged: ")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("content", [b"garbage", LINES.encode()])
def test_what_follows_compressed_data_is_refused_unless_it_is_compressed_too(suffix: str, content: bytes) -> None:
    write(f"a.jsonl{suffix}", compressed(LINES.encode(), suffix) + content)
    assert refusal(f"a.jsonl{suffix}").startswith(f"a.jsonl{suffix}: its compressed data are cut off or damaged: ")


# --- text that is not UTF-8 ---

LATIN1 = b'{"text": "a"}\n{"text": "caf\xe9"}\n{"text": "c"}\n'
SURROGATE = b'{"text": "a"}\n{"text": "caf\\ud800"}\n{"text": "c"}\n'


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [LATIN1, SURROGATE], ids=["latin-1", "lone surrogate"])
def test_text_that_is_not_utf8_is_refused_with_its_line_or_replaced_or_left_out(content: bytes, suffix: str) -> None:
    name = f"a.jsonl{suffix}"
    write(name, compressed(content, suffix))
    message = refusal(name)
    assert message.startswith(f"{name}: line 2")
    assert "not UTF-8" in message
    assert "data.invalid_text" in message

    replaced = read_files(name, invalid_text="replace")
    assert replaced.names == [f"{name}#1", f"{name}#2", f"{name}#3"]
    assert replaced.texts[1].rstrip("\ufffd") == "caf"
    assert "caf\ufffd" in replaced.texts[1]

    skipped = read_files(name, invalid_text="skip")
    assert skipped.documents == [(f"{name}#1", "a"), (f"{name}#3", "c")]
    assert skipped.rejected == [(f"{name}#2", "not UTF-8")]


def test_a_lone_surrogate_is_refused_with_its_character() -> None:
    write("a.jsonl", SURROGATE)
    assert refusal("a.jsonl").startswith("a.jsonl: line 2, character 3 of its text: not UTF-8")


@pytest.mark.parametrize("policy", ["refuse", "replace", "skip"])
def test_a_lone_surrogate_outside_the_text_is_no_problem(policy: str) -> None:
    write("a.jsonl", '{"id": "\\udfff", "text": "x"}\n')
    assert read_files("a.jsonl", invalid_text=policy).texts == ["x"]


@pytest.mark.parametrize("policy", ["refuse", "replace", "skip"])
@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
def test_utf16_is_refused_with_the_way_to_convert_it(mark: bytes, policy: str) -> None:
    encoding = "utf-16-le" if mark == b"\xff\xfe" else "utf-16-be"
    write("a.jsonl", mark + LINES.encode(encoding))
    message = refusal("a.jsonl", invalid_text=policy)
    assert message == "a.jsonl: line 1: not UTF-8 but UTF-16; convert it: iconv -f UTF-16 -t UTF-8"


# --- files that do not stay as they were ---


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_was_changed_since_it_was_hashed_is_refused(suffix: str) -> None:
    name = f"a.jsonl{suffix}"
    write(name, compressed(b'{"text": "a"}\n', suffix))
    source = source_of(name)
    write(name, compressed(b'{"text": "b"}\n', suffix))
    assert refusal_to_read(source).startswith(f"{name}: changed while it was read")


@pytest.mark.parametrize("is_longer", [False, True])
def test_a_file_that_is_changed_while_it_is_read_is_refused(is_longer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "READ_BYTES", 16)
    content = lines(*({"text": str(number)} for number in range(100, 200)))
    write("a.jsonl", content)
    parts = accepted(source_of("a.jsonl"), 0)
    next(parts)
    if is_longer:
        with open("a.jsonl", "a", encoding="utf-8") as file:
            file.write(lines({"text": "one more"}))
    else:
        with open("a.jsonl", "r+b") as other:
            other.write(content.replace("199", "999").encode())
    with pytest.raises(UserError) as caught:
        list(parts)
    assert line_of(caught.value).startswith("a.jsonl: changed while it was read")


def test_a_file_may_be_put_in_the_place_of_one_that_is_being_read() -> None:
    """What was opened stays what it was: only the bytes that are read must be those that were promised."""
    write("a.jsonl", lines({"text": "a"}, {"text": "b"}))
    parts = accepted(source_of("a.jsonl"), 0)
    next(parts)
    write("other.jsonl", lines({"text": "c"}))
    Path("other.jsonl").replace("a.jsonl")
    assert len(list(parts)) == 1
