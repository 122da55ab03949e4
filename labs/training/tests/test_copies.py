"""Copies at an address: whole or not there, verified before anything older goes, and never in training's way."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fakes3 import BUCKET, Asked, FakeS3
from tiny import TRAINING

from training_lab import fetching
from training_lab.checkpoint import list_checkpoints, newest_good, remove_old, save_checkpoint
from training_lab.config import CheckpointConfig
from training_lab.copies import Copier, Waits
from training_lab.copying import files_of
from training_lab.errors import LabError, UserError
from training_lab.fetching import fetch_copy
from training_lab.progress import NoProgress
from training_lab.record import CHECKPOINTS, COPIES, LAST_CHECKPOINT, RunFolder
from training_lab.storage import Patience, Storage, check_address, need_copies

ADDRESS = f"s3://{BUCKET}/kept"
SECRET = "a-secret-of-this-test-alone"
QUICK = Patience(connect_s=2.0, read_s=5.0, attempts=1)
SOON = Waits(0.02, 0.1)
PLENTY_S = 60.0
FACTS = {"metrics_lines": 3, "weights_sha256": "0" * 64}


class Notes(NoProgress):
    """Keeps what a person would be told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with FakeS3() as server:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "no_proxy": "*",
        }.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def folder() -> RunFolder:
    return make_run("run-1")


@pytest.fixture
def start(folder: RunFolder) -> Iterator[Callable[..., Copier]]:
    """Starts copiers of the run, and ends them after the test."""
    copiers = []

    def begin(address: str = ADDRESS, of: RunFolder = folder) -> Copier:
        copiers.append(Copier(of, address, SOON, QUICK))
        return copiers[-1]

    yield begin
    for copier in copiers:
        copier.close(0)
        copier._thread.join(30)


def make_run(run_id: str) -> RunFolder:
    run = RunFolder(Path(".runs") / run_id)
    run.file(CHECKPOINTS).mkdir(parents=True)
    run.write_json("config.json", {"name": run_id})
    run.file("notes.md").write_text("# Why\n", encoding="utf-8")
    run.file("metrics.jsonl").write_text('{"kind": "event", "event": "start"}\n', encoding="utf-8")
    run.file("tensorboard").mkdir()
    run.file("tensorboard/events").write_bytes(bytes(range(256)))
    return run


def save(run: RunFolder, update: int, keep: int = 2, best: int | None = None) -> None:
    """What training does: a checkpoint, after which the old ones go."""
    state = {"model": {"weights": torch.full((1000,), float(update))}, "progress": {"update": update}}
    newest = save_checkpoint(run.file(CHECKPOINTS), update, state, FACTS)
    remove_old(run.file(CHECKPOINTS), CheckpointConfig(keep_last=keep), best, newest)


def known(run: RunFolder) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(run.file(COPIES).read_text("utf-8")))


def states(run: RunFolder) -> dict[str, str]:
    return {update: entry["state"] for update, entry in known(run)["checkpoints"].items()}


def copied(s3: FakeS3, run_id: str = "run-1") -> dict[str, bytes]:
    """The copy of a run, by name."""
    beginning = f"kept/{run_id}/"
    return {name.removeprefix(beginning): s3.get(name) for name in s3.names() if name.startswith(beginning)}


def content(run: RunFolder) -> dict[str, bytes]:
    """The files of a run as they are copied."""
    names = [path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()]
    return {name: run.file(name).read_bytes() for name in names if name not in (LAST_CHECKPOINT, ".lock")}


def updates_there(s3: FakeS3) -> set[int]:
    """The checkpoints of which there is a whole copy."""
    return {int(name.split("-")[1][:6]) for name in copied(s3) if name.endswith("/checkpoint.json")}


def events(copier: Copier, event: str) -> list[dict[str, Any]]:
    return [one for one in copier.news() if one["event"] == event]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PLENTY_S
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


def unreachable() -> str:
    """The address of a server that is not there."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


# --- as it should be ---


def test_a_copy_is_the_folder_file_by_file_and_its_description_comes_last(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    save(folder, 100)
    copier = start()
    assert copier.close(PLENTY_S) == []
    assert copied(s3) == content(folder)
    keys = [name.removeprefix("kept/run-1/") for name in s3.puts() if CHECKPOINTS in name]
    assert keys == ["checkpoints/update-000100/state.pt", "checkpoints/update-000100/checkpoint.json"]
    (fact,) = events(copier, "copied")
    size = sum(path.stat().st_size for path in folder.file(f"{CHECKPOINTS}/update-000100").iterdir())
    assert (fact["update"], fact["bytes"]) == (100, size)
    assert fact["address"] == f"{ADDRESS}/run-1/checkpoints/update-000100"
    assert fact["seconds"] > 0
    assert states(folder) == {"100": "verified"}
    assert set(known(folder)["record"]) == {"config.json", "notes.md", "metrics.jsonl", "tensorboard/events"}


@pytest.mark.parametrize("address", ["memory://copies", "file://{here}/copies"])
def test_any_storage_that_fsspec_knows_will_do(
    address: str, folder: RunFolder, start: Callable[..., Copier], tmp_path: Path
) -> None:
    address = address.format(here=tmp_path)
    assert need_copies(address) == []
    save(folder, 100)
    assert start(address).close(PLENTY_S) == []
    fetched = fetch_copy(f"{address}/run-1", Path("elsewhere"))
    assert content(fetched) == content(folder)
    Storage(address)._fs.rm(Storage(address)._root, recursive=True)


def test_what_grew_meanwhile_is_copied_as_it_is_at_the_end(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    copier = start()
    assert copier.wait(PLENTY_S)
    with folder.file("metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "event", "event": "end"}\n')
    folder.write_manifest()
    assert copier.close(PLENTY_S) == []
    assert copied(s3) == content(folder)
    assert COPIES not in json.loads(folder.file("manifest.json").read_text("utf-8"))["files"]
    assert all(finding.is_good for finding in folder.verify_manifest())


def test_the_storage_keeps_what_the_folder_keeps(s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]) -> None:
    copier = start()
    for update in (100, 200, 300, 400, 500):
        save(folder, update, keep=2, best=200)
        copier.notify()
        assert copier.wait(PLENTY_S)
        assert updates_there(s3) == {one.update for one in list_checkpoints(folder.file(CHECKPOINTS))}
    assert updates_there(s3) == {200, 400, 500}
    assert set(states(folder)) == {"200", "400", "500"}


def test_what_comes_and_is_rotated_away_without_a_pause_leaves_nothing(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    copier = start()
    for update in range(100, 1300, 100):
        save(folder, update, keep=2)
        copier.notify()
        time.sleep(0.02)
    assert copier.wait(PLENTY_S)
    assert updates_there(s3) == {1100, 1200}
    assert set(states(folder)) == {"1100", "1200"}


def test_the_newest_is_copied_first(s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]) -> None:
    for update in (100, 200, 300):
        save(folder, update, keep=3)
    copier = start()
    assert copier.close(PLENTY_S) == []
    assert [one["update"] for one in events(copier, "copied")] == [300, 200, 100]


def test_nothing_else_at_the_address_is_touched(s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]) -> None:
    other = make_run("run-10")
    save(other, 100)
    assert start(of=other).close(PLENTY_S) == []
    foreign = [
        "kept/run-1/checkpoints/update-000001/state.pt",  # of this run's name, but this folder never had it
        "kept/run-1/checkpoints/update-1/state.pt",
        "kept/run-1/checkpoints/damaged-update-000001/state.pt",
        "kept/run-1/mine.txt",
        "kept/thesis.pdf",
    ]
    for name in foreign:
        s3.set(name, b"mine")
    others = copied(s3, "run-10")
    copier = start()
    for update in (100, 200, 300):
        save(folder, update, keep=1)
        copier.notify()
        assert copier.wait(PLENTY_S)
    assert updates_there(s3) == {300}
    assert copied(s3, "run-10") == others
    assert {s3.get(name) for name in foreign} == {b"mine"}


def test_an_older_copy_goes_only_once_a_newer_one_is_verified(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    copier = start()
    save(folder, 100, keep=1)
    assert copier.wait(PLENTY_S)
    s3.flips = lambda asked: asked.path.endswith("update-000200/state.pt")
    save(folder, 200, keep=1)
    copier.notify()
    until(lambda: len(s3.puts("update-000200/state.pt")) >= 3)
    assert updates_there(s3) == {100}
    s3.flips = lambda _: False
    assert copier.close(PLENTY_S) == []
    assert updates_there(s3) == {200}


# --- going on ---


@pytest.mark.parametrize("knows", [True, False])
def test_a_restart_uploads_nothing_again(
    knows: bool, s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    save(folder, 100)
    assert start().close(PLENTY_S) == []
    if not knows:
        folder.file(COPIES).unlink()
    s3.requests.clear()
    assert start().close(PLENTY_S) == []
    assert [name for name in s3.puts() if CHECKPOINTS in name] == []
    assert (s3.puts() == ["kept/run-1/copies.json"] * len(s3.puts())) is knows
    assert states(folder) == {"100": "verified"}


def test_a_restart_repairs_what_went_missing_there(s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]) -> None:
    save(folder, 100)
    assert start().close(PLENTY_S) == []
    s3.remove("kept/run-1/checkpoints/update-000100/state.pt")
    s3.remove("kept/run-1/config.json")
    assert start().close(PLENTY_S) == []
    assert copied(s3) == content(folder)


def test_a_checkpoint_that_was_saved_anew_replaces_its_copy(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    save(folder, 100)
    assert start().close(PLENTY_S) == []
    (folder.file(CHECKPOINTS) / "update-000100").rename("aside")
    state = {"model": {"weights": torch.zeros(1000)}, "progress": {"update": 100}}
    save_checkpoint(folder.file(CHECKPOINTS), 100, state, FACTS)
    assert start().close(PLENTY_S) == []
    assert copied(s3) == content(folder)


def test_a_checkpoint_that_is_rotated_away_while_it_is_uploaded_becomes_whole_all_the_same(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    is_rotated = threading.Event()

    def rotate(asked: Asked) -> None:
        if asked.method == "PUT" and asked.path.endswith("update-000100/state.pt") and not is_rotated.is_set():
            is_rotated.set()
            save(folder, 200, keep=1)

    save(folder, 100)
    s3.before = rotate
    copier = start()
    assert copier.close(PLENTY_S) == []
    news = copier.news()
    assert [(one["event"], one["update"]) for one in news] == [("copied", 100), ("copied", 200)]
    assert updates_there(s3) == {200}
    assert [path.name for path in folder.path.iterdir() if path.name.startswith(".unfinished")] == []


def test_a_checkpoint_that_vanishes_where_nothing_can_hold_it_is_no_failure(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    def then_gone(path: Path) -> Any:
        found = files_of(path)
        path.rename(path.with_name(".unfinished-gone"))
        return found

    save(folder, 100)
    monkeypatch.setattr("training_lab.copying.os.link", no_links)
    monkeypatch.setattr("training_lab.copying.files_of", then_gone)
    copier = start()
    assert copier.close(PLENTY_S) == []
    assert copier.news() == []
    assert updates_there(s3) == set()


# --- faults ---


def test_an_upload_that_is_cut_is_made_again_and_told_once(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    s3.is_cut = lambda asked: len(s3.puts("state.pt")) < 4 and asked.method == "PUT" and "state.pt" in asked.path
    save(folder, 100)
    copier = start()
    assert copier.wait(PLENTY_S)
    news = copier.news()
    assert [one["event"] for one in news] == ["not copied", "copied"]
    assert news[0]["update"] == 100
    assert len(s3.puts("state.pt")) == 4
    assert copied(s3)["checkpoints/update-000100/state.pt"] == content(folder)["checkpoints/update-000100/state.pt"]


def test_a_copy_that_differs_is_found_and_uploaded_anew(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    s3.flips = lambda asked: len(s3.puts("state.pt")) == 1 and asked.path.endswith("state.pt")
    save(folder, 100)
    copier = start()
    assert copier.close(PLENTY_S) == []
    first, second = copier.news()
    assert (first["event"], second["event"]) == ("not copied", "copied")
    assert "differs from what was uploaded" in first["message"]
    assert copied(s3) == content(folder)


def test_refused_credentials_are_told_at_once_and_without_the_secret(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    s3.refuses = (403, f"SignatureDoesNotMatch: {SECRET}")
    save(folder, 100)
    copier = start()
    began = time.monotonic()
    (warning,) = copier.close(PLENTY_S)
    assert time.monotonic() - began < PLENTY_S / 2
    assert "refused" in warning
    assert "checkpoint 100" in warning
    assert str(folder.path) in warning
    (fact,) = events(copier, "not copied")
    assert fact["update"] == 100
    assert states(folder) == {"100": "failed"}
    assert SECRET not in warning + json.dumps(fact) + folder.file(COPIES).read_text("utf-8")


def test_a_full_storage_takes_the_record_still_and_the_rest_once_there_is_room(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    s3.quota_bytes = 2000
    save(folder, 100)
    copier = start()
    assert not copier.wait(PLENTY_S)
    assert "config.json" in copied(s3)
    (fact,) = events(copier, "not copied")
    assert "full" in fact["message"]
    s3.quota_bytes = None
    assert copier.close(PLENTY_S) == []
    assert copied(s3) == content(folder)


def test_a_damaged_checkpoint_here_is_not_copied_and_the_others_are(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    save(folder, 100)
    save(folder, 200)
    state = folder.file(CHECKPOINTS) / "update-000200/state.pt"
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    copier = start()
    (warning,) = copier.close(PLENTY_S)
    assert "checkpoint 200 is not copied" in warning
    assert "damaged on this machine" in warning
    assert updates_there(s3) == {100}


def test_training_goes_on_while_nobody_answers_and_the_end_waits_no_longer_than_it_may(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as black_hole:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{black_hole.getsockname()[1]}")
        copier = start()
        for update in range(100, 400, 100):
            save(folder, update)
            began = time.monotonic()
            copier.notify()
            copier.news()
            assert time.monotonic() - began < 0.5
        began = time.monotonic()
        (warning,) = copier.close(0.5)
        assert time.monotonic() - began < 2.5
        assert "checkpoints 200, 300" in warning
        assert states(folder)["300"] == "failed"
        before = folder.file(COPIES).read_bytes()
    copier._thread.join(30)
    assert not copier._thread.is_alive()
    assert folder.file(COPIES).read_bytes() == before


def test_a_slow_server_is_waited_for(s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]) -> None:
    s3.before = lambda _: time.sleep(0.05)
    save(folder, 100)
    assert start().close(PLENTY_S) == []


def test_a_disk_that_refuses_the_state_file_stops_neither_copies_nor_training(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise LabError("copies.json: cannot write 10 bytes: No space left on device")

    save(folder, 100)
    folder.write_json(COPIES, {})
    with monkeypatch.context() as context:
        context.setattr(folder, "write_json", full)
        copier = start()
        until(lambda: updates_there(s3) == {100} and bool(copier._problems))
        assert [one["message"] for one in events(copier, "not copied")] == [str(copier._problems[0].message)]
    assert copier.close(PLENTY_S) == []
    assert states(folder) == {"100": "verified"}


# --- before training ---


def test_what_only_a_person_can_change_is_said_before_training(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    assert need_copies(ADDRESS) == []
    assert s3.names() == set()
    with pytest.raises(UserError, match="no such bucket"):
        need_copies("s3://nobodys/kept")
    s3.refuses = (403, "InvalidAccessKeyId")
    with pytest.raises(UserError, match="refused"):
        need_copies(ADDRESS)
    s3.refuses = None
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UserError, match="no credentials"):
        need_copies(ADDRESS)


def test_a_server_that_does_not_answer_now_is_a_warning(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", unreachable())
    (warning,) = need_copies(ADDRESS)
    assert "cannot be reached" in warning
    with socket.create_server(("127.0.0.1", 0)) as black_hole:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{black_hole.getsockname()[1]}")
        (warning,) = need_copies(ADDRESS, wait_s=0.2)
        assert "no answer" in warning
        time.sleep(0.1)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("s3fs", "fsspec"):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, missing, None)
            context.setitem(sys.modules, f"{missing}.core", None)
            if missing == "s3fs":
                context.delitem(
                    sys.modules["fsspec.registry"]._registry, "s3", raising=False
                )  # it remembers what it imported
            with pytest.raises(UserError, match=r"pip install 'training-lab\[s3\]'"):
                need_copies(ADDRESS)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "kept",
        "/kept",
        "s3://",
        "s3:///kept",
        "file://kept",
        "nonsense://kept",
        "s3://a/../b",
        "simplecache::s3://a",
    ],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError) as caught:
        need_copies(address)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("address", [f"s3://key:{SECRET}@lab/kept", f"s3://lab/kept?secret={SECRET}"])
def test_an_address_with_credentials_is_refused_without_quoting_them(address: str) -> None:
    with pytest.raises(UserError) as caught:
        check_address(address)
    assert SECRET not in str(caught.value)


# --- coming back ---


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


# --- the format of checkpoints ---


def test_both_forms_of_a_description_are_read(tmp_path: Path) -> None:
    text = tmp_path / "checkpoint.json"
    text.write_text('{"bytes": 3, "sha256": "ab"}', encoding="utf-8")
    assert files_of(tmp_path) == {"state.pt": (3, "ab")}
    text.write_text('{"files": {"part/0.pt": {"bytes": 4, "sha256": "cd"}}}', encoding="utf-8")
    assert files_of(tmp_path) == {"part/0.pt": (4, "cd")}
    for damaged in ("{", "[]", "{}", '{"files": {}}', '{"files": {"../x": {"bytes": 1, "sha256": "a"}}}'):
        text.write_text(damaged, encoding="utf-8")
        with pytest.raises(LabError, match="damaged"):
            files_of(tmp_path)


def test_a_checkpoint_of_several_files_is_copied_and_fetched(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    path = folder.file(CHECKPOINTS) / "update-000100"
    (path / "part").mkdir(parents=True)
    parts = {f"part/{number}.pt": bytes([number]) * 5000 for number in range(3)}
    for name, part in parts.items():
        (path / name).write_bytes(part)
    listed = {name: {"bytes": len(part), "sha256": sha256(part).hexdigest()} for name, part in parts.items()}
    (path / "checkpoint.json").write_text(json.dumps({"files": listed}), encoding="utf-8")
    assert start().close(PLENTY_S) == []
    assert content(fetch()) == content(folder)
