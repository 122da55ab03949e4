"""The trainer beside nanoGPT's own `train.py`, on the same text, model and mathematics, turn by turn.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/peers.py --nanogpt nanoGPT                       small vocabulary: bytes
    python benchmarks/peers.py --nanogpt nanoGPT --tokenizer gpt2      50,257 tokens

Both train 6 layers of width 256 with 4 heads on windows of 256 tokens, 32 an update, in FP32 on the CPU. A figure is
the median of the updates after the first ten; peak memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from training_lab.data.dataset import prepare_dataset
from training_lab.data.stream import TokenStream
from training_lab.resolve import resolve_config

TRAINING = Path(__file__).resolve().parent.parent
TOKENS_PER_UPDATE = 32 * 256


class Figure(NamedTuple):
    """What one run measured."""

    tokens_per_s: float
    peak_mib: float


def run(command: list[str], folder: Path) -> tuple[str, float]:
    """A command's output, and the peak memory of its process in MiB."""
    with open(folder / "output", "w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{text[-2000:]}")
    return text, usage.ru_maxrss / 1024


def ours(folder: Path, tokenizer: str, updates: int) -> Figure:
    """The lab's own command, as everybody uses it."""
    command = [sys.executable, "-m", "training_lab", "train", "--config", "baseline", "--new", "--json",
               "--stop-after", str(updates), "--set", "eval.tokens=256", "--set", f"data.tokenizer={tokenizer}",
               "--set", f"data.cache_dir={folder / 'cache'}"]  # fmt: skip
    text, peak = run(command, folder)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"kind": "update"')]
    return Figure(TOKENS_PER_UPDATE / statistics.median(row["seconds"] for row in rows[10:]), peak)


def nanogpt(folder: Path, repository: Path, updates: int, is_compiled: bool) -> Figure:
    """nanoGPT's train.py, unchanged, with its settings on the command line."""
    settings = {
        "dataset": "lab", "device": "cpu", "dtype": "float32", "compile": is_compiled, "n_layer": 6, "n_head": 4,
        "n_embd": 256, "block_size": 256, "batch_size": 32, "gradient_accumulation_steps": 1, "dropout": 0.0,
        "bias": False, "max_iters": updates, "lr_decay_iters": 200, "warmup_iters": 20, "learning_rate": 3e-4,
        "min_lr": 3e-5, "eval_iters": 1, "eval_interval": 10**6, "log_interval": 1, "out_dir": str(folder / "out"),
        "always_save_checkpoint": False,
    }  # fmt: skip
    command = [sys.executable, "train.py", *(f"--{name}={value}" for name, value in settings.items())]
    text, peak = run(command, repository)
    times = [float(ms) for ms in re.findall(r"iter \d+: loss [\d.]+, time ([\d.]+)ms", text)]
    return Figure(1000 * TOKENS_PER_UPDATE / statistics.median(times[10:]), peak)


def write_data(repository: Path, tokenizer: str, cache_dir: Path) -> None:
    """The lab's tokens as nanoGPT reads them."""
    config = resolve_config("baseline", [f"data.tokenizer={tokenizer}", f"data.cache_dir={cache_dir}"]).config
    dataset = prepare_dataset(config)
    folder = repository / "data" / "lab"
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, stream: TokenStream) -> None:
        stream.take(np.arange(stream.size)).astype(np.uint16).tofile(folder / name)

    write("train.bin", dataset.train)
    write("val.bin", dataset.validation.stream)
    meta = folder / "meta.pkl"
    meta.unlink(missing_ok=True)
    if tokenizer == "byte":  # without it nanoGPT takes 50,304
        meta.write_bytes(pickle.dumps({"vocab_size": dataset.tokenizer.vocab_size}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, metavar="FOLDER", help="a clone of karpathy/nanoGPT")
    parser.add_argument("--tokenizer", choices=["byte", "gpt2"], default="byte", help="byte: 256 tokens; gpt2: 50,257")
    parser.add_argument("--updates", type=int, default=24, help="updates of each run; the first 10 are not measured")
    parser.add_argument("--repeats", type=int, default=3, help="turns (3)")
    options = parser.parse_args()
    repository = options.nanogpt.resolve()
    found: dict[str, list[Figure]] = {"training_lab": [], "nanoGPT eager": [], "nanoGPT compiled": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(repository, options.tokenizer, folder / "cache")
        for turn in range(options.repeats):
            found["training_lab"].append(ours(folder, options.tokenizer, options.updates))
            for kind, is_compiled in (("nanoGPT eager", False), ("nanoGPT compiled", True)):
                found[kind].append(nanogpt(folder, repository, options.updates, is_compiled))
            print(
                f"turn {turn + 1}: " + ", ".join(f"{k} {v[-1].tokens_per_s:,.0f}" for k, v in found.items()), flush=True
            )
    own = statistics.median(figure.tokens_per_s for figure in found["training_lab"])
    print("| | tokens/s | from – to | training_lab is | peak MiB |")
    for kind, figures in found.items():
        speeds, peaks = zip(*figures, strict=True)
        median = statistics.median(speeds)
        print(f"| {kind} | {median:,.0f} | {min(speeds):,.0f} – {max(speeds):,.0f} | {own / median:.2f} × "
              f"| {statistics.median(peaks):,.0f} |")  # fmt: skip


if __name__ == "__main__":
    main()
