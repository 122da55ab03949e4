"""What the runner asks for, one process each: `python3 agent.pyz COMMAND`. Each counts as a sign of life."""

from __future__ import annotations

import json
import os
import sys
import time

from .files import PIECE_BYTES, live, manifest, read, receive
from .place import CANCEL, LOG, SENT, STATUS, give_sign_of_life, load, write_out
from .steps import LOOK_S, end, has_ended, is_running, start


def main() -> None:
    """Runs one command."""
    os.umask(0o077)
    give_sign_of_life()
    commands = {"receive": receive, "start": start, "status": status, "log": log, "cancel": CANCEL.touch, "end": end,
                "manifest": manifest, "read": read, "live": live}  # fmt: skip
    commands[sys.argv[1]]()


def status() -> None:
    """Prints what became of the job; `none` before its start."""
    if not STATUS.exists():
        print(json.dumps({"job": "none", "is_sent": SENT.is_dir()}))
        return
    said = load(STATUS)
    if said["job"] == "running" and not is_running(said):
        said = load(STATUS)  # it may have ended between the two looks
        if said["job"] == "running":
            said.update(job="failed", reason="the machine was restarted, or the supervisor killed, during the job")
    said["log_bytes"] = LOG.stat().st_size if LOG.exists() else 0
    print(json.dumps(said))


def log() -> None:
    """Prints the log from byte N on as it grows, until the job has ended and all of it was printed; with `now` after N,
    only what is there."""
    is_asked_for_now = sys.argv[3:] == ["now"]
    with open(LOG, "rb") as file:
        file.seek(int(sys.argv[2]))
        while True:
            is_whole = is_asked_for_now or has_ended()
            for piece in iter(lambda: file.read(PIECE_BYTES), b""):
                write_out(piece)
            if is_whole:
                return
            give_sign_of_life()
            time.sleep(LOOK_S)
