"""Printing when whoever reads it may have gone, as in `... | head` or after a lost connection."""

from __future__ import annotations

import os
import sys


def print_line(text: str) -> None:
    """Prints a line at once. If nobody reads it any more, it and what follows go nowhere, and nothing stops."""
    try:
        print(text, flush=True)
    except OSError:
        forget_output()


def forget_output() -> None:
    """Sends what is still printed nowhere, so that Python does not fail over it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
