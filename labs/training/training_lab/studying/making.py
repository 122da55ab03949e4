"""Makes the runs that are wanted, one after the other, each as the command line would: a failure of one ends no other,
and what was interrupted goes on with the same command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from training_lab.errors import LabError
from training_lab.progress import Progress
from training_lab.record import RunFolder, list_runs
from training_lab.studying.planned import OUTCOMES, Planned, describe_here, find_place, state_of

INTERRUPTED = (130, 143, -2, -15)
MAY_STILL_BILL = 30
"""The runner's exit code."""
REMOTE_RECORD, REMOTE_LOG = "remote.json", "remote-log.txt"


class Where(NamedTuple):
    """Where runs are made, and what they may take."""

    runs_dir: Path
    place: str = "local"
    remote: Mapping[str, Any] = MappingProxyType({})
    hours: float | None = None
    usd: float | None = None

    @property
    def is_elsewhere(self) -> bool:
        return self.place != "local"


class Made(NamedTuple):
    """One run of the plan as it stands."""

    planned: Planned
    folder: RunFolder
    state: str
    is_reused: bool
    message: str = ""

    @property
    def is_outcome(self) -> bool:
        """Whether it ended in a way that would be the same again."""
        return self.state in OUTCOMES


class Budget:
    """Hours and money, and what has gone of them."""

    def __init__(self, where: Where) -> None:
        self.hours, self.usd = where.hours, where.usd
        self.begun = time.monotonic()
        self.longest_s = 0.0
        self.spent_usd = 0.0

    def exhausted(self) -> str:
        """Why no further run is begun; empty while one is. A run that would not end in time is not begun."""
        gone_h = (time.monotonic() - self.begun) / 3600
        if self.hours is not None and gone_h + self.longest_s / 3600 > self.hours:
            return f"budget.hours = {self.hours:g}: {gone_h:.2f} are gone, and a run takes {self.longest_s / 3600:.2f}"
        if self.usd is not None and self.spent_usd >= self.usd:
            return f"budget.usd = {self.usd:g}: {self.spent_usd:.2f} are gone"
        return ""


class Stopped(Exception):
    """The person stopped it; what was made is whole."""


def make_runs(plan: list[Planned], where: Where, show: Progress, say: Callable[[str], None]) -> list[Made]:
    """Makes what is missing and gives every run of the plan as it then stands, missing ones included."""
    here = describe_here()
    budget = Budget(where)
    made: list[Made] = []
    why_not = ""
    for number, planned in enumerate(plan, start=1):
        others = [] if where.is_elsewhere else list_runs(where.runs_dir)
        folder = find_place(planned, where.runs_dir, here, where.is_elsewhere, others)
        title = f"[{number}/{len(plan)}] {planned.arm}, seed {planned.seed}"
        state = state_of(folder)
        is_reused = state in OUTCOMES
        message = ""
        if not is_reused and not why_not:
            why_not = budget.exhausted()
        if not is_reused and not why_not:
            started = time.monotonic()
            message = make(planned, folder, where, budget, show, title)
            if message and where.is_elsewhere:
                why_not = "a run elsewhere failed, and the next machine would cost money, too"
            budget.longest_s = max(budget.longest_s, time.monotonic() - started)
            budget.spent_usd += cost_of(folder)
            state = state_of(folder)
        made.append(Made(planned, folder, state, is_reused, message or (why_not if state not in OUTCOMES else "")))
        say(f"{title}: {described(made[-1])}")
    return made


def described(made: Made) -> str:
    """A run in a line."""
    loss = last_loss(made.folder)
    figures = f", validation loss {loss:.4f}" if loss is not None else ""
    reused = ", was there" if made.is_reused else ""
    return f"{made.state}{figures}{reused} ({made.folder.path})" + (f": {made.message}" if made.message else "")


def last_loss(folder: RunFolder) -> float | None:
    """The last validation loss of a run."""
    try:
        value = folder.read_json("summary.json", val_loss=dict)["val_loss"].get("last")
    except LabError:
        return None
    return float(value) if isinstance(value, (int, float)) else None


def make(planned: Planned, folder: RunFolder, where: Where, budget: Budget, show: Progress, title: str) -> str:
    """Makes one run, or goes on with it. Returns what went wrong, in a line; raises Stopped for Ctrl-C."""
    if where.is_elsewhere:
        code, message = run_command(remote_command(planned, folder, where, budget), show, title)
        if code == MAY_STILL_BILL:
            raise LabError(
                f"{folder.path}: its machine may still cost money ({message}); see to it with `ls`, `monitor`, "
                "`terminate`, then start the study again"
            )
        return f"{message}; see {folder.file(REMOTE_LOG)}" if code else ""
    stop = ["--stop-after", str(planned.stop_after)] if planned.stop_after and state_of(folder) == "missing" else []
    code, message = run_command([*train_command(planned, folder), *stop], show, title)
    if stop and not code:
        _, message = run_command(train_command(planned, folder), show, title)
    return message


def train_command(planned: Planned, folder: RunFolder) -> list[str]:
    """`train`, as a person would type it."""
    sets = [word for override in planned.overrides for word in ("--set", override)]
    return ["train", "--config", str(planned.config), *sets, "--runs", str(folder.path.parent),
            "--run-id", folder.run_id, "--json"]  # fmt: skip


def remote_command(planned: Planned, folder: RunFolder, where: Where, budget: Budget) -> list[str]:
    """`runpod`, with what is left of the money as its limit."""
    settings: dict[str, Any] = {"provider": where.place, **where.remote}
    if budget.usd is not None:
        left = budget.usd - budget.spent_usd
        settings["max_usd"] = min(left, settings.get("max_usd", left))
    remote = [f"remote.{key}={json.dumps(value)}" for key, value in settings.items()]
    sets = [word for override in (*planned.overrides, *remote) for word in ("--set", override)]
    return ["runpod", "--config", str(planned.config), *sets, "--output", str(folder.path), "--json"]


def run_command(command: list[str], show: Progress, title: str) -> tuple[int, str]:
    """Runs a command of the lab to its end, and shows how far it is. Returns exit code and last error, empty if it has
    none."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-m", "training_lab", *command]
    with started(words, environment) as process:
        assert process.stdout is not None
        total = None
        for line in process.stdout:
            row = as_row(line)
            if row.get("kind") == "begin":
                total = row.get("updates")
            elif row.get("kind") == "update":
                show.show(title, int(row["update"]), total, "updates")
    if process.returncode in INTERRUPTED:
        raise Stopped
    if not process.returncode:
        return 0, ""
    errors = process.errors.strip().splitlines()
    message = errors[-1].removeprefix("error: ") if errors else f"exit code {process.returncode}"
    return process.returncode, message


class Process(subprocess.Popen[str]):
    """A command whose errors are kept."""

    errors = ""


@contextmanager
def started(words: list[str], environment: dict[str, str]) -> Iterator[Process]:
    """Runs a command; Ctrl-C reaches it, too, as it is in the same group, and it is waited for."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = Process(words, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8", env=environment)
        try:
            yield process
            process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise Stopped from None
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        errors.seek(0)
        process.errors = errors.read()


def as_row(line: str) -> dict[str, Any]:
    """A line of JSON; an empty row for anything else."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def cost_of(folder: RunFolder) -> float:
    """What the machine of a run cost, as it was estimated; 0 for a run of this machine."""
    try:
        return float(folder.read_json(REMOTE_RECORD, cost=dict)["cost"].get("estimated_usd", 0.0))
    except (LabError, TypeError, ValueError):
        return 0.0
