"""Speed, MFU and memory of `corrected` and `corrected-fast` on a GPU, in one call of a few minutes.

    python benchmarks/gpu.py [--parquet FILE] [--updates 20] [--turns 2] [--peak-tflops 989]

Runs both in turn through the command that everybody uses. Without --parquet the text is generated, so that nothing is
downloaded. The first 5 updates of each process are not measured. MFU divides the matrix products of
`training_lab.flops`, once with attention counted causally, once with the full square of each piece, by the peak that
is given (dense BF16 with FP32 sums, see the data sheet; 989 is the H100 SXM's), and by the best product measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from training_lab.data.dataset import prepare_dataset
from training_lab.flops import flops_of_pieces
from training_lab.resolve import resolve_config


def measured_peak(size: int = 8192) -> float:
    """TFLOP/s of the best BF16 product of two square matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(5):
            a @ b
        torch.cuda.synchronize()
        rates.append(5 * 2 * size**3 / (time.perf_counter() - started) / 1e12)
    return max(rates)


def overrides(folder: Path, parquet: Path | None, updates: int) -> list[str]:
    """What is changed of both configs: the text, and how long."""
    data = [f'data.paths=["{parquet}"]', "data.source=files"] if parquet else ["data.source=synthetic",
            "data.synthetic_documents=20000"]  # fmt: skip
    return [*data, f"data.cache_dir={folder / 'cache'}", f"train.updates={updates}", "schedule.warmup_updates=2",
            "eval.every=0", "eval.tokens=8192", f"checkpoint.every={updates}", "measure.warmup_updates=5"]  # fmt: skip


def run(name: str, settings: list[str], folder: Path) -> dict[str, Any]:
    """The summary of one run, and its time in all."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "training_lab", "train", "--config", name, "--new", "--json",
               "--runs", str(folder / "runs"), *words]  # fmt: skip
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**summary, "elapsed_s": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parquet", type=Path, help="a local file of FineWeb instead of generated text")
    parser.add_argument("--updates", type=int, default=20, help="updates of a run (20)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each config (2)")
    parser.add_argument("--peak-tflops", type=float, help="the GPU's dense BF16 peak; without it no MFU against it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no CUDA GPU here")
    peak = measured_peak()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, best BF16 product {peak:,.0f} TFLOP/s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = overrides(folder, options.parquet and options.parquet.resolve(), options.updates)
        dataset = prepare_dataset(resolve_config("corrected", settings).config)
        first = dataset.update_data(1)
        flops = flops_of_pieces(dataset.config.model, dataset.tokenizer.vocab_size, first.pieces.lengths)
        targets = first.num_target_tokens
        found: dict[str, list[dict[str, Any]]] = {"corrected": [], "corrected-fast": []}
        for _ in range(options.turns):
            for config, summaries in found.items():
                summaries.append(run(config, settings, folder))
                print(f"{config}: {summaries[-1]['throughput']['target_tokens_per_s']:,.0f} target tokens/s, "
                      f"{summaries[-1]['elapsed_s']:.0f} s in all", flush=True)  # fmt: skip
    print("| | target tokens/s | MFU causal | MFU full square | share of the best product | peak GiB | loss after |")
    print("|---|---|---|---|---|---|---|")
    for config, summaries in found.items():
        speed = statistics.median(summary["throughput"]["target_tokens_per_s"] for summary in summaries)
        rates = [count * speed / targets / 1e12 for count in flops]
        mfu = [f"{rate / options.peak_tflops:.1%}" if options.peak_tflops else "n/a" for rate in rates]
        memory = max(summary["last_process"]["peak_memory"]["bytes"] for summary in summaries) / 2**30
        print(f"| {config} | {speed:,.0f} | {mfu[0]} | {mfu[1]} | {rates[0] / peak:.1%} | {memory:.1f} "
              f"| {summaries[-1]['loss']['last']:.4f} |")  # fmt: skip


if __name__ == "__main__":
    main()
