"""What a source that was unpacked is started with: `python -m training_lab.again RUN RUNS ID [STOP]` trains the config
that is recorded in the folder RUN once more, into RUNS/ID, if the data are still those of the record."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from training_lab import record
from training_lab.console import make_console
from training_lab.data.dataset import differences, prepare_dataset
from training_lab.errors import LabError
from training_lab.record import RunFolder
from training_lab.resolve import resolve_config
from training_lab.train import run_training
from training_lab.wall_clock import WallClock

UNMIRRORED = ("tracking.wandb=off", "tracking.tensorboard=false", "tracking.csv=false", "tracking.report=false")
OTHER_DATA = 4


def main(arguments: list[str]) -> int:
    """Returns the exit code of the training; 2 for wrong input, 4 for other data."""
    folder, runs_dir, run_id = RunFolder(Path(arguments[0])), Path(arguments[1]), arguments[2]
    stop_after = int(arguments[3]) if len(arguments) > 3 else None
    try:
        resolved = resolve_config(str(folder.file(record.CONFIG)), UNMIRRORED)
        recorded = folder.read_json(record.DATA_MANIFEST, identity=str, source=dict)
        manifest = prepare_dataset(resolved.config).manifest
        if manifest["identity"] != recorded["identity"]:
            found = "; ".join(differences(recorded, manifest)) or "the same files are used otherwise"
            print(f"error: other data: {found}", file=sys.stderr)
            return OTHER_DATA
        clock = WallClock(time.monotonic())
        return run_training(resolved, runs_dir, make_console(as_json=True), False, stop_after, clock, run_id)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
