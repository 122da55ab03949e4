"""Curves of any length in bounded memory, drawn in braille characters: each is a cell of 2 × 4 dots. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

MOST_BUCKETS = 1024
"""Twice the dots in a row of the widest chart on a screen of 250 columns."""

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille cell, by row and column; the cell itself is the character U+2800 + bits."""


class Bucket(NamedTuple):
    """Neighbouring points of a curve: where they are, and between which values."""

    first: int
    last: int
    low: float
    high: float

    def merged(self, other: Bucket) -> Bucket:
        """The bucket of both's points."""
        first, last = min(self.first, other.first), max(self.last, other.last)
        return Bucket(first, last, min(self.low, other.low), max(self.high, other.high))


class Curve:
    """Points in order. Of a long curve neighbours share a bucket, equally many each: no extreme value is ever lost."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._per_bucket = 1
        self._in_last = 0

    def add(self, x: int, value: float) -> None:
        """The next point; `value` must be finite."""
        point = Bucket(x, x, value, value)
        if self.buckets and self._in_last < self._per_bucket:
            self.buckets[-1] = self.buckets[-1].merged(point)
            self._in_last += 1
            return
        if len(self.buckets) == MOST_BUCKETS:
            self.buckets = [self.buckets[i].merged(self.buckets[i + 1]) for i in range(0, MOST_BUCKETS, 2)]
            self._per_bucket *= 2
        self.buckets.append(point)
        self._in_last = 1


def extent(buckets: Iterable[Bucket]) -> Bucket:
    """From where to where a curve goes, in both directions. Needs at least one bucket."""
    first, *others = buckets
    for bucket in others:
        first = first.merged(bucket)
    return first


def plot(buckets: list[Bucket], width: int, height: int) -> list[str]:
    """`height` lines of `width` characters, with the highest value in the first line and the lowest in the last.

    Every bucket stands from its lowest to its highest value, and a line joins it to the next.
    """
    if not buckets:
        return [" " * width] * height
    whole = extent(buckets)
    num_columns, num_rows = 2 * width, 4 * height
    newest = max(bucket.first for bucket in buckets)

    def column(x: int) -> int:
        return round((x - whole.first) / max(1, newest - whole.first) * (num_columns - 1))

    def row(value: float) -> int:
        if whole.high == whole.low:
            return num_rows // 2
        return round((whole.high - value) / (whole.high - whole.low) * (num_rows - 1))

    spans: dict[int, Bucket] = {}
    for bucket in buckets:
        at = column(bucket.first)
        spans[at] = spans[at].merged(bucket) if at in spans else bucket
    dots: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    for at, span in sorted(spans.items()):
        top, bottom = row(span.high), row(span.low)
        dots.update((at, y) for y in range(top, bottom + 1))
        middle = (at, (top + bottom) // 2)
        dots.update(line(before or middle, middle))
        before = middle
    return braille(dots, width, height)


def line(a: tuple[int, int], b: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """The dots from `a` to `b`, both included, without a gap."""
    steps = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    return (
        (a[0] + round((b[0] - a[0]) * i / steps), a[1] + round((b[1] - a[1]) * i / steps)) for i in range(steps + 1)
    )


def braille(dots: Iterable[tuple[int, int]], width: int, height: int) -> list[str]:
    """Dots at (column, row), counted from the top left, as `height` lines of `width` characters."""
    cells = [[0] * width for _ in range(height)]
    for x, y in dots:
        cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return ["".join(chr(0x2800 + bits) if bits else " " for bits in cell_row) for cell_row in cells]


# --- charts ---

LEAST_WIDTH, LEAST_HEIGHT = 16, 4
"""Of a chart, title and scale included: less shows nothing."""

SHAPE = 5.0
"""Columns for each line of a chart: what reads best."""


def charts(curves: dict[str, list[Bucket]], width: int, height: int) -> list[str]:
    """The curves that have points, by name, beside and above each other in at most `height` lines of `width` columns.

    Where there is no room for all, the first ones are drawn.
    """
    drawn = [(name, buckets) for name, buckets in curves.items() if buckets]
    across = 0
    while drawn and not across:
        across = best_columns(len(drawn), width, height)
        if not across:
            drawn.pop()
    lines: list[str] = []
    for start in range(0, len(drawn), across or 1):
        beside = drawn[start : start + across]
        each_width = (width - 2 * (len(beside) - 1)) // len(beside)
        each_height = height // -(-len(drawn) // across)
        blocks = [chart(name, buckets, each_width, each_height) for name, buckets in beside]
        lines += ["  ".join(block[i] for block in blocks) for i in range(each_height)]
    return lines


def best_columns(count: int, width: int, height: int) -> int:
    """How many of `count` charts to set beside each other; 0 if there is no room for so many."""
    fitting = []
    for across in range(1, count + 1):
        each_width, each_height = (width - 2 * (across - 1)) // across, height // -(-count // across)
        if each_width >= LEAST_WIDTH and each_height >= LEAST_HEIGHT:
            fitting.append((abs(math.log(each_width / each_height / SHAPE)), across))
    return min(fitting)[1] if fitting else 0


def chart(name: str, buckets: list[Bucket], width: int, height: int) -> list[str]:
    """A curve under its title, with its highest and lowest value at the side: `height` lines of `width` columns."""
    whole = extent(buckets)
    high, low = short(whole.high), short(whole.low)
    scale = max(len(high), len(low))
    labels = [high, *[""] * (height - 3), low]
    titles = (f"{name}, updates {whole.first:,} to {whole.last:,}", f"{name}, {whole.first:,} to {whole.last:,}", name)
    title = next((title for title in titles if len(title) <= width), name)
    drawn = plot(buckets, width - scale - 1, height - 1)
    return [title[:width].ljust(width), *(f"{labels[i]:>{scale}} {drawn[i]}" for i in range(height - 1))]


def short(value: float) -> str:
    """A number in few characters."""
    if 1e4 <= abs(value) < 1e9:
        return f"{value / 1e6:.4g}M" if abs(value) >= 1e6 else f"{value / 1e3:.4g}k"
    return f"{value:.4g}"
