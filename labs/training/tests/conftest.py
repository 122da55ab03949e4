"""What every test can use: a folder of its own, and a hub on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fakehub import CONTENT, NAME, FakeHub

os.environ["WANDB_MODE"] = "disabled"  # nothing of a test goes anywhere that it does not say

GIT_VARIABLES = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs in an empty folder of its own, with the process's random streams at a known place."""
    monkeypatch.chdir(tmp_path)
    for name in GIT_VARIABLES & set(os.environ):
        monkeypatch.delenv(name)
    torch.manual_seed(0)


HUB_SETTINGS = ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Nothing of this machine's user is seen, and nobody waits: the seconds are kept."""
    for name in (*HUB_SETTINGS, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    monkeypatch.setenv("no_proxy", "*")
    recorded: list[float] = []
    monkeypatch.setattr("training_lab.data.download.time.sleep", recorded.append)
    return recorded


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Iterator[FakeHub]:
    with FakeHub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.publish({NAME: CONTENT, "README.md": b"# FineWeb\n", "sample/10BT/000_00000.parquet": b"PAR1PAR1"})
        yield running
