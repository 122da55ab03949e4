"""`metrics.jsonl`, the truth about what a run did: one JSON line an update, evaluation and event.

The file is only ever appended to. A run that goes on from an earlier state appends a `resume` row that names the
first line it supersedes: the updates and evaluations from there on stay in the file, and readers pass over them. So
nothing is lost, and nothing is doubled in what readers see. Events are never superseded: they happened. Standard
library only, Python 3.9.

Rows, by `kind`:

- `update`: `update`, `loss` (mean over the update's target tokens), `lr`, `grad_norm` (before clipping),
  `target_tokens`, `input_tokens`, `seconds`, `batch_sha256`, `segment` (which process of the run, from 1).
- `evaluation`: `update`, `val_loss`, `target_tokens`, `seconds`.
- `event`: `event` and what belongs to it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

from experiment_runner.redaction import Secrets
from training_lab.errors import LabError

Row = dict[str, Any]


class MetricsWriter:
    """Appends rows to `metrics.jsonl`. Each reaches the system at once, and the disk at `sync`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        end_last_line(path)
        self.num_lines = count_lines(path)
        self._secrets = Secrets.from_environment(os.environ)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run

    def write(self, row: Row) -> None:
        """Raises LabError if the disk refuses it. A secret in it is replaced by its name."""
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        line = (self._secrets.redact(text) + "\n").encode("utf-8")
        with self._errors():
            while line:
                line = line[self._file.write(line) :]
        self.num_lines += 1

    def sync(self) -> int:
        """Forces all rows to the disk and says how many lines the file has. Raises LabError if the disk refuses."""
        with self._errors():
            os.fsync(self._file.fileno())
        return self.num_lines

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LabError(f"{self.path}: cannot be appended to: {error.strerror}") from error


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


class Unrecorded(Recorder):
    """For a process that keeps no record: another one does."""

    def __init__(self) -> None: ...

    def log(self, row: Row) -> None: ...

    def sync(self) -> int:
        return 0


def read_metrics(path: Path) -> list[Row]:
    """The rows that count, in order: superseded ones left out. Raises LabError for a damaged line.

    A line that a killed process left unfinished is passed over; what follows it can only be a `resume`.
    """
    try:
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except OSError as error:
        raise LabError(f"{path}: cannot be read: {error.strerror}") from error
    return rows_that_count(lines, path)


def rows_that_count(lines: list[str], path: Path) -> list[Row]:
    """The rows of a metrics file's lines, superseded ones left out. Raises LabError for a damaged line of `path`."""
    rows: list[Row | None] = []
    unfinished: int | None = None
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line:
            break
        row = parse_row(line)
        if row is None:
            unfinished = unfinished or number
        elif is_resume(row):
            first = row.get("supersedes_from_line")
            if not isinstance(first, int):
                raise LabError(f"{path}:{number}: damaged line: it does not say what it supersedes")
            rows[first:] = [row if row and row["kind"] == "event" else None for row in rows[first:]]
            unfinished = None
        elif unfinished is not None:
            raise LabError(f"{path}:{unfinished}: damaged line")
        rows.append(row)
    return [row for row in rows if row is not None]


def parse_row(line: str) -> Row | None:
    """The row of a line, or None if it is not a whole one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    wanted = {"update": ("update", int), "evaluation": ("update", int), "event": ("event", str)}
    name, kind = wanted.get(str(row.get("kind")), ("kind", str))
    return row if isinstance(row.get(name), kind) else None


def count_processes(path: Path) -> int:
    """How many processes have trained in a run so far; superseded ones count too."""
    if not path.exists():
        return 0
    rows = map(parse_row, path.read_text("utf-8", errors="replace").split("\n"))
    return sum(row is not None and row.get("event") in ("start", "resume") for row in rows)


def is_resume(row: Row) -> bool:
    """Whether a row says that the run went on from an earlier state."""
    return row["kind"] == "event" and row.get("event") == "resume"


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
    """How many lines a file has; 0 for one that is not there."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(1 for _ in file)
