"""A run on Weights & Biases, fed row by row. Written for wandb 0.31, whose private settings (`x_…`) it uses."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from training_lab import record
from training_lab.mirrors.rows import mirrored_values
from training_lab.mirrors.state import change_state
from training_lab.record import RunFolder
from training_lab.tracking import Row

INIT_TIMEOUT_S = 20


class WandbSink:
    """One W&B run. Rows are counted: those that the server has already are not sent again.

    An online run goes on where the server's rows end, because the rows that count are the same ones after a resume. An
    offline run is made anew from the first row, in place of the one before it.
    """

    def __init__(self, folder: RunFolder, finish_timeout_s: float) -> None:
        """Begins the run that `wandb.json` names. Raises whatever wandb raises."""
        import wandb

        self.folder = folder
        state = folder.read_json(record.WANDB, mode=str, id=str)
        self._seen = 0
        self.rows_sent = 0
        """How many rows W&B has, as far as is known here."""
        self.last_update: int | None = None
        """The update of the last of them."""
        place = working_folder(folder)
        if state["mode"] == "offline":
            shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True, exist_ok=True)
        config = folder.read_json(record.CONFIG, values=dict)
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S, finish_timeout=finish_timeout_s, finish_timeout_raises=True,
            x_disable_meta=True, disable_git=True, save_code=False, disable_code=True, console="off",
            x_disable_stats=True, host="not recorded", quiet=True, silent=True,
        )  # fmt: skip
        self.run = wandb.init(
            mode=state["mode"], project=state["project"], entity=state["entity"], id=state["id"], resume="allow",
            name=folder.run_id, group=config.get("name"), job_type="pretrain", notes=config["values"].get("purpose"),
            config=described(folder, config), dir=str(place), settings=settings,
        )  # fmt: skip
        self.run.define_metric("update", hidden=True)
        self.run.define_metric("*", step_metric="update")
        self.run.define_metric("val/loss", step_metric="update", summary="min")
        self._there = 0
        if state["mode"] == "online":
            self._there = self.run.starting_step
            change_state(folder, url=self.run.url, entity=self.run.entity or state["entity"])
        else:
            files = os.path.relpath(Path(self.run.dir).parent)
            change_state(folder, sync_command=f"wandb sync --yes {shlex.quote(files)}")

    def log(self, row: Row) -> None:
        """Takes the next row."""
        self._seen += 1
        if self._seen > self._there:
            self.run.log(mirrored_values(row))
        self.rows_sent, self.last_update = max(self._seen, self._there), row["update"]

    def finish(self, summary: dict[str, Any]) -> None:
        """Ends the run with its key figures. Raises TimeoutError if W&B does not take them in time, and ConnectionError
        if it has refused rows."""
        for name, keys in SUMMARY.items():
            value: Any = summary
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                self.run.summary[name] = value
        self.run.finish(exit_code=0 if summary.get("state") in ("finished", "stopped", "interrupted") else 1)
        refusal = refusal_in(Path(self.run.dir).parent / "logs/debug-internal.log")
        if refusal:
            self.rows_sent, self.last_update = self._there, None
            raise ConnectionError(refusal)


def refusal_in(log: Path) -> str:
    """Why W&B took no more rows, by wandb's own log; empty if it took all. `finish` returns alike in both cases."""
    try:
        lines = log.read_text("utf-8", errors="replace").splitlines()
    except OSError:  # offline runs of some versions have none
        return ""
    for line in lines:
        message = str((parse_object(line) or {}).get("msg"))
        if message.startswith("filestream: fatal error"):
            return message
    return ""


def parse_object(line: str) -> dict[str, Any] | None:
    """The JSON object of a line; None for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


SUMMARY = {
    "state": ("state",),
    "val_loss_last": ("val_loss", "last"),
    "val_loss_best": ("val_loss", "best"),
    "target_tokens": ("target_tokens",),
    "target_tokens_per_s": ("throughput", "target_tokens_per_s"),
    "mfu_causal": ("utilisation", "mfu", "causal"),
    "mfu_full": ("utilisation", "mfu", "full"),
    "weights_sha256": ("weights_sha256",),
}
"""The figures of `summary.json` that a W&B run ends with."""


def working_folder(folder: RunFolder) -> Path:
    """Where wandb keeps its own files: beside the runs, as they are no part of one."""
    return folder.path.parent / ".wandb" / folder.run_id


def described(folder: RunFolder, config: dict[str, Any]) -> dict[str, Any]:
    """What W&B shows as the run's config: the resolved values, and what tells whether runs may be compared."""
    source = folder.read_json(record.SOURCE)
    data = folder.read_json(record.DATA_MANIFEST)
    provenance = {
        "config_identity": config.get("identity"),
        "commit": source.get("commit"),
        "source_sha256": source.get("sha256"),
        "data_identity": data.get("identity"),
        "validation_identity": data.get("validation", {}).get("identity"),
    }
    return {**config["values"], "provenance": provenance}
