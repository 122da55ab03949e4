"""Folders that look like runs, for the tests of the record."""

from __future__ import annotations

import os
from pathlib import Path

from training_lab import record
from training_lab.record import RunFolder


def make_run(name: str, created_ns: int = 10**18, runs_dir: str = "runs", state: str = "finished") -> RunFolder:
    """A folder with the files that make it a run."""
    folder = RunFolder(Path(runs_dir) / name)
    folder.path.mkdir(parents=True)
    folder.write_json(record.CONFIG, {"name": name})
    folder.write_json(record.SUMMARY, {"state": state})
    os.utime(folder.file(record.CONFIG), ns=(created_ns, created_ns))
    return folder
