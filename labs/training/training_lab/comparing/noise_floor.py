"""Noise floors: what repetitions of a config with other seeds gave, kept until config, code, data or machine change."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiment_runner.durable import json_text, write_atomically
from training_lab.comparing.arms import Run
from training_lab.comparing.comparability import noise_identity

FOLDER = "noise"


class Floor(NamedTuple):
    """A noise floor for a run."""

    values: list[float] | None
    """The last validation losses, by seed; None: it has expired."""
    remark: str


def keep_floor(runs_dir: Path, runs: Sequence[Run]) -> Path:
    """Keeps the last validation losses of runs of one config with different seeds, under the config's identity."""
    identity = noise_identity(runs[0])
    losses = [last_val_loss(run) for run in runs]
    known = [loss for loss in losses if loss is not None]
    said = {
        "identity": identity,
        "config": runs[0].found["config.json"].get("name"),
        "runs": [run.id for run in runs],
        "seeds": [list(run.seeds) for run in runs],
        "val_loss": losses,
        "mean": statistics.fmean(known),
        "standard_deviation": statistics.stdev(known),
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    path = runs_dir / FOLDER / f"{identity['config'][:16]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json_text(said).encode("utf-8"))
    return path


def find_floor(runs_dir: Path, run: Run) -> Floor | None:
    """The noise floor of a run's config, or why it no longer counts; None if there is none."""
    identity = noise_identity(run)
    path = runs_dir / FOLDER / f"{identity['config'][:16]}.json"
    try:
        said: Any = json.loads(path.read_text("utf-8"))
        known = dict(said["identity"])
        values = [float(value) for value in said["val_loss"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Floor(None, f"the noise floor in {path} cannot be read ({error}); measure it again with `noise`")
    changed = sorted(part for part in identity if known.get(part) != identity[part])
    if changed:
        return Floor(None, f"the noise floor in {path} has expired: other {', '.join(changed)}; measure it again")
    return Floor(values, f"noise floor from {path}: {len(values)} seeds, s = {statistics.stdev(values):.4g}")


def last_val_loss(run: Run) -> float | None:
    """The validation loss after the last update."""
    evaluations = run.found.evaluations
    return float(evaluations[-1]["val_loss"]) if evaluations else None
