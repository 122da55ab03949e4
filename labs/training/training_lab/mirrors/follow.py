"""The follower: the process that mirrors one run while it goes.

    python -m training_lab.mirrors.follow RUN_FOLDER '{"tensorboard": false, "timeout_s": 60}'

It reads `metrics.jsonl` as it grows, and ends when its standard input ends: because the trainer closed it, or because
the trainer is gone. Started by `handle.start_mirrors`; what it does is in the run's `wandb.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from experiment_runner.durable import try_lock
from training_lab import record
from training_lab.config import TrackingConfig
from training_lab.errors import LabError
from training_lab.mirrors.rows import GrowingRows
from training_lab.mirrors.state import change_state
from training_lab.record import RunFolder
from training_lab.tracking import Row

POLL_S = 1.0
STATE_EVERY_S = 10.0
MIRROR_LOCK = ".unfinished-mirror.lock"
"""Held by the follower; no part of the record."""


class Sink(Protocol):
    """Something that takes rows one after the other."""

    def log(self, row: Row) -> None: ...

    def finish(self, summary: dict[str, Any]) -> None: ...


class Mirror:
    """Feeds a run's rows to one sink. Whatever the sink raises ends the mirror, and nothing else."""

    def __init__(self, folder: RunFolder, make_sink: Callable[[], Sink]) -> None:
        self.rows = GrowingRows(folder.file(record.METRICS))
        self.failure = ""
        self.sink: Any = None
        with self.telling():
            self.sink = make_sink()

    def forward(self) -> None:
        """Passes on what has come."""
        if self.failure:  # it could not even begin
            return
        with self.telling():
            for row in self.rows.take():
                self.sink.log(row)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Turns an error into the mirror's failure, in one line."""
        try:
            yield
        except Exception as error:  # whatever a mirror's library may raise
            first_line = next(iter(str(error).strip().splitlines()), "")
            self.failure = f"{type(error).__name__}: {first_line}"[:300]


def follow(folder: RunFolder, mode: str, tracking: TrackingConfig, ended: threading.Event) -> None:
    """Mirrors until `ended` is set and everything that was written by then is passed on."""
    mirrors: list[Mirror] = []
    wandb: Mirror | None = None
    if tracking.tensorboard:
        from training_lab.mirrors.tensorboard_sink import TensorBoardSink

        mirrors.append(Mirror(folder, lambda: TensorBoardSink(folder)))
    if mode != "off":
        from training_lab.mirrors.wandb_sink import WandbSink

        wandb = Mirror(folder, lambda: WandbSink(folder, finish_timeout_s=0.8 * tracking.timeout_s))
        mirrors.append(wandb)
    told_s = time.monotonic()
    is_over = False
    while not is_over:
        is_over = ended.wait(POLL_S)
        for mirror in mirrors:
            mirror.forward()
        if wandb is not None and (is_over or wandb.failure or time.monotonic() - told_s > STATE_EVERY_S):
            told_s = time.monotonic()
            tell(folder, wandb)
        for failed in [mirror for mirror in mirrors if mirror.failure]:
            mirrors.remove(failed)
            wandb = None if failed is wandb else wandb
    for mirror in mirrors:
        finish(folder, mirror, is_wandb=mirror is wandb)


def finish(folder: RunFolder, mirror: Mirror, is_wandb: bool) -> None:
    """Ends a mirror that has not failed, and says in `wandb.json` what became of it."""
    with mirror.telling():
        mirror.sink.finish(summary_of(folder))
    if is_wandb:
        tell(folder, mirror, "incomplete" if mirror.failure.startswith("TimeoutError") else "complete")


def tell(folder: RunFolder, mirror: Mirror, state: str = "running") -> None:
    """Writes down how far the W&B mirror is; `degraded` once it has failed."""
    is_late = state == "incomplete"
    change_state(
        folder,
        state="degraded" if mirror.failure and not is_late else state,
        rows_sent=mirror.sink.rows_sent if mirror.sink is not None else 0,
        last_update=mirror.sink.last_update if mirror.sink is not None else None,
        message=mirror.failure,
    )


def summary_of(folder: RunFolder) -> dict[str, Any]:
    """The run's summary; one that says nothing if there is none to read."""
    try:
        return folder.read_json(record.SUMMARY)
    except LabError:
        return {}


def wait_for_end(ended: threading.Event) -> None:
    """Sets the event when standard input ends."""
    sys.stdin.buffer.read()
    ended.set()


def main(arguments: list[str]) -> int:
    """Follows the run in the given folder, alone: a follower that an earlier process left behind is waited for."""
    folder = RunFolder(Path(arguments[0]))
    with contextlib.suppress(OSError, AttributeError):
        os.nice(5)  # training comes first
    state = folder.read_json(record.WANDB, mode=str)
    tracking = TrackingConfig(**json.loads(arguments[1]))
    ended = threading.Event()
    threading.Thread(target=wait_for_end, args=(ended,), daemon=True).start()
    with open(folder.file(MIRROR_LOCK), "a+", encoding="utf-8") as lock:
        give_up_s = time.monotonic() + tracking.timeout_s
        while not try_lock(lock):
            if time.monotonic() > give_up_s:
                change_state(folder, state="degraded", message="an earlier process's mirror of this run has not ended")
                return 1
            time.sleep(0.2)
        with own_temporary_folder():
            follow(folder, state["mode"], tracking, ended)
    return 0


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Has whatever this process and wandb's own put aside in one folder, which is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="mirror-", ignore_cleanup_errors=True) as place:
        os.environ["TMPDIR"] = tempfile.tempdir = place
        try:
            yield
        finally:
            tempfile.tempdir = None


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # past whatever wandb would still wait for
