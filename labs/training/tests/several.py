"""Trainings on several processes, as a person starts them: with torchrun, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tiny import TINY, TRAINING

PLAIN = ("model.dropout=0", "batch.micro_batches=2")


def launch(processes: int, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts `torchrun --nproc-per-node=N -m training_lab train ...` in a group of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(TRAINING), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "training_lab", "train", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=environment, start_new_session=True,
        **options,
    )  # fmt: skip


class Done(NamedTuple):
    """A training that has ended, in the folder of the test."""

    returncode: int
    out: str
    err: str

    @property
    def folder(self) -> Path:
        """The newest run."""
        return max(Path(".runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)

    def rows(self, kind: str = "update") -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def read(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / name).read_text("utf-8"))
        return content

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows()]

    @property
    def weights(self) -> str:
        return str(self.read("summary.json")["weights_sha256"])


def settings(overrides: tuple[str, ...]) -> list[str]:
    return [word for one in overrides for word in ("--set", one)]


def train(processes: int, *overrides: str, options: tuple[str, ...] = ("--new",), expect: int = 0) -> Done:
    """The tiny config on so many processes; 0: without torchrun."""
    words = ["--config", str(TINY), "--json", *options, *settings((*PLAIN, *overrides))]
    return train_words(processes, words, expect)


def train_words(processes: int, words: list[str], expect: int = 0) -> Done:
    """The same with the command's own words."""
    if processes:
        process = launch(processes, *words)
    else:
        environment = {**os.environ, "PYTHONPATH": str(TRAINING)}
        process = subprocess.Popen(
            [sys.executable, "-m", "training_lab", "train", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=environment,
        )  # fmt: skip
    out, err = process.communicate(timeout=600)
    done = Done(process.returncode, out, err)
    assert done.returncode == expect, done.err
    return done
