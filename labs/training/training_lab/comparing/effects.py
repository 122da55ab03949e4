"""What a change did: each figure of two arms with its difference and verdict. Pure.

Losses are compared where both have seen the same number of target tokens, and where both have trained for the same
seconds; between two evaluations the loss is taken to go in a straight line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from training_lab.comparing.arms import Arm, Run, pairs
from training_lab.comparing.significance import Verdict, compare_values

MEMORY_DELTA = 1 << 20
SPEED_DELTA = 0.01
"""A change of speed below 1 % is none that anybody would act upon."""

Curve = list[tuple[float, float]]
"""(position, validation loss), by rising position."""


class Effect(NamedTuple):
    """One figure."""

    name: str
    unit: str
    matters_for: str
    """`learning` or `speed`."""
    first: list[float]
    """Of each run of the first arm."""
    second: list[float]
    verdict: Verdict | None
    """None where it cannot be compared; then `reason` says why."""
    reason: str = ""


class Figure(NamedTuple):
    """How a figure is read off a run."""

    name: str
    unit: str
    matters_for: str
    lower_is_better: bool
    of: Callable[[Run], float | None]
    delta: Callable[[float], float | None] = lambda mean: None
    """The smallest difference that matters, from the first arm's mean; None: the default."""


def effects(first: Arm, second: Arm, is_paired: bool, delta: float | None = None) -> list[Effect]:
    """Every figure of the two arms; the first is the endpoint. `delta` is the smallest loss that matters."""
    runs = [*first.runs, *second.runs]
    tokens = min((curve_by_tokens(run)[-1][0] for run in runs if curve_by_tokens(run)), default=0.0)
    seconds = min((curve_by_seconds(run)[-1][0] for run in runs if curve_by_seconds(run)), default=0.0)
    level = max((curve_by_tokens(run)[-1][1] for run in runs if curve_by_tokens(run)), default=0.0)
    figures = [
        Figure(f"validation loss at {tokens:,.0f} target tokens", "nats", "learning", True,
               lambda run: at(curve_by_tokens(run), tokens), lambda mean: delta),
        Figure(f"validation loss after {seconds:,.1f} s of updates", "nats", "speed", True,
               lambda run: at(curve_by_seconds(run), seconds), lambda mean: delta),
        Figure(f"target tokens to reach a loss of {level:.4f}", "tokens", "learning", True,
               lambda run: reach(curve_by_tokens(run), level)),
        Figure("speed", "target tokens/s", "speed", False, summary("throughput", "target_tokens_per_s"),
               lambda mean: SPEED_DELTA * mean),
        Figure("MFU, causal", "share", "speed", False, summary("utilisation", "mfu", "causal"),
               lambda mean: SPEED_DELTA * mean),
        Figure("peak memory", "bytes", "speed", True, summary("last_process", "peak_memory", "bytes"),
               lambda mean: MEMORY_DELTA),
    ]  # fmt: skip
    return [effect(figure, first, second, is_paired) for figure in figures]


def effect(figure: Figure, first: Arm, second: Arm, is_paired: bool) -> Effect:
    """One figure of two arms."""
    matched = pairs(first, second) if is_paired else None
    ours = [one for one, _ in matched] if matched else first.runs
    theirs = [other for _, other in matched] if matched else second.runs
    before, after = ([value for value in map(figure.of, runs) if value is not None] for runs in (ours, theirs))
    if len(before) < len(ours) or len(after) < len(theirs):
        return Effect(figure.name, figure.unit, figure.matters_for, before, after, None, "some run does not have it")
    delta = figure.delta(sum(before) / len(before))
    verdict = compare_values(
        before, after, is_paired=is_paired, lower_is_better=figure.lower_is_better, delta=delta
    )  # fmt: skip
    return Effect(figure.name, figure.unit, figure.matters_for, before, after, verdict)


def curve_by_tokens(run: Run) -> Curve:
    """The validation loss by the target tokens that were trained on before it."""
    return curve(run, lambda row: float(row["target_tokens"]))


def curve_by_seconds(run: Run) -> Curve:
    """The validation loss by the seconds of the updates before it: setup, evaluation and saving are not the change."""
    return curve(run, lambda row: float(row["seconds"]))


def curve(run: Run, size: Callable[[dict[str, Any]], float]) -> Curve:
    """The evaluations of a run by the sum of something over the updates before each."""
    updates = sorted(run.found.updates, key=lambda row: row["update"])
    sums = dict(zip((row["update"] for row in updates), itertools.accumulate(map(size, updates)), strict=True))
    points = [(sums.get(row["update"], 0.0), float(row["val_loss"])) for row in run.found.evaluations]
    return sorted(points)


def at(points: Curve, position: float) -> float | None:
    """The loss at a position; None outside of what was measured."""
    for (left, before), (right, after) in itertools.pairwise(points):
        if left <= position <= right:
            return after if right == left else before + (after - before) * (position - left) / (right - left)
    return None


def reach(points: Curve, level: float) -> float | None:
    """Where the loss first falls to a level; None if it never does."""
    if points and points[0][1] <= level:
        return points[0][0]
    for (left, before), (right, after) in itertools.pairwise(points):
        if after <= level:
            return left + (right - left) * (before - level) / (before - after) if before > after else right
    return None


def summary(*keys: str) -> Callable[[Run], float | None]:
    """A figure of a run's summary."""

    def of(run: Run) -> float | None:
        value: Any = run.found["summary.json"]
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    return of
