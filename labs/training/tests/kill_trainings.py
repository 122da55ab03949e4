"""Trains one config in process after process, killing each at a random moment, until it is finished.

    python kill_trainings.py CONFIG RUNS KILLS SEED

A test runs this as a process of its own. It imports torch once and computes nothing itself, so that each training
can be forked from it: a real process with a real death, without the seconds of starting Python.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import training_lab.train  # noqa: F401 - imported before the first fork
from experiment_runner.durable import UNFINISHED_PREFIX
from training_lab import cli
from training_lab.checkpoint import list_checkpoints, newest_good
from training_lab.record import CHECKPOINTS, list_runs


def train_once(config: str, runs: Path) -> int:
    """Forks a process that trains; returns its id."""
    pid = os.fork()
    if pid == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        os._exit(cli.main(["train", "--config", config, "--runs", str(runs)]))
    return pid


def newest_update(runs: Path) -> int:
    """The update of the newest checkpoint, after checking that one verifies if there is any; else 0."""
    for run in list_runs(runs):
        found, damaged = newest_good(run.file(CHECKPOINTS))
        assert not damaged, damaged
        return found.update if found else 0
    return 0


def is_saving(runs: Path) -> bool:
    """Whether a checkpoint is being written at this moment."""
    return any(any(run.file(CHECKPOINTS).glob(f"{UNFINISHED_PREFIX}*")) for run in list_runs(runs))


def main() -> None:
    config, runs, kills, draws = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), random.Random(sys.argv[4])
    during_saves = 0
    for number in range(kills):
        before = newest_update(runs)
        pid = train_once(config, runs)
        wait_for_save = number % 2 == 1
        deadline = time.monotonic() + draws.uniform(0.1, 0.9)
        while time.monotonic() < deadline + 20 * wait_for_save:
            if os.waitpid(pid, os.WNOHANG)[0]:
                raise SystemExit(f"the training ended before kill {number + 1}: make it longer")
            if wait_for_save and time.monotonic() > deadline and is_saving(runs):
                break
            time.sleep(0.0002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        during_saves += is_saving(runs)
        after = newest_update(runs)
        assert after >= before, f"kill {number + 1} lost the checkpoint of update {before}"
    _, status = os.waitpid(train_once(config, runs), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    (run,) = list_runs(runs)
    print(f"killed {kills} times, {during_saves} in a save; checkpoints {len(list_checkpoints(run.file(CHECKPOINTS)))}")


if __name__ == "__main__":
    main()
