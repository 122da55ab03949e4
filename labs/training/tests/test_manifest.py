"""The manifest of a run: it names whatever is missing, changed, damaged or new."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import make_run

from experiment_runner.durable import sha256_of_file
from training_lab import record
from training_lab.record import Finding, RunFolder


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.subject, finding.message) for finding in findings if not finding.is_good]


@pytest.fixture
def closed_run() -> RunFolder:
    """A run with files of several kinds, under its manifest."""
    folder = make_run("실험-1")
    folder.file("metrics.jsonl").write_bytes(b'{"kind": "event"}\n' * 100)
    folder.file("empty").write_bytes(b"")
    folder.file("한글 이름.txt").write_bytes("값".encode())
    folder.file(".hidden").write_bytes(b"hidden")
    (folder.path / "checkpoints/12").mkdir(parents=True)
    folder.file("checkpoints/12/state.pt").write_bytes(bytes(range(256)) * 10)
    os.link(folder.file("checkpoints/12/state.pt"), folder.file("checkpoint.pt"))
    folder.write_manifest()
    return folder


FILES = [
    ".hidden",
    "checkpoint.pt",
    "checkpoints/12/state.pt",
    "config.json",
    "empty",
    "metrics.jsonl",
    "summary.json",
    "한글 이름.txt",
]


def test_every_file_of_the_folder_is_in_the_manifest_with_size_and_hash(closed_run: RunFolder) -> None:
    files = closed_run.read_json(record.MANIFEST)["files"]
    assert list(files) == FILES
    for name, entry in files.items():
        assert entry == {
            "bytes": closed_run.file(name).stat().st_size,
            "sha256": sha256_of_file(closed_run.file(name)),
        }
    assert closed_run.read_json(record.MANIFEST)["run"] == "실험-1"


def test_an_unchanged_folder_is_found_good_file_by_file(closed_run: RunFolder) -> None:
    findings = closed_run.verify_manifest()
    assert [finding.subject for finding in findings] == FILES
    assert bad(findings) == []


@pytest.mark.parametrize("name", [name for name in FILES if name != "empty"])
def test_one_flipped_bit_is_found_anywhere(closed_run: RunFolder, name: str) -> None:
    path = closed_run.file(name)
    content = path.read_bytes()
    is_linked = "12" in name or name == "checkpoint.pt"
    expected = ["checkpoint.pt", "checkpoints/12/state.pt"] if is_linked else [name]
    for place in {0, len(content) // 2, len(content) - 1}:
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        message = "changed: same size, other content"
        assert bad(closed_run.verify_manifest()) == [(one, message) for one in expected]
    path.write_bytes(content)
    assert bad(closed_run.verify_manifest()) == []


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda f: os.truncate(f.file("metrics.jsonl"), 1799), ("metrics.jsonl", "changed: has 1799 bytes, had 1800")),
        (lambda f: os.truncate(f.file("metrics.jsonl"), 0), ("metrics.jsonl", "changed: has 0 bytes, had 1800")),
        (lambda f: f.file("empty").write_bytes(b"x"), ("empty", "changed: has 1 bytes, had 0")),
        (lambda f: f.file("config.json").unlink(), ("config.json", "missing")),
        (lambda f: f.file("empty").unlink(), ("empty", "missing")),
        (lambda f: f.file("extra").write_bytes(b""), ("extra", "not in the manifest")),
        (
            lambda f: f.file("checkpoints/12/extra.pt").write_bytes(b"x"),
            ("checkpoints/12/extra.pt", "not in the manifest"),
        ),
        (
            lambda f: f.file("checkpoints/manifest.json").write_bytes(b"{}"),
            ("checkpoints/manifest.json", "not in the manifest"),
        ),
    ],
    ids=["cut", "emptied", "filled", "missing", "empty one missing", "extra", "extra below", "another manifest"],
)
def test_what_changed_is_named_with_how(
    closed_run: RunFolder, damage: Callable[[RunFolder], object], finding: tuple[str, str]
) -> None:
    damage(closed_run)
    assert bad(closed_run.verify_manifest()) == [finding]


def test_a_folder_in_place_of_a_file_is_found(closed_run: RunFolder) -> None:
    closed_run.file("empty").unlink()
    closed_run.file("empty").mkdir()
    assert bad(closed_run.verify_manifest()) == [("empty", "missing")]


def test_a_renamed_file_is_both_missing_and_not_listed(closed_run: RunFolder) -> None:
    closed_run.file("metrics.jsonl").rename(closed_run.file("other.jsonl"))
    assert bad(closed_run.verify_manifest()) == [
        ("metrics.jsonl", "missing"),
        ("other.jsonl", "not in the manifest"),
    ]


def test_the_lock_and_what_a_crash_left_unfinished_are_no_content(closed_run: RunFolder) -> None:
    closed_run.file(".lock").write_bytes(b"")
    closed_run.file(".unfinished-summary.json").write_bytes(b"{")
    (closed_run.path / "checkpoints/.unfinished-15").mkdir()
    closed_run.file("checkpoints/.unfinished-15/state.pt").write_bytes(b"x")
    assert bad(closed_run.verify_manifest()) == []
    assert closed_run.content() == FILES


def test_a_file_under_two_names_is_read_once_and_listed_under_both(
    closed_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def watched(path: Path) -> str:
        read.append(path.name)
        return sha256_of_file(path)

    monkeypatch.setattr(record, "sha256_of_file", watched)
    closed_run.write_manifest()
    assert len(read) == len(FILES) - 1
    files = closed_run.read_json(record.MANIFEST)["files"]
    assert files["checkpoint.pt"] == files["checkpoints/12/state.pt"]
    assert files["checkpoint.pt"]["sha256"] == sha256_of_file(closed_run.file("checkpoint.pt"))


DAMAGED_MANIFESTS: dict[str, Any] = {
    "cut": b'{"run": "a", "files": {"config.json": {"by',
    "empty": b"",
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "a number": b"3",
    "no files": b'{"run": "a"}',
    "files are a list": b'{"files": []}',
    "files are nothing": b'{"files": null}',
    "an entry is a number": b'{"files": {"config.json": 3}}',
    "an entry is a text": b'{"files": {"config.json": "abc"}}',
    "an entry has no hash": b'{"files": {"config.json": {"bytes": 3}}}',
    "a size is a word": b'{"files": {"config.json": {"bytes": "many", "sha256": "0"}}}',
}


@pytest.mark.parametrize("damage", list(DAMAGED_MANIFESTS))
def test_a_damaged_manifest_is_found_bad(closed_run: RunFolder, damage: str) -> None:
    closed_run.file(record.MANIFEST).write_bytes(DAMAGED_MANIFESTS[damage])
    ((subject, message),) = bad(closed_run.verify_manifest())
    assert subject == record.MANIFEST
    assert message.startswith("damaged: ")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("state", "why"),
    [("running", "the run was not closed"), ("finished", "the file is gone"), ("interrupted", "the file is gone")],
)
def test_without_a_manifest_nothing_is_called_good(closed_run: RunFolder, state: str, why: str) -> None:
    closed_run.file(record.MANIFEST).unlink()
    closed_run.write_json(record.SUMMARY, {"state": state})
    findings = closed_run.verify_manifest()
    assert bad(findings) == [(record.MANIFEST, f"missing: {why}; nothing says what the files should be")]
    assert len(findings) == 1


def test_what_was_made_anew_is_brought_up_to_date_and_nothing_else(closed_run: RunFolder) -> None:
    before = closed_run.read_json(record.MANIFEST)["files"]
    closed_run.file("report.html").write_bytes(b"new")
    closed_run.file("empty").write_bytes(b"damaged")
    closed_run.refresh_manifest("report.html")
    after = closed_run.read_json(record.MANIFEST)["files"]
    assert after.pop("report.html") == {"bytes": 3, "sha256": sha256_of_file(closed_run.file("report.html"))}
    assert after == before
    assert [subject for subject, _ in bad(closed_run.verify_manifest())] == ["empty"]


def test_without_a_manifest_none_is_made(closed_run: RunFolder) -> None:
    closed_run.file(record.MANIFEST).unlink()
    closed_run.refresh_manifest("empty")
    assert not closed_run.file(record.MANIFEST).exists()


@pytest.mark.parametrize("content", [b"# what I saw", None])
def test_notes_may_be_changed_by_the_person_whose_they_are(content: bytes | None) -> None:
    folder = make_run("run")
    folder.file(record.NOTES).write_bytes(b"")
    folder.write_manifest()
    assert bad(folder.verify_manifest()) == []
    folder.file(record.NOTES).unlink()
    if content is not None:
        folder.file(record.NOTES).write_bytes(content)
    (finding,) = (one for one in folder.verify_manifest() if one.subject == record.NOTES)
    assert finding.is_good
    assert "yours to change" in finding.message
