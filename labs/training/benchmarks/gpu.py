"""Speed, MFU and memory of `corrected` and `corrected-fast` on a GPU, in one call of a few minutes.

    python benchmarks/gpu.py [--parquet FILE] [--updates 20] [--turns 2] [--set measure.peak_tflops=...]

Runs both in turn through the command that everybody uses, and shows what their summaries say: MFU against the GPU's
peak by its name, and the share of the best product measured on it. Without --parquet the text is generated, so that
nothing is downloaded. The first 5 updates of each process are not measured, and none is recorded.
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

import torch


def overrides(folder: Path, parquet: Path | None, updates: int) -> list[str]:
    """What is changed of both configs: the text, how long, and what is observed."""
    data = [f'data.paths=["{parquet}"]', "data.source=files"] if parquet else ["data.source=synthetic",
            "data.synthetic_documents=20000"]  # fmt: skip
    return [*data, f"data.cache_dir={folder / 'cache'}", f"train.updates={updates}", "schedule.warmup_updates=2",
            "eval.every=0", "eval.tokens=8192", f"checkpoint.every={updates}", "tracking.wandb=off",
            "measure.warmup_updates=5", "measure.timeline_from=0", "measure.memory_update=0",
            "measure.matmul_probe=true"]  # fmt: skip


def run(name: str, settings: list[str], folder: Path) -> dict[str, Any]:
    """The summary of one run."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "training_lab", "train", "--config", name, "--new", "--json",
               "--runs", str(folder / "runs"), *words]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def share(summaries: list[dict[str, Any]], figure: str, convention: str) -> str:
    """The median of a share in the summaries, or that there is none."""
    found = [summary["utilisation"][figure] for summary in summaries]
    return f"{statistics.median(one[convention] for one in found):.1%}" if all(found) else "n/a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parquet", type=Path, help="a local file of FineWeb instead of generated text")
    parser.add_argument("--updates", type=int, default=20, help="updates of a run (20)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each config (2)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of both")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no CUDA GPU here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = overrides(folder, options.parquet and options.parquet.resolve(), options.updates) + options.set
        found: dict[str, list[dict[str, Any]]] = {"corrected": [], "corrected-fast": []}
        for _ in range(options.turns):
            for config, summaries in found.items():
                summaries.append(run(config, settings, folder))
                print(f"{config}: {summaries[-1]['throughput']['target_tokens_per_s']:,.0f} target tokens/s, "
                      f"{summaries[-1]['last_process']['elapsed_s']:.0f} s in all", flush=True)  # fmt: skip
    print("| | target tokens/s | MFU causal | MFU full | share of the best product | peak GiB (predicted) | loss |")
    print("|---|---|---|---|---|---|---|")
    for config, summaries in found.items():
        speed = statistics.median(summary["throughput"]["target_tokens_per_s"] for summary in summaries)
        memory = max(summary["memory"]["scopes"]["updates"]["allocated_bytes"] for summary in summaries) / 2**30
        predicted = summaries[-1]["memory"]["predicted"]["total_bytes"] / 2**30
        print(f"| {config} | {speed:,.0f} | {share(summaries, 'mfu', 'causal')} | {share(summaries, 'mfu', 'full')} "
              f"| {share(summaries, 'matmul_share', 'causal')} | {memory:.1f} ({predicted:.1f}) "
              f"| {summaries[-1]['loss']['last']:.4f} |")  # fmt: skip


if __name__ == "__main__":
    main()
