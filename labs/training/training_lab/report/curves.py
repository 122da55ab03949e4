"""What was measured update by update, as curves of bounded size over three axes: updates, target tokens, training time.

A long curve is thinned to the lowest and the highest point of each stretch, so that no peak is lost. Pure.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from training_lab.report.reading import number
from training_lab.tracking import Row

AXES = ("update", "tokens", "seconds")
"""Completed updates; target tokens trained on so far; seconds of these updates, what lies between them left out."""

MOST_POINTS = 500
FEWEST_FOR_MEAN = 20
"""With fewer updates the points themselves are all there is to see."""

Columns = dict[str, list[Any]]


class Progress:
    """Where a run stood after each of its updates, on every axis."""

    def __init__(self, updates: Sequence[Row]) -> None:
        self.updates = [row["update"] for row in updates]
        self.tokens = running_sum(number(row.get("target_tokens")) for row in updates)
        self.seconds = running_sum(number(row.get("seconds")) for row in updates)

    def after(self, update: int) -> dict[str, float]:
        """The place of something that was measured after an update."""
        done = bisect_right(self.updates, update)
        return {"update": update, "tokens": self.tokens[done], "seconds": self.seconds[done]}

    def before(self, index: int) -> dict[str, float]:
        """The place between the row `index` and the one before it."""
        return self._between(index - 1, index)

    def behind(self, index: int) -> dict[str, float]:
        """The place between the row `index` and the one after it."""
        return self._between(index, index + 1)

    def _between(self, left: int, right: int) -> dict[str, float]:
        known = range(len(self.updates))
        near = [self.updates[i] for i in (left, right) if i in known]
        edges = [min(max(i + 1, 0), len(self.updates)) for i in (left, right)]
        update = sum(near) / 2 if len(near) == 2 else near[0] + (0.5 if left in known else -0.5)
        tokens, seconds = ((sums[edges[0]] + sums[edges[1]]) / 2 for sums in (self.tokens, self.seconds))
        return {"update": update, "tokens": tokens, "seconds": seconds}


def running_sum(values: Iterable[float | None]) -> list[float]:
    """The sum before each value and after the last; an unknown one adds nothing."""
    return list(itertools.accumulate((value or 0 for value in values), initial=0))


def curve_of(
    updates: Sequence[Row],
    progress: Progress,
    value_of: Callable[[Row], float | None],
    name: str,
    with_mean: bool = False,
) -> Columns:
    """One figure of every update, thinned; `mean` beside it is the running mean of all its values, if wanted."""
    values = [value_of(row) for row in updates]
    kept = thinned(values)
    columns: Columns = {
        "update": [progress.updates[i] for i in kept],
        "tokens": [progress.tokens[i + 1] for i in kept],
        "seconds": [progress.seconds[i + 1] for i in kept],
        name: [values[i] for i in kept],
    }
    if with_mean and len(values) >= FEWEST_FOR_MEAN:
        means = exponential_mean(values, half_life(len(values)))
        columns["mean"] = [means[i] for i in kept]
    return columns


def thinned(values: Sequence[float | None], at_most: int = MOST_POINTS) -> list[int]:
    """The indices of at most so many values: first, last, and of each stretch between them the lowest and highest."""
    known = [i for i, value in enumerate(values) if value is not None]
    if len(known) <= at_most:
        return known
    inner, stretches = known[1:-1], at_most // 2 - 1
    kept = {known[0], known[-1]}
    edges = [round(i * len(inner) / stretches) for i in range(stretches + 1)]
    for low, high in itertools.pairwise(edges):
        stretch = inner[low:high]
        kept |= {min(stretch, key=lambda i: values[i] or 0.0), max(stretch, key=lambda i: values[i] or 0.0)}
    return sorted(kept)


def half_life(num_updates: int) -> int:
    """Updates after which a value's weight in the running mean has halved: a fiftieth of the run, at least 2."""
    return max(2, round(num_updates / 50))


def exponential_mean(values: Sequence[float | None], half_life_updates: float) -> list[float | None]:
    """The exponential moving mean (EMA) of the values so far, not pulled towards zero at the beginning."""
    keep = 0.5 ** (1 / half_life_updates)
    total = weight = 0.0
    means: list[float | None] = []
    for value in values:
        if value is not None:
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(total / weight if weight else None)
    return means


def speed_of(row: Row) -> float | None:
    """Target tokens per second of one update."""
    tokens, seconds = number(row.get("target_tokens")), number(row.get("seconds"))
    return tokens / seconds if tokens is not None and seconds is not None and seconds > 0 else None


def ranges(excluded: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """Updates with their reasons, those that follow each other for the same reason joined."""
    joined: list[dict[str, Any]] = []
    for update, reason in sorted(excluded):
        if joined and joined[-1]["reason"] == reason and joined[-1]["to"] == update - 1:
            joined[-1]["to"] = update
        else:
            joined.append({"from": update, "to": update, "reason": reason})
    return joined


def bands(spans: Sequence[dict[str, Any]], progress: Progress) -> Columns:
    """Ranges of updates as stretches of every axis, from half an update before to half an update after."""
    index_of = {update: index for index, update in enumerate(progress.updates)}
    columns: Columns = {key: [] for axis in AXES for key in (axis, f"{axis}_end")} | {"reason": []}
    for span in spans:
        if span["from"] in index_of and span["to"] in index_of:
            begin, end = progress.before(index_of[span["from"]]), progress.behind(index_of[span["to"]])
            for axis in AXES:
                columns[axis].append(begin[axis])
                columns[f"{axis}_end"].append(end[axis])
            columns["reason"].append(span["reason"])
    return columns


def resumes(updates: Sequence[Row], progress: Progress) -> Columns:
    """Where the run went on in another process."""
    columns: Columns = {axis: [] for axis in AXES} | {"segment": []}
    for index, (before, after) in enumerate(itertools.pairwise(updates), start=1):
        if before.get("segment") != after.get("segment"):
            place = progress.before(index)
            for axis in AXES:
                columns[axis].append(place[axis])
            columns["segment"].append(after.get("segment"))
    return columns
