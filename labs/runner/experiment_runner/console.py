"""What a person sees: a line for each thing that happens, a bar for what takes long on a terminal, and the job's own
output as it is."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

LINE_EVERY_S = 10.0
BAR_EVERY_S = 0.2
BAR_WIDTH = 24
MB = 1e6


class Console:
    """Writes to standard output; for a program, JSON lines instead. Nobody reading any more stops nothing."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.is_terminal = not as_json and sys.stdout.isatty()
        self.began = self.shown = time.monotonic()
        self.has_bar = False

    def say(self, text: str) -> None:
        """A line, with the time since the command began."""
        seconds = int(time.monotonic() - self.began)
        self.write({"event": "note", "message": text}, f"[{seconds // 60:02d}:{seconds % 60:02d}] {text}\n")

    def warn(self, text: str) -> None:
        """Something that should not be overlooked."""
        self.write({"event": "warning", "message": text}, f"warning: {text}\n")

    def error(self, text: str) -> None:
        """Why a command did not do what it should."""
        print(f"error: {text}", file=sys.stderr, flush=True)

    def log(self, output: bytes) -> None:
        """What the job printed."""
        text = output.decode("utf-8", "replace")
        self.write({"event": "log", "text": text}, text)

    def summary(self, values: dict[str, Any], lines: list[str]) -> None:
        """How it ended: three verdicts and what follows from them."""
        self.write({"event": "summary", **values}, "".join(f"{line}\n" for line in lines))

    def progress(self, what: str, done: int, total: int) -> None:
        """How many bytes of a transfer are through. Cheap: call it often."""
        now = time.monotonic()
        if self.as_json or now - self.shown < (BAR_EVERY_S if self.is_terminal else LINE_EVERY_S):
            return
        self.shown = now
        share = done / total if total else 1.0
        figures = f"{what} {done / MB:,.1f} of {total / MB:,.1f} MB ({share:.0%})"
        if self.is_terminal:
            filled = int(share * BAR_WIDTH)
            self.put(f"\r\033[K[{'█' * filled}{' ' * (BAR_WIDTH - filled)}] {figures}")
            self.has_bar = True
        else:
            self.say(figures)

    def write(self, value: dict[str, Any], text: str) -> None:
        """One thing, in the form that was asked for."""
        if self.as_json:
            self.put(json.dumps(value, ensure_ascii=False) + "\n")
            return
        if self.has_bar:
            self.has_bar, text = False, f"\r\033[K{text}"
        self.put(text)

    def put(self, text: str) -> None:
        # A signal may interrupt a line that is being written, and has something to say itself: RuntimeError.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            sys.stdout.write(text)
            sys.stdout.flush()
