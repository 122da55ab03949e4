"""What a person sees while something long goes on: a bar on a terminal, a line now and then elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from training_lab.output import forget_output, print_line

LINE_EVERY_S = 10.0


class Progress(Protocol):
    """Shows how far a piece of work is. Entered for as long as it shows something live."""

    def __enter__(self) -> Progress: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, what: str, done: float, total: float | None, figures: str) -> None:
        """`what` is `done` of `total` (None: nobody knows), with more figures in words. Cheap: call it often."""

    def note(self, text: str) -> None:
        """Something that the person should know at once, such as why nothing goes on."""


class NoProgress:
    """For programs, and for work that somebody else shows."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, what: str, done: float, total: float | None, figures: str) -> None:
        """Says nothing."""

    def note(self, text: str) -> None:
        """Says nothing."""


class LineProgress:
    """A line when a piece of work has gone on for a while, and again every ten seconds."""

    def __init__(self) -> None:
        self.what, self.next_s = "", 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, what: str, done: float, total: float | None, figures: str) -> None:
        now = time.monotonic()
        if what != self.what:
            self.what, self.next_s = what, now + LINE_EVERY_S
        if now >= self.next_s:
            self.next_s = now + LINE_EVERY_S
            share = f" {done / total:.0%}" if total else ""
            print_line(f"  {what}{share}{', ' + figures if figures else ''}")

    def note(self, text: str) -> None:
        print_line(f"  {text}")


class BarProgress:
    """A bar that goes away when the work is done."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
        columns += [TextColumn("{task.fields[figures]}"), TimeRemainingColumn()]
        self.bar = Progress(*columns, console=Console(highlight=False), transient=True)
        self.what = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, what: str, done: float, total: float | None, figures: str) -> None:
        try:
            if what != self.what:
                self.what = what
                for task in self.bar.task_ids:
                    self.bar.remove_task(task)
                self.task = self.bar.add_task(what, total=total, figures=figures)
                self.bar.start()
            self.bar.update(self.task, completed=done, total=total, figures=figures)
        except OSError:
            forget_output()

    def note(self, text: str) -> None:
        try:
            self.bar.console.print(f"  {text}", markup=False, soft_wrap=True)
        except OSError:
            forget_output()


def make_progress(as_json: bool) -> Progress:
    """The progress for this process's output."""
    if as_json:
        return NoProgress()
    return BarProgress() if sys.stdout.isatty() else LineProgress()
