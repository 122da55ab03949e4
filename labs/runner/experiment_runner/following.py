"""Follows a job: its log as it is written, and what its results have grown by.

The log's copy here says by its size where to go on: after a broken connection, or after a runner that was killed, not a
byte is lost and none comes twice.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from experiment_runner.console import Console
from experiment_runner.state import PRIVATE
from experiment_runner.target import Target
from experiment_runner.transfer import TransferFailed, follow_live, size_of

LIVE_EVERY_S = 15.0


def follow(target: Target, log: Path, output: Path | None, console: Console | None, *, only_now: bool = False) -> None:
    """Copies and shows the log until the job has ended (or with `only_now` what there is of it), and fetches the live
    results into what arrives for `output` (None: there are none). Raises ConnectionLost where the connection breaks:
    then call it again."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
    command = target.command("log", str(size_of(log)), *(["now"] if only_now else []))
    with open(descriptor, "ab") as copy, target.session.stream(command) as stream:
        fetched = time.monotonic()
        while True:
            piece = stream.some_within(1.0)
            if piece == b"":
                return
            if piece is not None:
                copy.write(piece)
                copy.flush()
                if console is not None:
                    console.log(piece)
            if output is not None and time.monotonic() - fetched > LIVE_EVERY_S:
                try:
                    follow_live(target, output)
                except TransferFailed as error:
                    output = None
                    if console is not None:
                        console.warn(f"results are not fetched while the job runs: {error}")
                fetched = time.monotonic()
