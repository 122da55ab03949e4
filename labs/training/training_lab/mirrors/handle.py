"""The trainer's side of the mirrors: start the follower, and at the end wait for it, but not for long.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from training_lab.config import TrackingConfig
from training_lab.errors import LabError, UserError
from training_lab.mirrors.mode import WandbChoice
from training_lab.mirrors.state import change_state, first_state, push_command
from training_lab.record import WANDB, RunFolder

FOLLOWER_LOG = ".unfinished-follower.log"
"""What the follower's libraries print; no part of the record."""


class Mirrors:
    """The follower of a run, or none."""

    def __init__(self, folder: RunFolder, choice: WandbChoice, process: subprocess.Popen[bytes] | None) -> None:
        self.folder, self.choice, self._process = folder, choice, process

    def close(self, timeout_s: float) -> str:
        """Lets the follower finish, for at most so long; then ends it. Returns what the person should know, or
        nothing."""
        if self._process is None:
            return ""
        process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end_group(process)
            if self.choice.mode != "off":
                change_state(self.folder, state="incomplete", message=f"not done within {timeout_s:g} s, and ended")
        return self._told()

    def _told(self) -> str:
        """A sentence for the person if W&B has not everything."""
        if self.choice.mode == "off":
            return ""
        try:
            state = self.folder.read_json(WANDB, state=str)
        except LabError as error:
            return str(error)
        if state["state"] == "running":  # the follower ended without saying so
            state = change_state(self.folder, state="degraded", message="the mirror's process ended by itself")
        if state["state"] == "complete":
            return ""
        return f"W&B is {state['state']} ({state['message']}); {push_command(self.folder)} sends the run again"


def start_mirrors(folder: RunFolder, tracking: TrackingConfig, choice: WandbChoice) -> Mirrors:
    """Starts the follower of a run if there is anything to mirror. What cannot be started is told by `close`."""
    folder.write_json(WANDB, first_state(folder, choice))
    if choice.mode == "off" and not tracking.tensorboard:
        return Mirrors(folder, choice, None)
    settings = json.dumps({"tensorboard": tracking.tensorboard, "timeout_s": tracking.timeout_s})
    package_root = str(Path(__file__).resolve().parent.parent.parent)
    search = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
    try:
        with open(folder.file(FOLLOWER_LOG), "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "training_lab.mirrors.follow", str(folder.path.resolve()), settings],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": search},
                start_new_session=True,  # Ctrl-C in the terminal is for the trainer alone
            )
    except OSError as error:
        change_state(folder, state="degraded", message=f"the mirror's process cannot be started: {error.strerror}")
        return Mirrors(folder, choice, None)
    return Mirrors(folder, choice, process)


def need_mirrors(tracking: TrackingConfig) -> None:
    """Raises UserError if a mirror was asked for that is not installed."""
    if tracking.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "tracking.tensorboard: TensorBoard is not installed: pip install 'tensorboard>=2.20'; or leave it out"
        )


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the follower and whatever it started."""
    if os.name == "nt":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
