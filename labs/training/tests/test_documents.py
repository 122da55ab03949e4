"""Documents from their sources: nothing is lost, nothing is read twice, and what cannot be read is named."""

from __future__ import annotations

import json
import os
import sysconfig
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny

from training_lab.config import DataConfig
from training_lab.data.documents import (
    Collection,
    read_documents,
    split_paragraphs,
    synthetic_document,
    tabs_for_indentation,
)
from training_lab.errors import UserError


def write(name: str, content: str | bytes) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))


def files_config(paths: tuple[str, ...], *overrides: str) -> DataConfig:
    return tiny("data.source=files", f"data.paths={json.dumps(paths)}", *overrides).data


def read_files(*paths: str, unit: str = "file") -> Collection:
    """What the source `files` makes of some paths."""
    return read_documents(files_config(paths, f"data.documents={unit}"))


def refusal(*paths: str) -> str:
    """The one line with which some paths are refused."""
    with pytest.raises(UserError) as caught:
        read_files(*paths)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def texts(collection: Collection) -> list[str]:
    return [document.text for document in collection.documents]


def names(collection: Collection) -> list[str]:
    return [document.name for document in collection.documents]


# --- the standard library ---

NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
NOT_SOURCE |= {"pydoc_data", "encodings"}
"""The only folders that may be missing. Another one changes the data of every run on the standard library."""


@pytest.fixture(scope="module")
def stdlib() -> Collection:
    return read_documents(tiny("data.source=stdlib").data)


def test_every_file_of_the_standard_library_is_read_or_reported(stdlib: Collection) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    expected = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not NOT_SOURCE & set(path.relative_to(root).parts)
    }
    listed = [file["name"] for file in stdlib.manifest["files"]]
    rejected = [file["name"] for file in stdlib.manifest["rejected"]]
    assert len(expected) > 100
    assert sorted(listed + rejected) == sorted(expected)
    empty = {file["name"] for file in stdlib.manifest["files"] if file["bytes"] == 0}
    assert set(names(stdlib)) == set(listed) - empty


def test_files_of_the_standard_library_are_recorded_with_the_hash_of_their_bytes(stdlib: Collection) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in stdlib.manifest["files"]:
        content = (root / file["name"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(content), sha256(content).hexdigest())


def test_files_of_the_standard_library_come_in_the_order_of_their_names(stdlib: Collection) -> None:
    listed = [file["name"] for file in stdlib.manifest["files"]]
    assert listed == sorted(listed)
    assert names(stdlib) == sorted(names(stdlib))


def test_a_file_of_the_standard_library_that_is_not_utf8_is_reported_and_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("lib/good.py", "x = 1\n")
    write("lib/package/bad.py", b"y = '\xe9'\n")
    write("lib/package/deeper/also_good.py", "z = 3\n")
    for folder in ("site-packages", "test", "__pycache__", "package/tests"):
        write(f"lib/{folder}/left_out.py", "w = 4\n")
    write("lib/data.txt", "not source")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    collection = read_documents(tiny("data.source=stdlib").data)
    assert names(collection) == ["good.py", "package/deeper/also_good.py"]
    assert collection.manifest["rejected"] == [{"name": "package/bad.py", "reason": "byte 5 is not UTF-8"}]


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


# --- the user's files ---


def test_a_file_a_folder_and_a_glob_are_read() -> None:
    for name in ("a.txt", "folder/b.md", "folder/deep/c.rst", "folder/deep/d.py", "folder/e.bin", "g1.text", "g2.text"):
        write(name, f"content of {name}")
    assert names(read_files("a.txt")) == ["a.txt"]
    assert names(read_files("folder")) == ["folder/b.md", "folder/deep/c.rst", "folder/deep/d.py"]
    assert names(read_files("g*.text")) == ["g1.text", "g2.text"]
    assert names(read_files("folder/**/*.py")) == ["folder/deep/d.py"]
    assert texts(read_files("folder", "a.txt"))[0] == "content of a.txt"


def test_the_absolute_path_of_a_file_is_read(tmp_path: Path) -> None:
    write("a.txt", "x")
    assert texts(read_files(str(tmp_path / "a.txt"))) == ["x"]


def test_a_path_may_begin_at_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write("home/a.txt", "x")
    assert texts(read_files("~/a.txt")) == ["x"]


NAMES_IN_BYTE_ORDER = [
    "A.txt",
    "a b.txt",
    "a-b.txt",
    "a.txt",
    "a/b.txt",
    "é.txt",
    "가/다.txt",
    "가.txt",
    "～.txt",
    "😀.txt",
]


def test_files_come_in_the_order_of_the_bytes_of_their_names() -> None:
    for name in NAMES_IN_BYTE_ORDER:
        write(name, name)
    expected = sorted(NAMES_IN_BYTE_ORDER, key=lambda name: name.encode("utf-8"))
    for paths in (["."], ["*.txt", "*/*.txt"], NAMES_IN_BYTE_ORDER, NAMES_IN_BYTE_ORDER[::-1]):
        collection = read_files(*paths)
        assert names(collection) == texts(collection) == expected
        assert [file["name"] for file in collection.manifest["files"]] == expected


@pytest.mark.parametrize("again", ["a.txt", "./a.txt", "*.txt", ".", "folder/../a.txt", "{here}/a.txt", "{here}"])
def test_a_file_that_is_listed_twice_is_read_once(again: str, tmp_path: Path) -> None:
    write("a.txt", "x")
    Path("folder").mkdir()
    collection = read_files("a.txt", again.format(here=tmp_path))
    assert texts(collection) == ["x"]
    assert len(collection.manifest["files"]) == 1


def test_two_files_with_the_same_content_are_two_documents() -> None:
    write("a.txt", "x")
    write("b.txt", "x")
    assert texts(read_files(".")) == ["x", "x"]


@pytest.mark.parametrize("name", ["a[1].txt", "what?.txt", "star*.txt", "한 글 😀.txt", "[!x].md", "'quoted'.txt"])
def test_a_file_that_exists_is_meant_even_if_its_name_looks_like_a_pattern(name: str) -> None:
    write(name, "x")
    write("a1.txt", "another")
    assert names(read_files(name)) == [name]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("\ufeff처음\n".encode(), "처음\n"),
        (b"a\r\nb\r\n\r\nc\r\n", "a\r\nb\r\n\r\nc\r\n"),
        (b"a\rb\n\rc", "a\rb\n\rc"),
        (b"a\0b\x1a\x0c", "a\0b\x1a\x0c"),
        ("\u2028\u0085é\u0065\u0301".encode(), "\u2028\u0085é\u0065\u0301"),
        ("a\ufeffb".encode(), "a\ufeffb"),
        (b"no end of line", "no end of line"),
        (b"   \n\n", "   \n\n"),
    ],
)
def test_the_text_is_the_files_bytes_as_utf8_without_the_byte_order_mark(content: bytes, text: str) -> None:
    write("a.txt", content)
    collection = read_files("a.txt")
    assert texts(collection) == [text]
    assert collection.manifest["files"] == [
        {"name": "a.txt", "bytes": len(content), "sha256": sha256(content).hexdigest()}
    ]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_is_in_the_manifest_and_no_document(content: bytes) -> None:
    write("empty.txt", content)
    write("full.txt", "x")
    collection = read_files(".")
    assert names(collection) == ["full.txt"]
    assert [file["name"] for file in collection.manifest["files"]] == ["empty.txt", "full.txt"]


@pytest.mark.parametrize(
    ("content", "byte"), [(b"ab\xffcd", 2), (b"\xed\xa0\x80", 0), ("가".encode()[:2], 0), ("ab가".encode("utf-16"), 0)]
)
def test_a_file_that_is_not_utf8_is_refused_with_its_name_and_the_byte(content: bytes, byte: int) -> None:
    write("good.txt", "x")
    write("폴더/bad.txt", content)
    assert refusal("good.txt", "폴더").startswith(f"폴더/bad.txt: byte {byte}: not UTF-8")


@pytest.mark.parametrize("path", ["nowhere.txt", "nowhere/*.txt", "*.nothing", "**/nowhere"])
def test_a_path_that_matches_nothing_is_refused_by_name(path: str) -> None:
    write("a.txt", "x")
    assert refusal("a.txt", path).startswith(f"data.paths: {path}: no such file or folder")


def test_a_folder_without_text_is_refused_by_name() -> None:
    write("folder/picture.png", b"\xff")
    message = refusal("folder")
    assert message.startswith("data.paths: folder: holds no .txt, .md, .rst, .py file")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".gz", ".zst", ".zip", ".bz2", ".xz"])
@pytest.mark.parametrize("path", ["data{suffix}", "*{suffix}"])
def test_a_format_that_is_no_plain_text_is_refused_by_name(suffix: str, path: str) -> None:
    write(f"data{suffix}", "even if its content is text")
    message = refusal(path.format(suffix=suffix))
    assert message.startswith(f"data.paths: data{suffix}: only plain text is read, not {suffix}")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("path", ["pipe.txt", "*.txt"])
def test_a_named_pipe_is_refused_and_never_waited_for(path: str) -> None:
    os.mkfifo("pipe.txt")
    assert refusal(path) == "data.paths: pipe.txt: not a regular file"


@pytest.mark.timeout(10)
def test_a_named_pipe_inside_a_folder_is_never_waited_for() -> None:
    write("folder/a.txt", "x")
    os.mkfifo("folder/pipe.txt")
    assert names(read_files("folder")) == ["folder/a.txt"]


@pytest.mark.parametrize("path", ["link.txt", "*.txt", "folder/*"])
def test_a_link_to_nothing_is_refused_by_name(path: str) -> None:
    Path("folder").mkdir()
    for place in (Path("link.txt"), Path("folder/link.txt")):
        place.symlink_to("gone")
    assert refusal(path).startswith("data.paths: ")


def test_a_file_that_the_system_refuses_to_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.txt", "x")

    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "a.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert refusal("a.txt") == "a.txt: cannot be read: Permission denied"


def test_a_folder_that_the_system_refuses_to_list_is_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("folder/a.txt", "x")
    write("folder/closed/b.txt", "y")
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if os.fspath(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert "folder/closed" in refusal("folder")


@pytest.mark.parametrize("path", ["글", "글/*.txt", "글/가.txt", "*/*.txt"])
def test_korean_paths_name_their_documents(path: str) -> None:
    write("글/가.txt", "안녕\n")
    assert read_files(path).documents == [("글/가.txt", "안녕\n")]


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
    ],
)
def test_a_paragraph_ends_after_its_blank_lines(text: str, parts: list[str]) -> None:
    assert split_paragraphs(text) == parts
    assert "".join(split_paragraphs(text)) == text


def test_lines_of_windows_end_paragraphs_too() -> None:
    parts = split_paragraphs("a\r\nb\r\n\r\nc\r\n")
    assert parts == ["a\r\nb\r\n\r\n", "c\r\n"]


def test_paragraphs_are_named_after_their_file_and_place() -> None:
    write("a.txt", "one\n\ntwo\n\nthree")
    write("b.txt", "alone")
    collection = read_files("a.txt", "b.txt", unit="paragraph")
    assert names(collection) == ["a.txt#0", "a.txt#1", "a.txt#2", "b.txt"]
    assert texts(collection) == ["one\n\n", "two\n\n", "three", "alone"]
    assert collection.manifest["unit"] == "paragraph"


# --- synthetic text ---

SYNTHETIC_SHA256 = {
    0: "66240800ecbb524cb4796f3d8e721937b1a5f1d9fe2049664ca3970fdf48a66a",
    1: "e100b3e93c566485ab86e4c498be77ec07945a77c8c5f2ac64251e02a3a9b3c5",
    2: "c6eb746eb6753318376b4c3d098b5e86cf4211f2fd40fd4d67dda7e2798ac7fc",
}


@pytest.mark.parametrize("number", list(SYNTHETIC_SHA256))
def test_synthetic_documents_are_the_same_bytes_on_every_machine(number: int) -> None:
    assert sha256(synthetic_document(number).text.encode()).hexdigest() == SYNTHETIC_SHA256[number], (
        "the golden losses, and every run on synthetic text that is to be repeated, rest on these bytes: "
        "another generator needs another name in the manifest"
    )


def test_more_synthetic_documents_begin_with_the_same_ones() -> None:
    few, many = (
        read_documents(tiny("data.source=synthetic", f"data.synthetic_documents={number}").data) for number in (10, 40)
    )
    assert many.documents[:10] == few.documents
    assert len({document.text for document in many.documents}) == 40


def test_synthetic_documents_are_64_to_4096_plain_characters() -> None:
    lengths = [len(synthetic_document(number).text) for number in range(2000)]
    assert min(lengths) >= 64
    assert max(lengths) <= 4096
    assert min(lengths) < 128
    assert max(lengths) > 2048
    assert all(synthetic_document(number).text.isascii() for number in range(200))
