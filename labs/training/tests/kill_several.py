"""Trains one config on two processes, killing one, the first or both at random moments, until all kills are made.

    python kill_several.py KILLS SEED          in an empty folder; 30 kills take some ten minutes

After each kill a checkpoint verifies, nothing older than two intervals is lost, and the same command goes on. The last
process trains to the end; every update is then there once, with the loss that it has in a run that was never killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from several import PLAIN, launch, settings, train, train_words
from tiny import TINY

from training_lab.checkpoint import newest_good
from training_lab.record import CHECKPOINTS, METRICS, RunFolder, list_runs
from training_lab.tracking import read_metrics, rows_of_kind

EVERY = 5
OVERRIDES = ("train.updates=1500", f"checkpoint.every={EVERY}", "eval.every=500", "measure.warmup_updates=0")


def ranks_of(pid: int) -> list[int]:
    """The ids of torchrun's processes, by rank."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            texts = Path(f"/proc/{child}/environ").read_text().split("\0")
            variables = dict(one.split("=", 1) for one in texts if "=" in one)
            if "RANK" in variables:
                found[int(variables["RANK"])] = int(child)
    return [found[rank] for rank in sorted(found)]


def updates_of(run: RunFolder) -> list[int]:
    return [row["update"] for row in rows_of_kind(read_metrics(run.file(METRICS)), "update")]


def main() -> None:
    kills, draws = int(sys.argv[1]), random.Random(sys.argv[2])
    words = ["--config", str(TINY), "--json", *settings((*PLAIN, *OVERRIDES))]
    most_lost = 0
    for number in range(1, kills + 1):
        process = launch(2, *words)
        assert process.stdout is not None
        while '"kind": "update"' not in (line := process.stdout.readline()):
            assert line, f"kill {number}: the training ended before: {process.communicate()[1]}"
        time.sleep(draws.uniform(0.0, 0.6))
        victims = draws.choice([(0,), (1,), (0, 1)])
        ranks = ranks_of(process.pid)
        for rank in victims:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(ranks[rank], signal.SIGKILL)
        killed = time.monotonic()
        process.communicate(timeout=90)
        (run,) = list_runs(Path(".runs"))
        found, damaged = newest_good(run.file(CHECKPOINTS))
        last = max(updates_of(run))
        assert not damaged, damaged
        lost = last - (found.update if found else 0)
        assert lost <= 2 * EVERY + 1, f"kill {number} lost {lost} updates"
        most_lost = max(most_lost, lost)
        print(f"kill {number} of {victims} at update {last}: lost {lost}, all ended after "
              f"{time.monotonic() - killed:.1f} s", flush=True)  # fmt: skip
    train_words(2, words)
    (run,) = list_runs(Path(".runs"))
    assert updates_of(run) == list(range(1, 1501))
    losses = [row["loss"] for row in rows_of_kind(read_metrics(run.file(METRICS)), "update")]
    assert losses == train(0, *OVERRIDES).losses
    print(f"{kills} kills, at most {most_lost} updates lost at a time; the losses are those of a run never killed")


if __name__ == "__main__":
    main()
