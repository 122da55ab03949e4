"""The folder on the target: `control/` is the supervisor's, `job/` holds what was sent and where the steps run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

CONTROL = Path(sys.argv[0]).resolve().parent
WORK = CONTROL.parent
SENT = WORK / "job"
STATUS = CONTROL / "status.json"
SPEC = CONTROL / "spec.json"
LOG = CONTROL / "log.txt"
LOCK = CONTROL / "lock"
CANCEL = CONTROL / "cancel"
LEASE = CONTROL / "lease"
GUARD = CONTROL / "guard.py"
SIGN_OF_LIFE_EVERY_S = 1.0


def load(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text("utf-8"))


def save(path: Path, value: Any) -> None:
    """Replaces a JSON file as a whole."""
    aside = path.with_name(f"{path.name}.new")
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def try_save(path: Path, value: Any) -> bool:
    """The same where a full disk must not be the end. Returns whether it was saved."""
    try:
        save(path, value)
    except OSError:
        return False
    return True


def give_sign_of_life() -> None:
    """Says that somebody is there to fetch the results. Cheap: call it often."""
    with contextlib.suppress(OSError):
        if not LEASE.exists() or time.time() - LEASE.stat().st_mtime > SIGN_OF_LIFE_EVERY_S:
            LEASE.touch()


def write_out(data: bytes) -> None:
    """To whoever asked, at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
