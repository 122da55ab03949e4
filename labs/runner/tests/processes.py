"""The runner as a process of its own, which can be sent signals and killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lab import SECRET, Lab

RUNNER = Path(__file__).parent.parent
HOLDING = Path(__file__).parent / "holding.py"
PHASES = ("planned", "creating", "booting", "ready", "uploading", "running", "finished", "collecting", "collected",
          "deleting")  # fmt: skip
EXISTS_FROM = PHASES.index("booting")
STEADY = """
import signal, sys, time
def polite(*_):
    open(f"{results}/last-words.txt", "w").write("saved\\n")
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, polite)
for number in range(30):
    print("line", number, flush=True)
    time.sleep(0.05)
open(f"{results}/answer.txt", "w").write("42\\n")
open(f"{results}/metrics.jsonl", "w").write("0\\n" * 5)
"""
WHOLE_LOG = ["hello", *(f"line {number}" for number in range(30))]


class Process:
    """A runner at work."""

    def __init__(self, lab: Lab, *command: str) -> None:
        (lab.folder / "job.json").write_text(json.dumps(lab.job))
        (lab.folder / "held").unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(RUNNER)}
        self.lab = lab
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=lab.folder, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 40
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def signal(self, number: int, times: int = 1) -> None:
        for _ in range(times):
            self.process.send_signal(number)
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Its exit code and all that it said."""
        out, err = self.process.communicate(timeout=60)
        assert "Traceback" not in err, err
        assert SECRET not in out + err
        return self.process.returncode, out + err


def held(lab: Lab, phase: str, moment: str, *command: str) -> Process:
    """A `run` that waits in a phase."""
    process = Process(lab, str(HOLDING), phase, moment, *(command or ("run", "job.json")))
    process.wait_for((lab.folder / "held").exists)
    return process


def arguments_of_all_processes() -> bytes:
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes()
        except OSError:
            continue
    return found
