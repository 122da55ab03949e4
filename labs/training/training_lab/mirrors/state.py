"""`wandb.json`: what became of a run's mirror on Weights & Biases. Standard library only, Python 3.9."""

from __future__ import annotations

import re
from typing import Any

from training_lab.errors import LabError
from training_lab.mirrors.mode import WandbChoice
from training_lab.record import WANDB, RunFolder


def first_state(folder: RunFolder, choice: WandbChoice) -> dict[str, Any]:
    """The content of `wandb.json` before anything was sent."""
    is_off = choice.mode == "off"
    return {
        "mode": choice.mode,
        "reason": choice.reason,
        "state": "off" if is_off else "running",
        "id": None if is_off else wandb_id(folder.run_id),
        "url": None,
        "entity": choice.entity or None,
        "project": choice.project,
        "rows_sent": 0,
        "last_update": None,
        "message": "",
        "sync_command": None if is_off else push_command(folder),
    }


def change_state(folder: RunFolder, **changes: Any) -> dict[str, Any]:
    """Changes `wandb.json` as a whole, and returns it."""
    try:
        state = folder.read_json(WANDB)
    except LabError:
        state = {}
    state.update(changes)
    folder.write_json(WANDB, state)
    return state


def push_command(folder: RunFolder) -> str:
    """The command that makes a clean W&B run of the folder."""
    return f"python -m training_lab wandb push {folder.as_typed()}"


def wandb_id(run_id: str, suffix: str = "") -> str:
    """An id that W&B takes: lower-case letters, digits and hyphens, at most 64."""
    plain = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    room = 64 - len(suffix)
    return (plain[-room:].strip("-") or "run") + suffix
