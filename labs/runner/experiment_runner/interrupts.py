"""Ctrl-C in stages: the first ends the job and stops the machine, the second only stops it, the third leaves at once.

A signal sets a number and nothing else, so that no action is torn in half; whoever waits looks at it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
LOOK_S = 0.1
WORDS = {
    1: "Stopping: the job is ended, what exists is fetched, the machine is stopped. Again: only stop the machine.",
    2: "Only the machine is stopped now. Again: leave at once, and leave it as it is.",
}


class Interrupted(Exception):
    """The person wants to stop. No error of anything."""


class Interrupts:
    """Counts signals. Entered for as long as a machine may be there."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.count = 0
        self.answered = 0
        """How many of them were acted upon."""
        self.is_held = False
        """While a machine is created and its id is not yet on disk: the third signal waits as well."""
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # such as under nohup
                    self.before[number] = signal.signal(number, self.receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """What the system calls."""
        self.count += 1
        if self.count >= 3 and not self.is_held:
            raise KeyboardInterrupt
        self.say(WORDS.get(self.count, "One moment: the machine's id is being written down."))

    def look(self) -> None:
        """Raises Interrupted if there was a signal that nobody acted upon."""
        if self.count >= 3:
            raise KeyboardInterrupt
        if self.count > self.answered:
            self.answered = self.count
            raise Interrupted

    def sleep(self, seconds: float) -> None:
        """Sleeps, unless the person wants to stop."""
        deadline = time.monotonic() + seconds
        self.look()
        while time.monotonic() < deadline:
            time.sleep(min(LOOK_S, max(0.0, deadline - time.monotonic())))
            self.look()
