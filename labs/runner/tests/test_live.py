"""Once against the real RunPod, with your own key and money: at most 0.20 USD. Off unless RUNPOD_LIVE=1.

    RUNPOD_LIVE=1 RUNPOD_API_KEY=... python -m pytest -s labs/runner/tests/test_live.py

It settles what only the live service can: that a pinned digest with its own entry point boots, that the host key comes
over the log, how long creating, listing and deleting lag, whether the pod is found by its name, whether the
billing rows of a deleted pod come, and that nothing is left. What it saw is printed, and is in its `remote.json`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from experiment_runner.cli import main
from experiment_runner.providers.catalog import gpus
from experiment_runner.providers.runpod_api import RunpodApi

MOST_USD = 0.20
MOST_USD_PER_HOUR = 0.60
IMAGE = (
    "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
    "@sha256:0a360022e8de4375af99430f84e8b38951acc397252163a37ceac7204d01be35"
)
pytestmark = [
    pytest.mark.skipif(os.environ.get("RUNPOD_LIVE") != "1", reason="rents a real GPU: set RUNPOD_LIVE=1 and a key"),
    pytest.mark.timeout(1800),
]


def cheapest(api: RunpodApi) -> dict[str, Any]:
    """The cheapest GPU of which something is free now."""
    free = [gpu for gpu in gpus(api, 1, "SECURE", "12.8") if gpu.get("availability") not in (None, "NONE")]
    priced = [gpu for gpu in free if gpu["price"]["secure"] > 0]
    assert priced, "no GPU is free now; try again later"
    return min(priced, key=lambda gpu: float(gpu["price"]["secure"]))


def test_a_small_job_on_the_cheapest_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = os.environ.get("RUNPOD_API_KEY", "")
    assert key, "RUNPOD_API_KEY is not set"
    api = RunpodApi(key)
    gpu = cheapest(api)
    assert gpu["price"]["secure"] <= MOST_USD_PER_HOUR, f"the cheapest, {gpu['id']}, costs more than is meant here"
    job = {
        "name": "live-smoke",
        "provider": "runpod",
        "files": {"inline": {"look.sh": "nvidia-smi\npython3 --version\nenv | grep -c RUNPOD_ || true\n"}},
        "steps": [
            {"name": "look", "run": "sh look.sh | tee $EXPERIMENT_RESULTS/look.txt", "timeout": "5m"},
            {"name": "write", "run": "head -c 20000000 /dev/urandom > $EXPERIMENT_RESULTS/random.bin", "timeout": "2m"},
        ],
        "results": {"required": ["look.txt", "random.bin"]},
        "limits": {"max_hours": 0.3, "max_usd": MOST_USD, "max_usd_per_hour": MOST_USD_PER_HOUR, "boot": "12m"},
        "settings": {"runpod": {"image": IMAGE, "gpus": [gpu["id"]], "disk_gb": 20, "volume_gb": 10}},
    }
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_text(json.dumps(job))
    began = time.time()
    assert main(["run", "job.json"]) == 0
    (record_path,) = Path(".runs").glob("*/remote.json")
    record = json.loads(record_path.read_text())
    looked = (record_path.parent / "look.txt").read_text()
    assert looked.rstrip().endswith("\n0"), "no RUNPOD_ variable reaches a step"
    assert "NVIDIA" in looked
    assert record["verdicts"]["resource"] == "deleted_verified"
    (state,) = Path(".runpod").glob("exp-*.json")
    bill = main(["cost", str(state)])
    print(json.dumps({
        "gpu": gpu["id"], "seconds": round(time.time() - began), "seconds_by_phase": record["seconds_by_phase"],
        "host_key": record["machine"]["host_key"], "cuda": record["machine"]["cuda"], "estimate": record["cost"],
        "deleted": record["deleted"], "cost exit code": bill,
    }, indent=2))  # fmt: skip
