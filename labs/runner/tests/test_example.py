"""The example in the documentation: a job of shell and Python with no training in it, through the same command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from lab import Lab

EXAMPLE = Path(__file__).parent.parent / "examples/inference"


@pytest.fixture
def example(lab: Lab) -> Lab:
    lab.job = json.loads((EXAMPLE / "job.json").read_text())
    lab.job["files"]["root"] = str(EXAMPLE)
    lab.job["limits"]["poll"] = 0.05
    lab.job["settings"]["local"]["work"] = str(lab.folder / "volume")
    lab.job["settings"]["runpod"].update(work=str(lab.folder / "volume"), gpus=["NVIDIA GeForce RTX 4090"])
    lab.job["limits"]["max_usd_per_hour"] = lab.job["limits"]["max_usd"] = 1
    (lab.folder / "work.py").unlink()
    return lab


@pytest.mark.parametrize("provider", ["local", "runpod"])
def test_it_runs_and_its_answers_come_home(provider: str, example: Lab) -> None:
    outcome = example.run("--provider", provider)
    assert outcome.code == 0, outcome
    (home,) = (path for path in (example.folder / ".runs").iterdir())
    answers = [json.loads(line) for line in (home / "answers.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == (EXAMPLE / "prompts.txt").read_text().splitlines()
    assert answers[1]["answer"].startswith("a machine that is ")
    assert json.loads((home / "timings.json").read_text())["prompts"] == 3


def test_its_dry_run_on_every_provider(example: Lab) -> None:
    for provider in ("local", "ssh", "runpod"):
        outcome = example.run("--provider", provider, "--dry-run")
        assert outcome.code == 0, outcome
        assert "texts/tides.txt" in outcome.out


def test_it_stands_alone(tmp_path: Path) -> None:
    copied = shutil.copytree(EXAMPLE, tmp_path / "copied")
    imports = {line.split()[1].split(".")[0] for path in copied.glob("*.py") for line in path.read_text().splitlines()
               if line.startswith(("import ", "from "))}  # fmt: skip
    assert "training_lab" not in imports
    assert "torch" not in imports
