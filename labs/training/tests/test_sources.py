"""The sources that need no file of the user's, the standard library and made text; and what is recorded of files."""

from __future__ import annotations

import sysconfig
from hashlib import sha256
from pathlib import Path

import pytest
from reading import Read, read, read_files, source_of, write
from tiny import tiny

from training_lab.data.build import cache_identity
from training_lab.data.sources import Source, find_source
from training_lab.data.synthetic import synthetic_document
from training_lab.progress import NoProgress


def source(*overrides: str) -> Source:
    return find_source(tiny(*overrides).data, NoProgress())


# --- the standard library ---

NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
NOT_SOURCE |= {"pydoc_data", "encodings"}
"""The only folders that may be missing. Another one changes the data of every run on the standard library."""


@pytest.fixture(scope="module")
def stdlib() -> Read:
    return read(source("data.source=stdlib"))


def test_every_file_of_the_standard_library_is_read_or_reported(stdlib: Read) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    expected = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not NOT_SOURCE & set(path.relative_to(root).parts)
    }
    assert len(expected) > 100
    assert sorted(stdlib.file_names) == sorted(expected)
    assert sorted(stdlib.names + [name for name, _ in stdlib.rejected]) == sorted(expected)
    empty = {file["name"] for file in stdlib.files if file["bytes"] == 0}
    assert {name for name, reason in stdlib.rejected if reason == "empty"} == empty


def test_files_of_the_standard_library_are_recorded_with_the_hash_of_their_bytes(stdlib: Read) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in stdlib.files:
        content = (root / file["name"]).read_bytes()
        assert file == {"name": file["name"], "bytes": len(content), "sha256": sha256(content).hexdigest()}


def test_files_of_the_standard_library_come_in_the_order_of_their_names(stdlib: Read) -> None:
    assert stdlib.file_names == sorted(stdlib.file_names)
    assert stdlib.names == sorted(stdlib.names)


def test_the_standard_library_is_indented_with_tabs(stdlib: Read) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = dict(stdlib.documents)
    content = (root / "abc.py").read_bytes().decode("utf-8")
    assert "\n    " in content
    assert "\n    " not in texts["abc.py"]
    assert texts["abc.py"].replace("\t", "    ") == content


def test_a_file_of_the_standard_library_that_is_not_utf8_is_reported_and_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("lib/good.py", "x = 1\n")
    write("lib/package/bad.py", b"y = '\xe9'\n")
    write("lib/package/deeper/also_good.py", "z = 3\n")
    write("lib/empty.py", "")
    for folder in ("site-packages", "test", "__pycache__", "package/tests"):
        write(f"lib/{folder}/left_out.py", "w = 4\n")
    write("lib/data.txt", "not source")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    found = read(source("data.source=stdlib"))
    assert found.documents == [("good.py", "x = 1\n"), ("package/deeper/also_good.py", "z = 3\n")]
    assert found.rejected == [("empty.py", "empty"), ("package/bad.py", "not UTF-8")]
    assert found.file_names == ["empty.py", "good.py", "package/bad.py", "package/deeper/also_good.py"]


# --- what the manifest says of files ---


def test_every_file_is_in_the_manifest_with_its_size_and_hash_in_the_order_of_reading() -> None:
    contents = {
        "a.txt": b"",
        "b.jsonl": b'{"text": "x"}\n',
        "c.txt": b"\xef\xbb\xbfx\r\n",
        "d.md": b"same",
        "e.md": b"same",
    }
    for name, content in contents.items():
        write(name, content)
    assert read_files(".").files == [
        {"name": name, "bytes": len(content), "sha256": sha256(content).hexdigest()}
        for name, content in contents.items()
    ]


def test_nothing_is_opened_as_text_before_it_is_read() -> None:
    """The tokens of files may be there already; then their content does not matter a second time."""
    write("a.txt", b"\xff")
    write("b.jsonl", "garbage")
    write("c.parquet", "garbage")
    assert len(source_of(".").files) == 3


def identity(*paths: str, **settings: str) -> dict[str, object]:
    overrides = [f"data.{name}={value}" for name, value in settings.items()]
    config = tiny("data.source=files", f'data.paths=["{paths[0]}"]', *overrides).data
    return cache_identity(find_source(config, NoProgress()), config)


def test_what_a_cache_is_made_from_changes_with_a_byte_a_name_and_how_files_are_read() -> None:
    write("one/a.txt", "x")
    same = identity("one")
    assert identity("one/*.txt") == same
    assert identity("one/a.txt") == same
    others = [identity("one", documents="paragraph"), identity("one", invalid_text="skip")]
    others.append(identity("one", text_field="body"))
    Path("one/a.txt").write_bytes(b"y")
    others.append(identity("one"))
    Path("one/a.txt").write_bytes(b"x")
    Path("one/a.txt").rename("one/b.txt")
    others.append(identity("one"))
    assert all(other != same for other in others)


def test_the_manifest_says_which_paths_were_given_and_that_nobody_knows_their_licence() -> None:
    write("a.txt", "x")
    assert source_of("*.txt", ".").facts == {"paths": ["*.txt", "."], "licence": "not stated: your own files"}


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
    few, many = (read(source("data.source=synthetic", f"data.synthetic_documents={number}")) for number in (10, 40))
    assert many.documents[:10] == few.documents
    assert len(set(many.texts)) == 40
    assert many.names[:2] == ["synthetic-000000", "synthetic-000001"]
    assert many.files == []
    assert many.rejected == []


def test_synthetic_documents_are_64_to_4096_plain_characters() -> None:
    lengths = [len(synthetic_document(number).text) for number in range(2000)]
    assert min(lengths) >= 64
    assert max(lengths) <= 4096
    assert min(lengths) < 128
    assert max(lengths) > 2048
    assert all(synthetic_document(number).text.isascii() for number in range(200))
