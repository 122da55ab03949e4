"""The curves of a comparison: of each run, of each arm, and what the arms differ by. Pure.

A band is a pointwise 95 % interval over repetitions; updates are no repetitions, so one run each has none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from training_lab.comparing.arms import Arm, Run, one_per_seed, pairs
from training_lab.comparing.compare import Pair
from training_lab.comparing.significance import mean_interval, welch_interval
from training_lab.report.curves import AXES, Progress, exponential_mean, half_life
from training_lab.report.reading import number

Columns = dict[str, list[Any]]
Curve = dict[int, float]
"""A figure by completed updates."""

MOST_DRAWN = 200
"""Points of a curve."""


def val_losses(run: Run) -> Curve:
    """The validation loss."""
    return {row["update"]: float(row["val_loss"]) for row in run.found.evaluations if is_finite(row["val_loss"])}


def train_losses(run: Run) -> Curve:
    """The running mean of the training loss, as in the report."""
    rows = sorted(run.found.updates, key=lambda row: row["update"])
    means = exponential_mean([number(row.get("loss")) for row in rows], half_life(len(rows)))
    return {row["update"]: mean for row, mean in zip(rows, means, strict=True) if mean is not None}


def is_finite(value: Any) -> bool:
    """Whether it is a number that can be drawn."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def thin(updates: list[int]) -> list[int]:
    """Some of the updates, evenly, the last among them."""
    step = max(1, math.ceil(len(updates) / MOST_DRAWN))
    return sorted({*updates[::step], *updates[-1:]})


def of_runs(arms: list[Arm], curve_of: Any) -> Columns:
    """The curve of every run: a row a point."""
    columns: Columns = {name: [] for name in (*AXES, "value", "arm", "run")}
    for arm in arms:
        for run in arm.runs:
            curve, progress = curve_of(run), progress_of(run)
            for update in thin(sorted(curve)):
                add(columns, progress.after(update), value=curve[update], arm=arm.name, run=run.id)
    return columns


def of_arms(arms: list[Arm], curve_of: Any) -> Columns:
    """The mean curve of every arm, over the updates that all of its runs have."""
    columns: Columns = {name: [] for name in (*AXES, "value", "arm")}
    for arm in arms:
        curves, progresses = [curve_of(run) for run in arm.runs], [progress_of(run) for run in arm.runs]
        for update in thin(common(curves)):
            place = mean_place(progresses, update)
            add(columns, place, value=statistics.fmean(curve[update] for curve in curves), arm=arm.name)
    return columns


def differences(compared: list[Pair], curve_of: Any) -> Columns:
    """What each arm differs by from the first, with the band where there are repetitions."""
    columns: Columns = {name: [] for name in (*AXES, "value", "low", "high", "arm")}
    for pair in compared:
        progresses = [progress_of(run) for run in pair.first.runs]
        for update, values in difference_of(pair, curve_of):
            add(columns, mean_place(progresses, update), **values, arm=pair.second.name)
    return columns


def difference_of(pair: Pair, curve_of: Any) -> Iterator[tuple[int, dict[str, float]]]:
    """The difference of two arms update by update: of pairs where they are verified, else of means."""
    matched = pairs(pair.first, pair.second) if pair.judged.is_paired else None
    ours = [curve_of(run) for run in ([one for one, _ in matched] if matched else one_per_seed(pair.first).runs)]
    theirs = [curve_of(run) for run in ([other for _, other in matched] if matched else one_per_seed(pair.second).runs)]
    for update in thin(common([*ours, *theirs])):
        before, after = [curve[update] for curve in ours], [curve[update] for curve in theirs]
        middle = statistics.fmean(after) - statistics.fmean(before)
        low = high = middle
        if matched and len(before) > 1:
            low, high = mean_interval([b - a for a, b in zip(before, after, strict=True)])
        elif min(len(before), len(after)) > 1:
            low, high = welch_interval(before, after)
        yield update, {"value": middle, "low": low, "high": high}


def common(curves: list[Curve]) -> list[int]:
    """The updates that all curves have."""
    return sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []


def progress_of(run: Run) -> Progress:
    """Where a run stood after each of its updates."""
    return Progress(sorted(run.found.updates, key=lambda row: row["update"]))


def mean_place(progresses: list[Progress], update: int) -> dict[str, float]:
    """Where some runs stood after an update, on average."""
    places = [progress.after(update) for progress in progresses]
    return {axis: statistics.fmean(place[axis] for place in places) for axis in AXES} | {"update": update}


def add(columns: Columns, place: dict[str, float], **values: Any) -> None:
    """One more row."""
    for name, value in {**place, **values}.items():
        columns[name].append(value)
