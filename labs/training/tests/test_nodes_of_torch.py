"""Two machines with nothing in common but a cable add up a number with torch.distributed: the words with which the
training step starts torchrun are the right ones."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import NAMES, two_hosts, why_impossible

from experiment_runner.cli import main
from training_lab.resolve import resolve_config
from training_lab.runpod import files_of

TRAINING_STEP = """\
import os, runpy, sys
from training_lab import remote
os.environ["PYTHONPATH"] = os.getcwd()
words = remote.torchrun(int(os.environ["TRAINING_LAB_PROCESSES"]), int(os.environ["EXPERIMENT_NODES"]))
remote.prefer_the_way_to_the_master()
os.execv(sys.executable, [sys.executable, *words, "add.py"])
"""
ADD = """\
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
if dist.get_rank() == 0:
    with open(os.environ["EXPERIMENT_RESULTS"] + "/sum.txt", "w") as file:
        file.write(f"{value.item():g} of {dist.get_world_size()}")
dist.destroy_process_group()
"""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """The SSH configuration for gpu-a and gpu-b."""
    reason = why_impossible()
    if reason:
        pytest.skip(reason)
    with two_hosts(tmp_path / "ssh") as made:
        yield made


def test_processes_of_two_machines_add_up_a_number(config: Path, tmp_path: Path) -> None:
    files = files_of(resolve_config("smoke", ()))
    job = {
        "name": "sum",
        "provider": "ssh",
        "env": {"TRAINING_LAB_PROCESSES": "1"},
        "files": {
            "root": files.root,
            "include": list(files.include),
            "inline": {"training/step.py": TRAINING_STEP, "training/add.py": ADD},
        },
        "steps": [
            {"name": "train", "run": f"PYTHONPATH=.:../runner {sys.executable} step.py", "cwd": "training",
             "timeout": "5m"},
        ],
        "results": {"path": "training/.runs/{id}", "required": ["sum.txt"]},
        "limits": {"poll": 0.05, "kill_grace": 1},
        "settings": {
            "ssh": {
                "python": sys.executable,
                "ssh_config": str(config),
                "nodes": [{"host": name, "work": str(tmp_path / name)} for name in NAMES],
            }
        },
    }  # fmt: skip
    Path("job.json").write_text(json.dumps(job))
    with contextlib.chdir(tmp_path):
        code = main(["run", "job.json"])
    (home,) = (tmp_path / ".runs").iterdir()
    assert code == 0, (home / "remote-log.txt").read_text()
    assert (home / "sum.txt").read_text() == "3 of 2"
