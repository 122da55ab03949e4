"""The whole path for real: a pod that is an SSH server here, the real training in it, and the run back home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakepod import SSHD
from fakerunpod import FakeRunPod
from test_python39 import find_python39
from tiny import TINY, TRAINING, run

SECRET = "wandb-secret-" + "s" * 40
pytestmark = pytest.mark.skipif(SSHD is None, reason="needs OpenSSH's server: apt-get install openssh-server")


def runpod(fake: FakeRunPod | None, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`runpod` on Python 3.9 with nothing installed, where there is one."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(TRAINING), "WANDB_MODE": "disabled",
                   "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "WANDB_API_KEY": SECRET}  # fmt: skip
    if fake is not None:
        environment.update(RUNPOD_API_KEY=fake.key, RUNPOD_API_URL=fake.url)
    # One thread: two trainings that share processors would wait for each other's threads most of the time.
    settings = ("train.num_threads=1", "remote.install=nothing", f"remote.python={sys.executable}",
                f"remote.volume_path={folder}/volume")  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    return subprocess.run(
        [find_python39() or sys.executable, "-m", "training_lab", *arguments, *words], cwd=folder, env=environment,
        capture_output=True, encoding="utf-8", check=False, timeout=800,
    )  # fmt: skip


def check_run(folder: Path, run_id: str) -> dict[str, Any]:
    """The run that came home is whole, and says where it ran. Returns the runner's record."""
    home = folder / ".runs" / run_id
    for name in ("report.html", "summary.json", "environment.json", "checkpoint.pt", "metrics.jsonl", "wandb.json"):
        assert (home / name).is_file(), name
    verified = run("verify", run_id, "--runs", str(home.parent), "--replay", "1", cwd=folder)
    assert verified.returncode == 0, verified.stdout
    record: dict[str, Any] = json.loads((home / "remote.json").read_text())
    assert record["verdicts"]["job"] == "succeeded"
    assert record["verdicts"]["results"] == "verified"
    assert record["verdicts"]["resource"] == "deleted_verified"
    source = json.loads((home / "source.json").read_text())
    assert {name: entry["sha256"] for name, entry in record["sent"]["files"].items()}.items() >= {
        f"training/{name}": sha256 for name, sha256 in source["files"].items() if name.startswith("training_lab/")
    }.items()
    return record


def test_smoke_on_a_pod_from_the_key_to_a_verified_deletion(tmp_path: Path) -> None:
    with FakeRunPod(tmp_path / "fake") as fake:
        done = runpod(fake, tmp_path, "runpod", "--config", "smoke")
        assert done.returncode == 0, done.stdout + done.stderr
        pod = fake.pod
        assert (fake.creates, fake.billing_now(), fake.problems, fake.forbidden) == (1, [], [], [])
        record = check_run(tmp_path, pod.id)
        key, pod_key = fake.key.encode(), pod.key.encode()
        for request in fake.requests:
            assert key not in request.body
            assert SECRET.encode() not in request.body
        assert "WANDB_API_KEY" not in pod.body["env"]
    assert record["cost"]["estimated_usd"] > 0
    assert record["deleted"] == {**record["deleted"], "lookup": "not found", "listed": False, "times": 2}
    assert "read over the API" in record["machine"]["host_key"]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and tmp_path / "fake" not in path.parents]
    for path in written:
        content = path.read_bytes()
        assert not any(secret in content for secret in (key, pod_key, SECRET.encode())), path
    rows = [json.loads(line) for line in (tmp_path / ".runs" / pod.id / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "update" for row in rows) == 6


def test_the_same_flow_in_a_folder_here(tmp_path: Path) -> None:
    done = runpod(None, tmp_path, "runpod", "--config", str(TINY), "--set", "remote.provider=local")
    assert done.returncode == 0, done.stdout + done.stderr
    (run_id,) = [path.name for path in (tmp_path / ".runs").iterdir() if not path.name.startswith(".")]
    home = tmp_path / ".runs" / run_id
    assert json.loads((home / "remote.json").read_text())["verdicts"]["resource"] == "deleted_verified"
    left = [path.name for path in (tmp_path / ".runpod/local").iterdir()]
    assert left == ["cache"], "nothing is left but what the next run may use"


def test_a_training_that_fails_brings_its_log_home_and_leaves_no_machine(tmp_path: Path) -> None:
    with FakeRunPod(tmp_path / "fake") as fake:
        done = runpod(fake, tmp_path, "runpod", "--config", str(TINY), "--set", "optimizer.max_lr=1e30",
                      "--set", "optimizer.grad_clip=0")  # fmt: skip
        assert done.returncode == 10, done.stdout + done.stderr
        assert fake.billing_now() == []
        home = tmp_path / ".runs" / fake.pod.id
    record = json.loads((home / "remote.json").read_text())
    assert record["verdicts"] == {"job": "failed", "results": "verified", "resource": "deleted_verified"}
    assert "non-finite" in json.loads((home / "summary.json").read_text())["state"]
    assert "=== train ended with 1" in (home / "remote-log.txt").read_text()
