"""Stopping on request: the first signal finishes the update and saves, the second ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class StopRequest:
    """Listens for SIGINT (Ctrl-C), SIGTERM and SIGHUP (a lost connection) while it is entered."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def agree(self, maximum: Callable[[int], int]) -> bool:
        """Whether this process, or any that trains with it, was told to stop: the same answer in all of them. `maximum`
        is over all processes."""
        number = maximum(self.signal or 0)
        if number:
            self.signal = signal.Signals(number)
        return number > 0  # a signal that came after the question is heard at the next one

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that was stopped: 128 and the signal's number (SIGINT 130, SIGTERM 143,
        SIGHUP 129); 0 without one."""
        return 128 + self.signal if self.signal else 0

    def state(self) -> str:
        """The run's state after the stop: `interrupted` by a signal, `stopped` where the person said so before."""
        return "interrupted" if self.requested else "stopped"

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup asks to be left alone
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        # Written past Python's buffers: a print may have been interrupted by this very signal.
        text = f"\n{self.signal.name}: finishing this update, then saving; once more to end at once\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
