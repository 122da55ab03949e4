"""The run's folder: no half-written file, no change that goes unseen, no two processes in one run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import make_run
from tiny import TRAINING

from experiment_runner.durable import write_atomically
from training_lab import record
from training_lab.errors import LabError, UserError
from training_lab.record import RunFolder, create_run, find_run, list_runs


def ids(runs: list[RunFolder]) -> list[str]:
    return [run.run_id for run in runs]


# --- writing ---


def no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("old", [b"the old content", None])
def test_a_write_that_fails_leaves_the_old_file_whole_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, call: str, old: bytes | None
) -> None:
    path = Path("summary.json")
    if old is not None:
        path.write_bytes(old)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, no_space)
        with pytest.raises(LabError) as caught:
            write_atomically(path, b"x" * 12345)
    assert str(caught.value) == "summary.json: cannot write 12345 bytes: No space left on device"
    assert not isinstance(caught.value, UserError)
    assert [(file.name, file.read_bytes()) for file in Path().iterdir()] == ([] if old is None else [(path.name, old)])


def test_a_write_into_a_folder_that_is_not_there_is_told() -> None:
    with pytest.raises(LabError, match=r"^nowhere/summary\.json: cannot write 1 bytes: No such file or directory$"):
        write_atomically(Path("nowhere/summary.json"), b"x")


def test_a_file_takes_its_name_only_after_its_content_is_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        steps.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        assert source.read_bytes() == b"new"
        assert target.read_bytes() == b"old"
        steps.append("rename")
        replace(source, target)

    path = Path("summary.json")
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_atomically(path, b"new")
    assert steps == ["sync file", "rename", "sync folder"]
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("value", [float("nan"), {"loss": [1.0, float("inf")]}])
def test_what_is_not_a_number_is_never_written_and_the_old_file_stays(value: object) -> None:
    folder = make_run("a")
    before = folder.file(record.SUMMARY).read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.write_json(record.SUMMARY, value)
    assert folder.file(record.SUMMARY).read_bytes() == before


def test_json_is_written_as_people_read_it_and_read_back_the_same() -> None:
    folder = make_run("a")
    value = {"목적": "실험 \u2028", "loss": [0.1, 1e-300, None, True], "z": {}, "a": []}
    folder.write_json("x.json", value)
    text = folder.file("x.json").read_bytes().decode("utf-8")
    assert '  "목적": "실험' in text
    assert text.endswith("}\n")
    assert folder.read_json("x.json") == value


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1} x', b"\xff", b'{"a": "' + "가".encode()[:2] + b'"}'])
def test_a_damaged_file_is_told_by_name(content: bytes) -> None:
    folder = make_run("a")
    folder.file("x.json").write_bytes(content)
    with pytest.raises(LabError, match=r"^runs/a/x\.json: damaged: ") as caught:
        folder.read_json("x.json")
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_is_told_by_name() -> None:
    with pytest.raises(LabError, match=r"^runs/a/x\.json: missing from the run's folder$"):
        make_run("a").read_json("x.json")


# --- finding runs ---


def test_a_new_run_has_a_folder_of_its_own_and_a_name_that_any_system_takes() -> None:
    runs = [create_run(Path("a/runs"), "실험 1/../x:*?") for _ in range(5)]
    assert len(set(ids(runs))) == 5
    for run in runs:
        assert run.path.parent == Path("a/runs")
        assert run.run_id.startswith("실험-1-..-x-")
        assert run.file(record.CHECKPOINTS).is_dir()


def test_a_new_run_where_no_folder_can_be_made_is_refused() -> None:
    Path("runs").write_text("a file is in the way")
    with pytest.raises(UserError, match=r"^runs/a-.*: cannot be made: .*; choose another folder with --runs$"):
        create_run(Path("runs"), "a")


def test_runs_are_listed_newest_first_and_nothing_else_is() -> None:
    make_run("b-old", 1)
    make_run("a-new", 3)
    make_run("c-middle", 2)
    make_run("d-middle", 2)
    Path("runs/not-a-run").mkdir()
    Path("runs/file").write_text("x")
    assert ids(list_runs(Path("runs"))) == ["a-new", "d-middle", "c-middle", "b-old"]
    assert list_runs(Path("nowhere")) == []
    assert list_runs(Path("runs/file")) == []


@pytest.fixture
def three_runs() -> Path:
    make_run("smoke-20270101-aaaa", 1)
    make_run("smoke-20270102-bbbb", 2)
    make_run("기준-20270103-cccc", 3)
    Path("runs/folder").mkdir()
    return Path("runs")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("smoke-20270101-aaaa", "smoke-20270101-aaaa"),
        ("smoke-20270102", "smoke-20270102-bbbb"),
        ("기", "기준-20270103-cccc"),
        ("latest", "기준-20270103-cccc"),
        ("runs/smoke-20270101-aaaa", "smoke-20270101-aaaa"),
        ("runs/smoke-20270101-aaaa/", "smoke-20270101-aaaa"),
        ("./runs/../runs/기준-20270103-cccc", "기준-20270103-cccc"),
    ],
)
def test_a_run_is_found_by_its_id_the_beginning_of_one_a_path_or_latest(
    three_runs: Path, text: str, found: str
) -> None:
    run = find_run(three_runs, text)
    assert run.run_id == found
    assert run.file(record.CONFIG).is_file()


def test_a_run_is_found_from_inside_its_own_folder(three_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(three_runs / "smoke-20270101-aaaa")
    assert find_run(Path(".runs"), ".").read_json(record.CONFIG)["name"] == "smoke-20270101-aaaa"


def test_a_run_is_found_by_its_whole_id_even_if_another_begins_with_it(three_runs: Path) -> None:
    make_run("smoke-20270101-aaaa-copy", 9)
    assert find_run(three_runs, "smoke-20270101-aaaa").run_id == "smoke-20270101-aaaa"


def run_error(runs_dir: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        find_run(runs_dir, text)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smoke", "smoke: stands for 2 runs: smoke-20270102-bbbb, smoke-20270101-aaaa"),
        ("zzz", "zzz: no such run in runs; the newest there is 기준-20270103-cccc"),
        ("aaaa", "aaaa: no such run in runs"),
        ("runs/folder", "runs/folder: not the folder of a run: it has no config.json"),
        ("runs", "runs: not the folder of a run: it has no config.json"),
        ("runs/nowhere", "runs/nowhere: no such run in runs"),
    ],
)
def test_what_is_no_run_or_several_is_refused_by_name(three_runs: Path, text: str, expected: str) -> None:
    assert run_error(three_runs, text).startswith(expected)


@pytest.mark.parametrize("text", ["latest", "smoke"])
def test_where_there_are_no_runs_the_folder_is_named(text: str) -> None:
    message = run_error(Path("runs"), text)
    assert message.startswith(f"{text}: no such run, and none in runs;")


# --- the lock, and what became of a run ---

HOLD_THE_LOCK = """
import sys
from pathlib import Path
from training_lab.record import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def locked_run() -> Iterator[tuple[RunFolder, subprocess.Popen[str]]]:
    """A run in which another process says that it trains."""
    folder = make_run("a", state="running")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(TRAINING)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield folder, process
        process.kill()


def test_the_lock_is_seen_by_other_processes_and_kept_from_them(
    locked_run: tuple[RunFolder, subprocess.Popen[str]],
) -> None:
    folder, _ = locked_run
    assert folder.is_locked()
    assert folder.state() == "running"
    with pytest.raises(UserError, match=r"^runs/a: another process is training in this run now"), folder.lock():
        pytest.fail("two processes train in one run")
    assert folder.is_locked()


@pytest.mark.parametrize("end", ["kill", "terminate", "return"])
def test_the_lock_ends_with_its_process_however_that_ends(
    locked_run: tuple[RunFolder, subprocess.Popen[str]], end: str
) -> None:
    folder, process = locked_run
    if end == "return":
        process.communicate()
    else:
        getattr(process, end)()
        process.wait()
    assert not folder.is_locked()
    assert folder.state() == "killed"
    with folder.lock():
        assert folder.is_locked()
        assert folder.state() == "running"
    assert not folder.is_locked()


def test_the_lock_is_freed_by_an_error_inside_it() -> None:
    folder = make_run("a", state="running")
    with pytest.raises(ZeroDivisionError), folder.lock():
        _ = 1 / 0
    assert not folder.is_locked()


@pytest.mark.parametrize("state", ["finished", "interrupted", "stopped", "failed: non-finite"])
def test_a_run_that_said_how_it_ended_is_in_that_state(state: str) -> None:
    assert make_run("a", state=state).state() == state


@pytest.mark.parametrize("summary", [b"", b"{", b"[]", b"null", b"{}", b"\xff", None])
def test_a_run_whose_summary_says_nothing_is_damaged(summary: bytes | None) -> None:
    folder = make_run("a")
    folder.file(record.SUMMARY).unlink()
    if summary is not None:
        folder.file(record.SUMMARY).write_bytes(summary)
    assert folder.state() == "damaged"


def test_a_folder_that_is_gone_is_not_locked() -> None:
    assert not RunFolder(Path("nowhere")).is_locked()
