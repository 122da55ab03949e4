"""Which files an entry of `data.paths` stands for: each once, in one order, and nothing that would block."""

from __future__ import annotations

import builtins
import io
import os
import socket
import tarfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reading import Read, read_files, refusal, refusal_to_read, source_of, write

from training_lab.data.paths import find_files

# --- what is found ---


def test_a_file_a_folder_and_a_glob_are_read() -> None:
    for name in ("a.txt", "folder/b.md", "folder/deep/c.rst", "folder/deep/d.py", "folder/e.bin", "g1.text", "g2.text"):
        write(name, f"content of {name}")
    assert read_files("a.txt").names == ["a.txt"]
    assert read_files("folder").names == ["folder/b.md", "folder/deep/c.rst", "folder/deep/d.py"]
    assert read_files("g*.text").names == ["g1.text", "g2.text"]
    assert read_files("folder/**/*.py").names == ["folder/deep/d.py"]
    assert read_files("folder", "a.txt").texts[0] == "content of a.txt"


def test_folders_give_records_and_compressed_files_too_and_leave_out_what_is_not_read() -> None:
    read_from_folders = ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.txt.gz", "f.md.zst", "g.PY", "h.txt"]
    for name in [*read_from_folders, "i.png", "j.zip", "k.gz", "l.json", "m.tar.gz", "n", ".txt"]:
        write(f"folder/{name}", b"")
    assert [name for name, _ in find_files(["folder"])] == [f"folder/{name}" for name in read_from_folders]


def test_a_file_that_is_named_is_read_as_text_whatever_its_ending_is() -> None:
    for name in ("README", "notes.log", "data.json", "a.gz.txt"):
        write(name, "x")
        assert read_files(name).documents == [(name, "x")]


@pytest.mark.parametrize("name", ["A.JSONL", "A.Jsonl"])
def test_capital_letters_in_an_ending_do_not_change_how_a_file_is_read(name: str) -> None:
    write(f"folder/{name}", '{"text": "a"}\n{"text": "b"}\n')
    assert read_files("folder").texts == ["a", "b"]
    assert read_files(f"folder/{name}").texts == ["a", "b"]


def test_the_absolute_path_of_a_file_is_read(tmp_path: Path) -> None:
    write("a.txt", "x")
    assert read_files(str(tmp_path / "a.txt")).texts == ["x"]


def test_a_path_may_begin_at_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write("home/a.txt", "x")
    assert read_files("~/a.txt").texts == ["x"]


def test_the_home_folder_of_somebody_who_does_not_exist_is_refused() -> None:
    assert refusal("~nobody-has-this-name/a.txt").startswith("data.paths: ~nobody-has-this-name/a.txt: ")


# --- in which order ---

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
        found = read_files(*paths)
        assert found.names == found.texts == found.file_names == expected


def test_a_folder_gives_the_same_order_whichever_way_its_names_are_composed() -> None:
    """A copy from a Mac has decomposed names; the same files must be the same source."""
    found = []
    for form in (unicodedata.normalize("NFC", "가.txt"), unicodedata.normalize("NFD", "가.txt")):
        for name in (form, "あ.txt", "～.txt"):  # in bytes between the two forms, and behind them
            write(name, unicodedata.normalize("NFC", name))
        found.append(read_files("."))
        Path(form).unlink()
    assert found[0] == found[1]


# --- each once ---


@pytest.mark.parametrize("again", ["a.txt", "./a.txt", "*.txt", ".", "folder/../a.txt", "{here}/a.txt", "{here}"])
def test_a_file_that_is_listed_twice_is_read_once(again: str, tmp_path: Path) -> None:
    write("a.txt", "x")
    Path("folder").mkdir()
    found = read_files("a.txt", again.format(here=tmp_path))
    assert found.texts == ["x"]
    assert len(found.files) == 1


def link_softly(target: str, name: str) -> None:
    Path(name).symlink_to(Path(target).absolute())


@pytest.mark.parametrize("link", [link_softly, os.link])
@pytest.mark.parametrize("paths", [["."], ["*.txt"], ["b.txt", "a.txt"], ["b.txt", "folder"]])
def test_a_file_that_is_linked_to_is_read_once_by_its_first_name(
    link: Callable[[str, str], None], paths: list[str]
) -> None:
    Path("folder").mkdir()
    write("a.txt", "x")
    for name in ("b.txt", "folder/c.txt"):
        link("a.txt", name)
    found = read_files(*paths)
    assert found.documents == [("a.txt" if "folder" not in paths else "b.txt", "x")]
    assert len(found.files) == 1


def test_two_files_with_the_same_content_are_two_documents() -> None:
    write("a.txt", "x")
    write("b.txt", "x")
    assert read_files(".").texts == ["x", "x"]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("path", ["folder", "folder/**/*.txt", "folder/*.txt"])
def test_a_folder_that_contains_itself_by_a_link_is_read_once(path: str) -> None:
    write("folder/a.txt", "x")
    Path("folder/again").symlink_to(".")
    assert read_files(path).documents == [("folder/a.txt", "x")]


@pytest.mark.timeout(5)
def test_a_glob_over_folders_that_contain_each_other_by_links_ends() -> None:
    write("folder/a.txt", "x")
    for name in ("one", "two", "three"):
        Path(f"folder/{name}").symlink_to(".")
    assert read_files("folder/**/*.txt").documents == [("folder/a.txt", "x")]


# --- names ---


@pytest.mark.parametrize(
    "name",
    ["a[1].txt", "what?.txt", "star*.txt", "한 글 😀.txt", "[!x].md", "'quoted'.txt", " a.txt", "a\\b.txt", "-a.txt"],
)
def test_a_file_that_exists_is_meant_even_if_its_name_looks_like_something_else(name: str) -> None:
    write(name, "x")
    write("a1.txt", "another")
    assert read_files(name).documents == [(name, "x")]


@pytest.mark.parametrize("path", ["글", "글/*.txt", "글/가.txt", "*/*.txt"])
def test_korean_paths_name_their_documents(path: str) -> None:
    write("글/가.txt", "안녕\n")
    assert read_files(path).documents == [("글/가.txt", "안녕\n")]


@pytest.mark.parametrize("path", [".", "*/*.txt", "{name}"])
def test_decomposed_names_are_composed_in_the_manifest(path: str) -> None:
    decomposed = unicodedata.normalize("NFD", "글/각.txt")
    write(decomposed, "x")
    found = read_files(path.format(name=decomposed))
    assert decomposed != "글/각.txt"
    assert found.documents == [("글/각.txt", "x")]
    assert found.file_names == ["글/각.txt"]


def test_a_name_that_is_not_utf8_is_refused() -> None:
    Path("folder").mkdir()
    Path(os.fsdecode(b"folder/caf\xe9.txt")).write_bytes(b"x")
    assert refusal("folder").endswith("its name is not UTF-8; rename the file")


def test_a_line_end_in_a_name_stays_on_the_line_of_the_message() -> None:
    write("a\nb.txt", b"\xff")
    assert refusal(".").startswith("a\\nb.txt: byte 0: not UTF-8")


# --- what is refused ---


@pytest.mark.parametrize("path", ["nowhere.txt", "nowhere/*.txt", "*.nothing", "**/nowhere", "a.txt/b.txt", "a\0b.txt"])
def test_a_path_that_matches_nothing_is_refused_by_name(path: str) -> None:
    write("a.txt", "x")
    shown = path.replace("\0", "\\x00")
    assert refusal("a.txt", path).startswith(f"data.paths: {shown}: no such file or folder")


def test_a_path_with_backslashes_that_matches_nothing_is_refused_with_a_hint() -> None:
    write("folder/a.txt", "x")
    message = refusal("folder\\a.txt")
    assert message.endswith("; paths are written with / here")
    assert not refusal("folder/b.txt").endswith("here")


def test_a_path_that_is_too_long_for_the_system_is_refused() -> None:
    assert refusal("x" * 300 + ".txt").startswith("data.paths: xxx")


@pytest.mark.parametrize("path", ["folder", "folder/", "fold*", "x.txt"])
def test_a_folder_without_text_is_refused_by_name(path: str) -> None:
    write("folder/picture.png", b"\xff")
    Path("x.txt").mkdir()
    message = refusal(path)
    assert message.startswith(f"data.paths: {path}: holds no file that is read from folders: ")
    assert all(suffix in message for suffix in (".txt", ".jsonl", ".parquet", ".gz", ".zst"))


@pytest.mark.parametrize("path", ["x.txt", ".", "*.txt"])
def test_a_folder_that_is_named_like_a_file_is_a_folder(path: str) -> None:
    write("x.txt/a.txt", "inside")
    assert read_files(path).documents == [("x.txt/a.txt", "inside")]


@pytest.mark.parametrize("suffix", [".zip", ".ZIP", ".bz2", ".xz", ".tar", ".tgz", ".7z", ".pdf", ".docx"])
@pytest.mark.parametrize("path", ["data{suffix}", "*{suffix}"])
def test_a_format_that_is_not_read_is_refused_by_name(suffix: str, path: str) -> None:
    write(f"data{suffix}", "even if its content is text")
    message = refusal(path.format(suffix=suffix))
    assert message.startswith(f"data.paths: data{suffix}: {suffix} files are not read")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_parquet_that_was_compressed_as_a_whole_is_refused(suffix: str) -> None:
    write(f"a.parquet{suffix}", b"x")
    for path in (".", f"a.parquet{suffix}"):
        assert refusal(path).startswith(f"data.paths: a.parquet{suffix}: Parquet is compressed inside")


def test_a_compressed_archive_is_refused_and_never_taken_for_a_text() -> None:
    write("a.txt", "x")
    with tarfile.open("a.tar.gz", "w:gz") as archive:
        archive.add("a.txt")
    assert "not read" in refusal("a.tar.gz")


def fifo(name: str) -> None:
    os.mkfifo(name)


def bound_socket(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [fifo, bound_socket])
@pytest.mark.parametrize("path", ["special.txt", "*.txt", "link.text"])
def test_a_pipe_or_socket_is_refused_and_never_waited_for(make: Callable[[str], None], path: str) -> None:
    make("special.txt")
    Path("link.text").symlink_to("special.txt")
    shown = path.replace("*", "special")
    assert refusal(path) == f"data.paths: {shown}: not a regular file"


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [fifo, bound_socket])
def test_a_pipe_or_socket_inside_a_folder_is_passed_over(make: Callable[[str], None]) -> None:
    write("folder/a.txt", "x")
    make("folder/special.txt")
    assert read_files("folder").names == ["folder/a.txt"]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/zer[o]"])
def test_a_device_is_refused_and_never_read(path: str) -> None:
    assert refusal(path).endswith(": not a regular file")


@pytest.mark.parametrize("path", ["link.txt", "*.txt", "folder/*"])
@pytest.mark.parametrize("target", ["gone", "link.txt"])
def test_a_link_to_nothing_or_to_itself_is_refused_by_name(path: str, target: str) -> None:
    Path("folder").mkdir()
    for place in (Path("link.txt"), Path("folder/link.txt")):
        place.symlink_to(target)
    shown = "folder/link.txt" if path.startswith("folder") else "link.txt"
    assert refusal(path).startswith(f"data.paths: {shown}: cannot be read: ")


def test_links_in_a_circle_are_refused_by_name() -> None:
    Path("a.txt").symlink_to("b.txt")
    Path("b.txt").symlink_to("a.txt")
    assert refusal("a.txt").startswith("data.paths: a.txt: cannot be read: ")


# --- what the system refuses ---


def refuse_to_open(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the permissions of a file forbade to read it, which nothing forbids root."""
    real_open: Callable[..., Any] = io.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(path, int) and Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", refuse)


@pytest.mark.parametrize("path", ["a.txt", ".", "*.txt"])
def test_a_file_that_the_system_refuses_to_read_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.txt", "x")
    write("b.txt", "x")
    refuse_to_open("a.txt", monkeypatch)
    assert refusal(path) == "a.txt: cannot be read: Permission denied"


def test_a_file_that_the_system_refuses_to_read_after_it_was_hashed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.txt", "x")
    source = source_of("a.txt")
    refuse_to_open("a.txt", monkeypatch)
    assert refusal_to_read(source) == "a.txt: cannot be read: Permission denied"


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
    assert refusal("folder") == "data.paths: folder/closed: cannot be listed: Permission denied"


def test_a_file_in_a_folder_that_may_not_be_entered_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    write("closed/a.txt", "x")
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and os.fspath(path) == "closed/a.txt":
            raise PermissionError(13, "Permission denied", path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert refusal("closed/a.txt").startswith("data.paths: closed/a.txt: cannot be read: Permission denied")


def test_what_is_found_does_not_depend_on_how_its_folder_is_written() -> None:
    write("folder/a.txt", "x")
    found: list[Read] = [read_files(path) for path in ("folder", "folder/", "./folder", "folder//", "folder/.")]
    assert all(other == found[0] for other in found)
    assert found[0].file_names == ["folder/a.txt"]
