"""A run made from its copies: the same bytes, or none."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from copied_runs import (
    ADDRESS,
    PLENTY_S,
    QUICK,
    Notes,
    content,
    make_run,
    s3_server,
    save,
    starting,
    updates_there,
)
from fakes3 import BUCKET, Asked, FakeS3
from tiny import TRAINING

from training_lab import fetching
from training_lab.checkpoint import list_checkpoints, newest_good
from training_lab.copies import Copier
from training_lab.errors import LabError, UserError
from training_lab.fetching import fetch_copy
from training_lab.record import CHECKPOINTS, COPIES, LAST_CHECKPOINT, RunFolder


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def folder() -> RunFolder:
    return make_run("run-1")


@pytest.fixture
def start(folder: RunFolder) -> Iterator[Callable[..., Copier]]:
    with starting(folder) as begin:
        yield begin


@pytest.fixture
def kept(s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]) -> RunFolder:
    """A run with two checkpoints that is copied."""
    save(folder, 100)
    save(folder, 200)
    assert start().close(PLENTY_S) == []
    return folder


def fetch(notes: Notes | None = None) -> RunFolder:
    return fetch_copy(f"{ADDRESS}/run-1", Path("elsewhere"), notes or Notes(), QUICK)


def test_a_fetched_run_is_the_same_byte_for_byte_and_can_be_gone_on_from(kept: RunFolder) -> None:
    fetched = fetch()
    assert fetched.path == Path("elsewhere/run-1")
    expected = {name: one for name, one in content(kept).items() if "update-000100" not in name and name != COPIES}
    assert {name: one for name, one in content(fetched).items() if name != COPIES} == expected
    assert fetched.file(LAST_CHECKPOINT).read_bytes() == kept.file(LAST_CHECKPOINT).read_bytes()
    found, damaged = newest_good(fetched.file(CHECKPOINTS))
    assert found is not None
    assert (found.update, damaged) == (200, [])
    assert [path.name for path in Path("elsewhere").iterdir()] == ["run-1"]


def test_the_copies_of_what_was_not_fetched_stay_when_the_run_goes_on_elsewhere(
    kept: RunFolder, s3: FakeS3, start: Callable[..., Copier]
) -> None:
    fetched = fetch()
    s3.requests.clear()
    copier = start(of=fetched)
    assert copier.wait(PLENTY_S)
    assert [name for name in s3.puts() if CHECKPOINTS in name] == []
    save(fetched, 300, keep=1)
    assert copier.close(PLENTY_S) == []
    assert updates_there(s3) == {100, 300}


@pytest.mark.parametrize("fault", ["changed", "shorter", "missing", "undescribed", "redescribed"])
def test_a_damaged_copy_is_passed_over_for_the_one_before_it(fault: str, kept: RunFolder, s3: FakeS3) -> None:
    name = "kept/run-1/checkpoints/update-000200/"
    state, description = s3.get(f"{name}state.pt"), s3.get(f"{name}checkpoint.json")
    if fault == "changed":
        s3.set(f"{name}state.pt", state[:-1] + bytes([state[-1] ^ 1]))
    elif fault == "shorter":
        s3.set(f"{name}state.pt", state[:-1])
    elif fault == "redescribed":
        s3.set(f"{name}checkpoint.json", description.replace(b'"metrics_lines": 3', b'"metrics_lines": 4'))
    else:
        s3.remove(f"{name}{'state.pt' if fault == 'missing' else 'checkpoint.json'}")
    notes = Notes()
    fetched = fetch(notes)
    assert [one.update for one in list_checkpoints(fetched.file(CHECKPOINTS))] == [100]
    assert fetched.file(LAST_CHECKPOINT).read_bytes() == s3.get("kept/run-1/checkpoints/update-000100/state.pt")
    assert "update-000200" in notes.notes[0]


def test_a_run_without_one_good_checkpoint_is_not_made(kept: RunFolder, s3: FakeS3) -> None:
    for update in (100, 200):
        s3.set(f"kept/run-1/checkpoints/update-{update:06d}/state.pt", b"not it")
    with pytest.raises(LabError, match="no checkpoint there is good"):
        fetch()
    assert not Path("elsewhere/run-1").exists()


def test_a_changed_file_of_the_record_is_told(kept: RunFolder, s3: FakeS3) -> None:
    s3.set("kept/run-1/config.json", b'{"name": "another"}')
    notes = Notes()
    fetch(notes)
    assert notes.notes == ["config.json is not what it was when its copy was verified: look at it"]


def test_metrics_that_grew_after_they_were_verified_are_good(kept: RunFolder, s3: FakeS3) -> None:
    s3.set("kept/run-1/metrics.jsonl", s3.get("kept/run-1/metrics.jsonl") + b"{}\n")
    notes = Notes()
    fetch(notes)
    assert notes.notes == []


def test_what_cannot_be_fetched_is_refused(kept: RunFolder, s3: FakeS3) -> None:
    with pytest.raises(UserError, match="is here already"):
        fetch_copy(f"{ADDRESS}/run-1", kept.path.parent)
    for address in (f"{ADDRESS}/run-2", ADDRESS, f"s3://{BUCKET}"):
        with pytest.raises(UserError, match="no copy of a run"):
            fetch_copy(address, Path("elsewhere"))
    assert not Path("elsewhere").exists()


def test_names_that_lead_out_of_the_folder_are_not_followed(kept: RunFolder, s3: FakeS3) -> None:
    s3.set("kept/run-1/checkpoints/../../../evil", b"evil")
    s3.set("kept/run-1//evil", b"evil")
    fetch()
    assert list(Path().rglob("*evil*")) == []


def test_a_full_disk_leaves_no_run_and_the_next_try_goes_on(
    kept: RunFolder, s3: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any) -> None:
        if Path(file.name).name == "state.pt":
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(fetching, "sync_file", full)
        with pytest.raises(LabError, match="No space left on device"):
            fetch()
    assert [path.name for path in Path("elsewhere").iterdir()] == [".unfinished-run-1"]
    s3.requests.clear()
    fetched = fetch()
    assert [one for one in s3.requests if one.method == "GET" and one.path.endswith("state.pt")] == []
    assert newest_good(fetched.file(CHECKPOINTS))[0] is not None


def test_half_a_file_is_gone_on_from_and_a_wrong_half_is_replaced(kept: RunFolder, s3: FakeS3) -> None:
    state = s3.get("kept/run-1/checkpoints/update-000200/state.pt")
    for half in (state[:1000], b"wrong" * 200):
        aside = Path("elsewhere/.unfinished-run-1/checkpoints/update-000200")
        aside.mkdir(parents=True)
        (aside / "state.pt").write_bytes(half)
        (aside.parent / "update-000150").mkdir()
        (aside.parent / "update-000150/state.pt").write_bytes(b"of an earlier try")
        fetched = fetch()
        assert [path.name for path in fetched.file(CHECKPOINTS).iterdir()] == ["update-000200"]
        assert (fetched.file(CHECKPOINTS) / "update-000200/state.pt").read_bytes() == state
        fetched.path.rename(f"elsewhere/moved-{half[0]}")


def test_a_download_that_was_killed_leaves_no_run_and_is_gone_on_from(kept: RunFolder, s3: FakeS3) -> None:
    is_there = threading.Event()
    may_go_on = threading.Event()

    def stall(asked: Asked) -> None:
        if asked.method == "GET" and asked.path.endswith("state.pt"):
            is_there.set()
            may_go_on.wait(PLENTY_S)

    s3.before = stall
    program = f"""
        from pathlib import Path
        from training_lab.fetching import fetch_copy
        fetch_copy("{ADDRESS}/run-1", Path("elsewhere"))
    """
    paths = os.pathsep.join([str(TRAINING), str(TRAINING.parent / "runner")])
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}) as process:
        assert is_there.wait(PLENTY_S)
        process.send_signal(signal.SIGKILL)
    may_go_on.set()
    assert [path.name for path in Path("elsewhere").iterdir()] == [".unfinished-run-1"]
    s3.before = lambda _: None
    assert [one.update for one in list_checkpoints(fetch().file(CHECKPOINTS))] == [200]


def test_a_checkpoint_of_several_files_is_copied_and_fetched(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    path = folder.file(CHECKPOINTS) / "update-000100"
    (path / "parts").mkdir(parents=True)
    parts = {f"parts/__{number}_0.distcp": bytes([number]) * 5000 for number in range(3)} | {"state.pt": b"plain"}
    for name, part in parts.items():
        (path / name).write_bytes(part)
    listed = {name: {"bytes": len(part), "sha256": sha256(part).hexdigest()} for name, part in parts.items()}
    (path / "checkpoint.json").write_text(json.dumps({"files": listed}), encoding="utf-8")
    assert start().close(PLENTY_S) == []
    assert content(fetch()) == content(folder)
