"""A finished run's folder as a new, clean run on Weights & Biases, whatever became of its mirror before."""

from __future__ import annotations

import secrets
import threading
from typing import Any

from training_lab.config import TrackingConfig
from training_lab.mirrors.follow import follow
from training_lab.mirrors.mode import WandbChoice
from training_lab.mirrors.state import change_state, first_state, wandb_id
from training_lab.record import WANDB, RunFolder


def push_run(folder: RunFolder, choice: WandbChoice, timeout_s: float) -> dict[str, Any]:
    """Sends every row that counts to a W&B run of its own id. Returns what `wandb.json` says then."""
    state = {**first_state(folder, choice), "id": wandb_id(folder.run_id, f"-{secrets.token_hex(2)}")}
    folder.write_json(WANDB, state)
    ended = threading.Event()
    ended.set()
    follow(folder, choice.mode, TrackingConfig(timeout_s=timeout_s), ended)
    folder.refresh_manifest(WANDB)
    return change_state(folder)
