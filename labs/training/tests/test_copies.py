"""Copies at an address: whole or not there, verified before anything older goes, and never in training's way."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from copied_runs import (
    ADDRESS,
    FACTS,
    PLENTY_S,
    content,
    copied,
    events,
    known,
    make_run,
    s3_server,
    save,
    starting,
    states,
    until,
    updates_there,
)
from fakes3 import Asked, FakeS3

from training_lab.checkpoint import list_checkpoints, save_checkpoint
from training_lab.copies import Copier
from training_lab.copying import files_of
from training_lab.errors import LabError
from training_lab.fetching import fetch_copy
from training_lab.record import CHECKPOINTS, COPIES, RunFolder
from training_lab.storage import Storage, need_copies


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


def test_a_description_names_the_files_of_a_checkpoint_and_none_outside_of_it(tmp_path: Path) -> None:
    text = tmp_path / "checkpoint.json"
    text.write_text('{"files": {"part/0.pt": {"bytes": 4, "sha256": "cd"}}}', encoding="utf-8")
    assert files_of(tmp_path) == {"part/0.pt": (4, "cd")}
    for damaged in ("{", "[]", "{}", '{"files": {}}', '{"files": {"../x": {"bytes": 1, "sha256": "a"}}}'):
        text.write_text(damaged, encoding="utf-8")
        with pytest.raises(LabError, match="damaged"):
            files_of(tmp_path)
