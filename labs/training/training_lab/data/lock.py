"""One process at a time: the others wait, and say why."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from experiment_runner.durable import try_lock
from training_lab.progress import Progress


@contextlib.contextmanager
def waiting_lock(path: Path, why: str, progress: Progress) -> Iterator[None]:
    """Held by one process at a time; the others wait, and say so."""
    with open(path, "a+", encoding="utf-8") as file:
        if not try_lock(file):
            progress.note(f"{why}; waiting for it")
            while not try_lock(file):
                time.sleep(0.2)
        yield
