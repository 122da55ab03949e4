"""A run as TensorBoard's event files, made anew from the first row by each process. Needs no torch, no TensorFlow."""

from __future__ import annotations

import shutil
from typing import Any

from training_lab.mirrors.rows import mirrored_values
from training_lab.record import TENSORBOARD, RunFolder
from training_lab.tracking import Row


class TensorBoardSink:
    """Scalars by update, in the folder `tensorboard` of the run."""

    def __init__(self, folder: RunFolder) -> None:
        """Raises ImportError where TensorBoard is not installed."""
        from tensorboard.summary import Writer

        path = folder.file(TENSORBOARD)
        shutil.rmtree(path, ignore_errors=True)
        self._writer = Writer(str(path))

    def log(self, row: Row) -> None:
        """Takes the next row."""
        values = mirrored_values(row)
        update = int(values.pop("update"))
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes what is left. Key figures are no curve, and have no place here."""
        self._writer.close()
