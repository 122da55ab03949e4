"""The smallest config that is still the real thing, and the command line as a person uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from training_lab.config import Config
from training_lab.resolve import Resolved, resolve_config

TINY = Path(__file__).parent / "tiny.json"
TRAINING = Path(__file__).parent.parent


def resolve_tiny(*overrides: str) -> Resolved:
    """The tiny config, changed by overrides such as `train.seed=1`."""
    return resolve_config(str(TINY), overrides)


def tiny(*overrides: str) -> Config:
    """The values of `resolve_tiny`."""
    return resolve_tiny(*overrides).config


def start(*arguments: str, python: str = sys.executable, **options: Any) -> subprocess.Popen[str]:
    """Starts `python -m training_lab ...` as a process of its own, in the current folder."""
    environment = {**os.environ, "PYTHONPATH": str(TRAINING), **options.pop("env", {})}
    return subprocess.Popen(
        [python, "-m", "training_lab", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=environment, **options,
    )  # fmt: skip


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=900)  # only for what hangs: some machines are slow
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def train_tiny(*arguments: str, expect: int = 0) -> list[dict[str, Any]]:
    """`train` on the tiny config in a process of its own; its JSON lines."""
    done = run("train", "--config", str(TINY), "--json", *arguments)
    assert done.returncode == expect, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
