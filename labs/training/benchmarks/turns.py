"""Fair timing in one process: each way in turn, several turns, in an order that changes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def alternate(ways: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """The seconds of each way in each turn; every way is called once before, unmeasured."""
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def print_table(seconds: dict[str, list[float]], first_is: str, work: float = 0.0, unit: str = "") -> None:
    """Medians, ranges and the median ratio within a turn, as Markdown. `work` in each call gives a rate in `unit`."""
    first = next(iter(seconds))
    print(f"| | ms | from – to | {first_is} |{f' {unit} |' if work else ''}")
    print(f"|---|---|---|---|{'---|' if work else ''}")
    for name, times in seconds.items():
        ratio = statistics.median(other / own for own, other in zip(seconds[first], times, strict=True))
        rate = f" {work / statistics.median(times):,.0f} |" if work else ""
        print(
            f"| {name} | {1000 * statistics.median(times):,.1f} | {1000 * min(times):,.1f} – {1000 * max(times):,.1f} "
            f"| {f'{ratio:.2f} ×' if name != first else ''} |{rate}"
        )
