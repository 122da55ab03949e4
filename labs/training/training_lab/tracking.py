"""`metrics.jsonl`, the truth about what a run did: one JSON line an update, evaluation and event.

The file is only ever appended to. A run that goes on from an earlier state appends a `resume` row that names the
first line it supersedes; those lines stay in the file, and readers pass over them. So nothing is lost, and nothing
is doubled in what readers see. Standard library only, Python 3.9.

Rows, by `kind`:

- `update`: `update`, `loss` (mean over the update's target tokens), `lr`, `grad_norm` (before clipping),
  `target_tokens`, `input_tokens`, `seconds`, `batch_sha256`, `segment` (which process of the run, from 1).
- `evaluation`: `update`, `val_loss`, `target_tokens`, `seconds`.
- `event`: `event` and what belongs to it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any, Callable

from training_lab.errors import LabError

Row = dict[str, Any]


class MetricsWriter:
    """Appends rows to `metrics.jsonl`. Each reaches the system at once, and the disk at `sync`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        end_last_line(path)
        self.num_lines = count_lines(path)
        self._file: IO[str] = open(path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115 - lives as long as the run

    def write(self, row: Row) -> None:
        """Raises LabError if the disk refuses it."""
        try:
            self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise LabError(f"{self.path}: cannot be appended to: {error.strerror}") from error
        self.num_lines += 1

    def sync(self) -> int:
        """Forces all rows to the disk and says how many lines the file has."""
        os.fsync(self._file.fileno())
        return self.num_lines

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Recorder:
    """Takes each finished row: first into the file, then before the person's eyes."""

    def __init__(self, writer: MetricsWriter, show: Callable[[Row], None]) -> None:
        self._writer, self._show = writer, show

    def log(self, row: Row) -> None:
        self._writer.write(row)
        self._show(row)

    def event(self, event: str, **facts: Any) -> None:
        self.log({"kind": "event", "event": event, **facts})

    def sync(self) -> int:
        """Forces all rows to the disk and says how many lines there are."""
        return self._writer.sync()


def read_metrics(path: Path) -> list[Row]:
    """The rows that count, in order: superseded ones left out. Raises LabError for a damaged line.

    A line that a killed process left unfinished is passed over; it can only be the last of its process.
    """
    rows: list[Row | None] = []
    try:
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except OSError as error:
        raise LabError(f"{path}: cannot be read: {error.strerror}") from error
    broken: int | None = None
    for number, line in enumerate(lines):
        if number == len(lines) - 1 and not line:
            break
        row = parse_row(line)
        if broken is not None and not is_resume(row):
            raise LabError(f"{path}:{broken + 1}: damaged line")
        broken = number if row is None else None
        if row is not None and is_resume(row):
            first = int(row["supersedes_from_line"])
            rows[first:] = [None] * (len(rows) - first)
        rows.append(row)
    return [row for row in rows if row is not None]


def parse_row(line: str) -> Row | None:
    """The row of a line, or None if it is not a whole one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "kind" in row else None


def count_processes(path: Path) -> int:
    """How many processes have trained in a run so far; superseded ones count too."""
    if not path.exists():
        return 0
    rows = map(parse_row, path.read_text("utf-8", errors="replace").split("\n"))
    return sum(row is not None and row.get("event") in ("start", "resume") for row in rows)


def is_resume(row: Row | None) -> bool:
    """Whether a row says that the run went on from an earlier state."""
    return row is not None and row["kind"] == "event" and row.get("event") == "resume"


def rows_of_kind(rows: list[Row], kind: str) -> list[Row]:
    """The rows of one kind, in order."""
    return [row for row in rows if row["kind"] == kind]


def end_last_line(path: Path) -> None:
    """Ends a line that a killed process left unfinished, so that the next row begins a new one."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def count_lines(path: Path) -> int:
    """How many ended lines a file has; 0 for one that is not there."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(1 for _ in file)
