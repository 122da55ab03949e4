"""Speed and memory of `baseline` on this machine: python benchmarks/baseline.py [--repeats 3] [--updates 30]

Each repetition is a run of its own process through the command line that everybody uses, and the figures are those
of its `summary.json`: target tokens over seconds of the measured updates, and the process's peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRAINING = Path(__file__).resolve().parent.parent


def measure(updates: int, overrides: list[str]) -> dict[str, Any]:
    """The summary of one run of the first `updates` updates of `baseline`."""
    with tempfile.TemporaryDirectory() as runs:
        words = [sys.executable, "-m", "training_lab", "train", "--config", "baseline", "--runs", runs, "--json"]
        words += ["--stop-after", str(updates)]
        for override in overrides:
            words += ["--set", override]
        done = subprocess.run(words, cwd=TRAINING, stdout=subprocess.PIPE, check=True)
        summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs to take the median of (3)")
    parser.add_argument("--updates", type=int, default=30, help="updates of each; the first 10 are not measured (30)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of the config"
    )
    options = parser.parse_args()
    speeds, peaks = [], []
    for number in range(options.repeats):
        summary = measure(options.updates, options.set)
        speeds.append(summary["throughput"]["target_tokens_per_s"])
        peaks.append(summary["last_process"]["peak_memory"]["bytes"] / 2**20)
        print(f"run {number + 1}: {speeds[-1]:,.0f} target tokens/s, peak memory {peaks[-1]:,.0f} MiB", flush=True)
    spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
    print(f"median: {statistics.median(speeds):,.0f} target tokens/s ({spread}), {statistics.median(peaks):,.0f} MiB")


if __name__ == "__main__":
    main()
