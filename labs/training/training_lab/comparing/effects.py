"""What a change did: each figure of two arms with its difference and verdict. Pure.

Losses are compared where both have seen the same number of target tokens, and where both have trained for the same
seconds; between two evaluations the loss is taken to go in a straight line. With other tokenizers tokens are other
things: then it is the last loss, in bits a byte of the same text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from training_lab.comparing.arms import Arm, Run, one_per_seed, pairs
from training_lab.comparing.comparability import LEARNING, have_other_tokenizers, manifest
from training_lab.comparing.significance import Verdict, compare_divergence, compare_values
from training_lab.report.units import MIB

PRACTICAL = 0.01
"""Of speed and memory, a change below 1 % is none that anybody would act upon."""
LOSS_UNITS = ("nats", "bits/byte")

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


class Question(NamedTuple):
    """What was to be found out."""

    endpoint: str = "tokens"
    """Which figure decides: the validation loss at equal `tokens`, or after equal `seconds`."""
    delta: float | None = None
    """The smallest loss that matters; None: half a percent."""
    floor: Sequence[float] | None = None
    """The endpoint of repetitions of the first arm, measured before."""


def effects(first: Arm, second: Arm, is_paired: bool, question: Question) -> list[Effect]:
    """Every figure of the two arms; the first is the endpoint, whatever else is found by looking."""
    runs = [*first.runs, *second.runs]
    if any(run.has_diverged for run in runs):
        return [divergence(first, second)]
    figures = loss_figures(runs)
    if question.endpoint == "seconds":
        figures = sorted(figures, key=lambda figure: "updates" not in figure.name)
    figures += [
        Figure("speed", "target tokens/s", "speed", False, summary("throughput", "target_tokens_per_s")),
        Figure("MFU, causal", "share", "speed", False, summary("utilisation", "mfu", "causal")),
        Figure("peak memory", "MiB", "speed", True, peak_memory),
    ]
    endpoint, *others = [figure for figure in figures if any(figure.of(run) is not None for run in runs)] or figures
    return [
        effect(endpoint, first, second, is_paired, question),
        *(effect(figure, first, second, is_paired, question._replace(floor=None)) for figure in others),
    ]


def divergence(first: Arm, second: Arm) -> Effect:
    """How many runs diverged. The losses of the others are a selection, and not compared."""
    before, after = ([run.has_diverged for run in one_per_seed(arm).runs] for arm in (first, second))
    verdict = compare_divergence(before, after)
    return Effect("runs that diverged", "share", "learning", [*map(float, before)], [*map(float, after)], verdict)


def loss_figures(runs: list[Run]) -> list[Figure]:
    """The validation loss: at equal tokens, after equal time, and how soon the level is reached that all reach."""
    by_seconds = [curve_by_seconds(run) for run in runs]
    seconds = min((curve[-1][0] for curve in by_seconds if curve), default=0.0)
    after_time = f"after {seconds:,.1f} s of updates"
    if have_other_tokenizers(runs):
        last = Figure("validation loss at the end", "bits/byte", "learning", True, last_bits_per_byte)
        timed = lambda run: scaled(at(curve_by_seconds(run), seconds), run)  # noqa: E731
        return [last, Figure(f"validation loss {after_time}", "bits/byte", "speed", True, timed)]
    curves = [curve_by_tokens(run) for run in runs]
    tokens = min((curve[-1][0] for curve in curves if curve), default=0.0)
    level = max((curve[-1][1] for curve in curves if curve), default=0.0)
    return [
        Figure(f"validation loss at {tokens:,.0f} target tokens", "nats", "learning", True,
               lambda run: at(curve_by_tokens(run), tokens)),
        Figure(f"validation loss {after_time}", "nats", "speed", True,
               lambda run: at(curve_by_seconds(run), seconds)),
        Figure(f"target tokens to reach a loss of {level:.4f}", "tokens", "learning", True,
               lambda run: reach(curve_by_tokens(run), level)),
    ]  # fmt: skip


def effect(figure: Figure, first: Arm, second: Arm, is_paired: bool, question: Question) -> Effect:
    """One figure of two arms."""
    is_loss = figure.unit in LOSS_UNITS
    has_repeats = any(len(one_per_seed(arm).runs) < len(arm.runs) for arm in (first, second))
    if figure.matters_for == LEARNING or is_loss:
        first, second = one_per_seed(first), one_per_seed(second)
    elif has_repeats:  # another launch is a repetition of a speed, and no pair
        is_paired = False
    matched = pairs(first, second) if is_paired else None
    ours = [one for one, _ in matched] if matched else first.runs
    theirs = [other for _, other in matched] if matched else second.runs
    before, after = ([value for value in map(figure.of, runs) if value is not None] for runs in (ours, theirs))
    if len(before) < len(ours) or len(after) < len(theirs):
        return Effect(figure.name, figure.unit, figure.matters_for, before, after, None, "some run does not have it")
    mean = sum(before) / len(before)
    verdict = compare_values(
        before, after, is_paired=is_paired, lower_is_better=figure.lower_is_better,
        delta=question.delta if is_loss else PRACTICAL * abs(mean), is_practical=not is_loss, floor=question.floor,
    )  # fmt: skip
    return Effect(figure.name, figure.unit, figure.matters_for, before, after, verdict)


def curve_by_tokens(run: Run) -> Curve:
    """The validation loss by the target tokens that were trained on before it."""
    return curve(run, "target_tokens")


def curve_by_seconds(run: Run) -> Curve:
    """The validation loss by the seconds of the updates before it: setup, evaluation and saving are not the change."""
    return curve(run, "seconds")


def curve(run: Run, key: str) -> Curve:
    """The evaluations of a run by the sum of something over the updates before each."""
    updates = sorted(run.found.updates, key=lambda row: row["update"])
    sums = dict(zip((row["update"] for row in updates), itertools.accumulate(row[key] for row in updates), strict=True))
    return sorted((float(sums.get(row["update"], 0.0)), float(row["val_loss"])) for row in run.found.evaluations)


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


def last_bits_per_byte(run: Run) -> float | None:
    """The last validation loss, in bits a byte of text."""
    points = curve_by_seconds(run)
    return scaled(points[-1][1], run) if points else None


def scaled(loss: float | None, run: Run) -> float | None:
    """A mean loss in nats a token as bits a byte: the sum over the set is the same."""
    said = manifest(run, "validation")
    if loss is None or not said.get("target_bytes"):
        return None
    return loss * float(said["target_tokens"]) / (float(said["target_bytes"]) * math.log(2))


def peak_memory(run: Run) -> float | None:
    """In MiB: allocated in updates on a GPU, of the whole process elsewhere."""
    allocated = summary("memory", "scopes", "updates", "allocated_bytes")(run)
    peak = allocated if allocated is not None else summary("memory", "process_peak_bytes")(run)
    return peak / MIB if peak is not None else None


def summary(*keys: str) -> Callable[[Run], float | None]:
    """A figure of a run's summary."""

    def of(run: Run) -> float | None:
        value: Any = run.found["summary.json"]
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    return of
