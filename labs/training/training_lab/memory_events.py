"""Allocations and frees as a picture: how much memory was held at each moment, and the most in each phase. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

MOST_POINTS = 2000

DEFINITION = (
    "bytes in tensors, from what was held when the recording began and each allocation and free after it; of a long "
    "curve the lowest and the highest point of each stretch"
)


class Change(NamedTuple):
    """An allocation, or with a negative number a free."""

    at_s: float
    bytes: int


class Phase(NamedTuple):
    """A named stretch of time."""

    name: str
    begin_s: float
    end_s: float


def memory_picture(changes: Iterable[Change], phases: list[Phase], base_bytes: int) -> dict[str, Any]:
    """Curve and phases, in seconds since the first phase began. `base_bytes` were held before the first change."""
    begin_s = min(phase.begin_s for phase in phases)
    ordered = sorted(changes, key=lambda change: change.at_s)
    times = [change.at_s - begin_s for change in ordered]
    held = list(itertools.accumulate((change.bytes for change in ordered), initial=base_bytes))

    def describe(phase: Phase) -> dict[str, Any]:
        """When a phase was, and the most that was held in it: what it began with counts as well."""
        begin, end = phase.begin_s - begin_s, phase.end_s - begin_s
        first, last = bisect.bisect_left(times, begin), bisect.bisect_right(times, end)
        peak = max(held[first : last + 1])  # held[i] is what was held before change i
        return {"name": phase.name, "begin_s": round(begin, 9), "end_s": round(end, 9), "peak_bytes": peak}

    thinned = thin(list(zip([0.0, *times], held, strict=True)))
    return {
        "definition": DEFINITION,
        "base_bytes": base_bytes,
        "phases": [describe(phase) for phase in phases],
        "curve": {"s": [round(at_s, 9) for at_s, _ in thinned], "bytes": [number for _, number in thinned]},
    }


def thin(points: list[tuple[float, int]], at_most: int = MOST_POINTS) -> list[tuple[float, int]]:
    """At most so many points: of neighbours the lowest and the highest, so that no peak is lost."""
    if len(points) <= at_most:
        return points
    kept: list[tuple[float, int]] = [points[0]]
    buckets = at_most // 2 - 1
    edges = [1 + round(i * (len(points) - 2) / buckets) for i in range(buckets + 1)]
    for low, high in itertools.pairwise(edges):
        bucket = range(low, high)
        extremes = {min(bucket, key=lambda i: points[i][1]), max(bucket, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(extremes)]
    return [*kept, points[-1]]
