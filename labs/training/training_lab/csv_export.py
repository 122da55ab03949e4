"""A run's metrics as a table: one line an update, with the validation loss where it was measured.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from training_lab.record import METRICS, RunFolder
from training_lab.tracking import Row, read_metrics, rows_of_kind

COLUMNS = (
    "update", "loss", "val_loss", "lr", "grad_norm", "target_tokens", "input_tokens", "seconds", "memory_bytes",
    "observed", "segment", "batch_sha256",
)  # fmt: skip


def metrics_table(folder: RunFolder) -> str:
    """The rows that count, as CSV with a header. What is not known is empty. Raises LabError for damaged metrics."""
    rows = read_metrics(folder.file(METRICS))
    updates = {row["update"]: row for row in rows_of_kind(rows, "update")}
    val_losses = {row["update"]: row.get("val_loss") for row in rows_of_kind(rows, "evaluation")}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for update in sorted({*updates, *val_losses}):
        row: Row = {**updates.get(update, {}), "update": update, "val_loss": val_losses.get(update)}
        writer.writerow([cell(row.get(name)) for name in COLUMNS])
    return text.getvalue()


def cell(value: Any) -> Any:
    """A value as it is written: numbers so that they are read back the same."""
    return "" if value is None else repr(value) if isinstance(value, float) else value
