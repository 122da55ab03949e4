"""Runs that are copied to a storage on this machine, and what of them is where."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fakes3 import BUCKET, FakeS3

from training_lab.checkpoint import remove_old, save_checkpoint
from training_lab.config import CheckpointConfig
from training_lab.copies import Copier, Waits
from training_lab.progress import NoProgress
from training_lab.record import CHECKPOINTS, COPIES, LAST_CHECKPOINT, RunFolder
from training_lab.storage import Patience

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


@contextlib.contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """A server that this process takes for Amazon's."""
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


@contextlib.contextmanager
def starting(folder: RunFolder) -> Iterator[Callable[..., Copier]]:
    """Starts copiers of a run, and ends them afterwards."""
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
