"""A run's metrics as a table: read back, they are the same numbers."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from folders import make_run
from tiny import run

from training_lab.csv_export import COLUMNS, metrics_table
from training_lab.record import METRICS, RunFolder

AWKWARD = 0.1 + 0.2
ROWS = [
    {"kind": "evaluation", "update": 0, "val_loss": 5.5},
    {"kind": "update", "update": 1, "loss": AWKWARD, "lr": 1e-300, "grad_norm": None, "target_tokens": 3, "segment": 1},
    {"kind": "update", "update": 2, "loss": 9.0, "segment": 1},
    {"kind": "event", "event": "resume", "segment": 2, "from_update": 1, "supersedes_from_line": 2},
    {"kind": "update", "update": 2, "loss": 2.0, "observed": "memory", "segment": 2},
    {"kind": "evaluation", "update": 2, "val_loss": None},
]


def written() -> RunFolder:
    folder = make_run("run")
    folder.file(METRICS).write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    return folder


def test_every_update_and_evaluation_that_counts_is_a_line_and_reads_back_the_same() -> None:
    lines = list(csv.DictReader(io.StringIO(metrics_table(written()))))
    assert [line["update"] for line in lines] == ["0", "1", "2"]
    assert [line["val_loss"] for line in lines] == ["5.5", "", ""]
    assert (float(lines[1]["loss"]), float(lines[1]["lr"])) == (AWKWARD, 1e-300)
    assert (lines[1]["grad_norm"], lines[1]["target_tokens"]) == ("", "3")
    assert (lines[2]["loss"], lines[2]["observed"], lines[2]["segment"]) == ("2.0", "memory", "2")
    assert tuple(lines[0]) == COLUMNS


def test_the_command_prints_it_or_writes_a_file() -> None:
    table = metrics_table(written())
    assert run("csv", "run", "--runs", "runs").stdout == table
    assert run("csv", "run", "--runs", "runs", "--output", "out.csv").returncode == 0
    assert Path("out.csv").read_text("utf-8") == table
    refused = run("csv", "run", "--runs", "runs", "--output", "nowhere/out.csv")
    assert (refused.returncode, refused.stderr) == (2, "error: --output nowhere/out.csv: there is no folder nowhere\n")
