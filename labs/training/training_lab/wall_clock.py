"""Where a process's time goes: at every moment one part of the work is being done, and its clock runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PARTS = ("setup", "data", "update", "evaluation", "checkpoint", "profile", "other")

DEFINITION = (
    "seconds of the process by what it was doing. setup: assembling, restoring, compiling; data: preparing the text; "
    "update: batch to optimizer, every update; evaluation, checkpoint: between updates; profile: starting and writing "
    "timeline, memory history and the matrix-multiply probe; other: rows, records, mirrors. Until this summary was "
    "written: the report and the manifest come after it"
)


@dataclass
class Span:
    """A stretch of time on one part, parts within it left out; known once it is over."""

    seconds: float = 0.0


class WallClock:
    """Divides the time since `started` among PARTS. Outside of every part it is `setup`, later `other`."""

    def __init__(self, started: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.started = now() if started is None else started
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._current, self._since = "setup", self.started

    def switch(self, part: str) -> None:
        """From now on it is this part's time."""
        now = self._now()
        self._seconds[self._current] += now - self._since
        self._current, self._since = part, now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Span]:
        """This part's time while it is entered; then again that of what was before."""
        before, span = self._current, Span()
        self.switch(name)
        already = self._seconds[name]
        try:
            yield span
        finally:
            self.switch(before)
            span.seconds = self._seconds[name] - already

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._now() - self.started

    def parts_s(self) -> dict[str, float]:
        """Seconds of each part until now, as `setup_s` and so on."""
        self.switch(self._current)
        return {f"{name}_s": seconds for name, seconds in self._seconds.items()}
