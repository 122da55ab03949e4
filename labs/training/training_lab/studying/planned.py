"""The runs that a study or a noise measurement needs: which are there already, and in what order the rest are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from training_lab import record
from training_lab.comparing.comparability import HARDWARE
from training_lab.errors import LabError
from training_lab.provenance import describe_host, describe_source
from training_lab.record import RunFolder
from training_lab.resolve import Resolved

OUTCOMES = ("finished", "failed: non-finite")
"""States that are a result: a run that diverged would diverge again."""
NEEDED = {"machine", "processor", "usable_cpus", "python"}
"""Of the facts that seconds depend on, those that are known before anything runs."""


class Planned(NamedTuple):
    """One run that is wanted."""

    arm: str
    seed: int
    stem: str
    """What its id begins with."""
    config: Path
    overrides: tuple[str, ...]
    resolved: Resolved
    stop_after: int | None = None
    is_repeat: bool = False
    """It has the config and seed of another: no run that is there already may stand for both."""


class Here(NamedTuple):
    """What decides whether a run that is there is the one that is wanted."""

    source: str
    """The hash of the code."""
    machine: dict[str, Any]


def describe_here() -> Here:
    """The code and the machine as they are now."""
    host = describe_host()
    keys = {key for keys in HARDWARE.values() for key in keys} & NEEDED
    return Here(describe_source()["sha256"], {key: host[key] for key in sorted(keys)})


def interleaved(arms: list[str], seeds: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Each arm with each seed: A B, B A, A B, … so that what changes with time falls on all arms alike."""
    for number, seed in enumerate(seeds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            yield arm, seed


def is_wanted(folder: RunFolder, planned: Planned, here: Here, is_elsewhere: bool) -> bool:
    """Whether a run is of this config and this code, and, unless it ran on another machine by intent, of this one."""
    try:
        config = folder.read_json(record.CONFIG, identity=str)
        source = folder.read_json(record.SOURCE, sha256=str)
        processes = folder.read_json(record.ENVIRONMENT, processes=list)["processes"]
    except LabError:
        return False
    if config["identity"] != planned.resolved.identity or source["sha256"] != here.source:
        return False
    last = processes[-1] if processes and isinstance(processes[-1], dict) else {}
    return is_elsewhere or all(last.get(key) == value for key, value in here.machine.items())


def find_place(
    planned: Planned, runs_dir: Path, here: Here, is_elsewhere: bool = False, others: Iterable[RunFolder] = ()
) -> RunFolder:
    """The folder of the run: one that is there and is it, finished or not; else a new one, which nothing is in yet."""
    number = 1
    while True:
        place = RunFolder(runs_dir / (planned.stem if number == 1 else f"{planned.stem}-{number}"))
        if not place.file(record.CONFIG).exists():
            break
        if is_wanted(place, planned, here, is_elsewhere):
            return place
        number += 1
    if planned.stop_after is None and not planned.is_repeat:
        for other in others:
            if other.state() == "finished" and is_wanted(other, planned, here, is_elsewhere) and is_unbroken(other):
                return other
    return place


def is_unbroken(folder: RunFolder) -> bool:
    """Whether a run was made by one process: one that was stopped may be another arm's."""
    return len(folder.read_json(record.ENVIRONMENT, processes=list)["processes"]) == 1


def state_of(folder: RunFolder) -> str:
    """What became of a run; `missing` where none was begun."""
    return folder.state() if folder.file(record.CONFIG).exists() else "missing"
