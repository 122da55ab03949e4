"""What every test can use: the smallest config that is still the real thing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

GIT_VARIABLES = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs in an empty folder of its own, with the process's random streams at a known place."""
    monkeypatch.chdir(tmp_path)
    for name in GIT_VARIABLES & set(os.environ):
        monkeypatch.delenv(name)
    torch.manual_seed(0)
