"""A recorded timeline in figures: what an update consists of, what took longest, how long the device idled. Pure.

Reads the events of a Chrome trace as torch's profiler writes it; times in it are microseconds. Only what happened
within the ranges named `update N` counts. On a GPU the device is busy while a kernel or copy runs; on a CPU while an
operator runs, and what is left is Python.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]

PHASES = ("batch", "zero_grad", "transfer", "forward", "backward", "clip", "optimizer")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN_OPERATORS = 15
GAP_BOUNDS_S = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, float("inf"))

BUSY = {
    True: "time in which a kernel or copy ran on the GPU, of the updates' time",
    False: "time in which an operator of torch ran on the CPU, of the updates' time",
}


def summarise_trace(events: list[Event]) -> dict[str, Any]:
    """The content of `summary.json`'s `timeline`. Raises ValueError if the events hold no update."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    updates = {int(name[7:]): span_of(e) for e in spans if is_update(e) for name in [e["name"]]}
    if not updates:
        raise ValueError("the trace has no update in it")
    windows = sorted(updates.values())
    total_us = sum(end - begin for begin, end in windows)
    has_gpu = any(event.get("cat") in GPU_WORK for event in spans)
    work = [event for event in spans if event.get("cat") in (GPU_WORK if has_gpu else ("cpu_op",))]
    ran = union(map(span_of, work))
    busy = [part for window in windows for part in clip(ran, window)]
    idle = [gap for window in windows for gap in gaps_between(clip(busy, window), window)]
    return {
        "updates": sorted(updates),
        "seconds": total_us / 1e6,
        "busy": {"share": sum(end - begin for begin, end in busy) / total_us, "definition": BUSY[has_gpu]},
        "phases": phases(spans, windows, total_us, has_gpu),
        "operators": operators(work, windows, total_us, has_gpu),
        "gaps": describe_gaps(idle),
    }


def is_update(event: Event) -> bool:
    """Whether an event is the range of an update, as the lab marks it."""
    name = str(event.get("name"))
    return event.get("cat") == "user_annotation" and name.startswith("update ") and name[7:].isdigit()


def span_of(event: Event) -> Interval:
    """Begin and end of an event."""
    return event["ts"], event["ts"] + event["dur"]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, in intervals that do not touch, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The part of intervals that lies within the window."""
    cut = ((max(begin, window[0]), min(end, window[1])) for begin, end in intervals)
    return [(begin, end) for begin, end in cut if begin < end]


def gaps_between(busy: list[Interval], window: Interval) -> list[float]:
    """How long each stretch of the window is in which nothing ran, µs."""
    edges = [window[0], *(edge for interval in busy for edge in interval), window[1]]
    return [end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin]


def is_within(event: Event, windows: list[Interval]) -> bool:
    """Whether an event begins in one of the windows."""
    return any(begin <= event["ts"] < end for begin, end in windows)


def phases(spans: list[Event], windows: list[Interval], total_us: float, has_gpu: bool) -> list[dict[str, Any]]:
    """The time of each named part of an update: on a GPU from its first kernel to its last."""
    category = "gpu_user_annotation" if has_gpu else "user_annotation"
    found: dict[str, list[float]] = defaultdict(list)
    for event in spans:
        if event.get("name") in PHASES and event.get("cat") == category and is_within(event, windows):
            found[event["name"]].append(event["dur"])
    totals = {name: sum(found[name]) for name in PHASES if name in found}
    return [
        {"name": name, "count": len(found[name]), "seconds": total / 1e6, "share": total / total_us}
        for name, total in totals.items()
    ]


def operators(work: list[Event], windows: list[Interval], total_us: float, has_gpu: bool) -> list[dict[str, Any]]:
    """What took the most time itself, without the operators that it called."""
    chosen = [event for event in work if is_within(event, windows)]
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    own = [event["dur"] for event in chosen] if has_gpu else own_times(chosen)
    for event, duration in zip(chosen, own, strict=True):
        seconds[event["name"]] += duration / 1e6
        counts[event["name"]] += 1
    longest = sorted(seconds, key=lambda name: (-seconds[name], name))[:SHOWN_OPERATORS]
    return [
        {"name": name, "count": counts[name], "seconds": seconds[name], "share": seconds[name] * 1e6 / total_us}
        for name in longest
    ]


def own_times(events: list[Event]) -> list[float]:
    """The duration of each event without those that ran within it on the same thread, µs."""
    own = [event["dur"] for event in events]
    open_ones: dict[Any, list[int]] = defaultdict(list)
    order = sorted(range(len(events)), key=lambda index: (events[index]["ts"], -events[index]["dur"]))
    for index in order:
        event = events[index]
        stack = open_ones[event.get("pid"), event.get("tid")]
        while stack and span_of(events[stack[-1]])[1] <= event["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= event["dur"]
        stack.append(index)
    return own


def describe_gaps(gaps_us: list[float]) -> dict[str, Any]:
    """How many stretches of idleness there were, by how long they were."""
    seconds = [gap / 1e6 for gap in gaps_us]
    bins = []
    for low, high in itertools.pairwise(GAP_BOUNDS_S):
        inside = [gap for gap in seconds if low <= gap < high]
        below = None if high == float("inf") else high
        bins.append({"from_s": low, "below_s": below, "count": len(inside), "seconds": sum(inside)})
    return {"count": len(seconds), "seconds": sum(seconds), "longest_s": max(seconds, default=0.0), "histogram": bins}
