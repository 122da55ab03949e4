"""What every test can use: the smallest config that is still the real thing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from training_lab.config import Config
from training_lab.resolve import Resolved, resolve_config

TINY = Path(__file__).parent / "tiny.json"
GIT_VARIABLES = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}

TinyConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test runs in an empty folder of its own, with the process's random streams at a known place."""
    monkeypatch.chdir(tmp_path)
    for name in GIT_VARIABLES & set(os.environ):
        monkeypatch.delenv(name)
    torch.manual_seed(0)
    yield


def resolve_tiny(*overrides: str) -> Resolved:
    """The tiny config, changed by overrides such as `train.seed=1`."""
    return resolve_config(str(TINY), overrides)


def tiny(*overrides: str) -> Config:
    """The values of `resolve_tiny`."""
    return resolve_tiny(*overrides).config
