"""What observing costs: everything around an update that is not the update, and the mirror that follows beside it.

    python benchmarks/observing.py [--config baseline] [--updates 2000] [--follow-s 20]

Runs the real training loop with an update that does nothing (rows, clock, memory figures, marks of the phases are all
made), then real updates, and tells the first as a share of the second. And lets the real follower mirror a run to W&B's
offline files, a row a second, and reads from /proc how much processor time it and what it started take. Linux only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from training_lab import engine
from training_lab.config import TrackingConfig
from training_lab.console import JsonConsole
from training_lab.data.dataset import prepare_dataset
from training_lab.engine import Process, observe, train, train_update
from training_lab.memory_peaks import PeakMemory
from training_lab.mirrors.handle import start_mirrors
from training_lab.mirrors.mode import WandbChoice
from training_lab.precision import choose_hardware
from training_lab.record import RunFolder, list_runs
from training_lab.resolve import resolve_config
from training_lab.stopping import StopRequest
from training_lab.tracking import MetricsWriter, Recorder, Row
from training_lab.train import run_training
from training_lab.trainer import Trainer, make_trainer
from training_lab.wall_clock import WallClock


def around_s(trainer: Trainer, folder: Path, updates: int) -> float:
    """Seconds of the loop for an update that takes none."""
    example = {"kind": "update", "loss": 1.2345678, "lr": 3e-4, "grad_norm": 0.5, "target_tokens": 8192,
               "input_tokens": 8192, "sum_of_squared_lengths": 2**21, "batch_sha256": "0" * 64}  # fmt: skip

    def nothing(trainer: Trainer, read: Any = None) -> Row:
        for name in ("batch", "zero_grad", "transfer", "forward", "backward", "clip", "optimizer"):
            with trainer.phases(name):
                pass
        trainer.progress.update += 1
        return {**example, "update": trainer.progress.update}

    real = engine.train_update, engine.save
    engine.train_update, engine.save = nothing, lambda *_: None
    trainer.progress.evaluated_update, trainer.progress.update = 1, 1
    run = RunFolder(folder)
    (folder / "checkpoints").mkdir()
    try:
        with MetricsWriter(folder / "metrics.jsonl") as writer:
            recorder, peaks = Recorder(writer, lambda row: None), PeakMemory(trainer.hardware.device)
            observation = observe(trainer, run, recorder)
            process = Process(1, updates, recorder, StopRequest(), WallClock(), peaks, observation)
            started = time.perf_counter()
            train(trainer, run, process)
            return (time.perf_counter() - started) / updates
    finally:
        engine.train_update, engine.save = real


def processor_s(pid: int) -> float:
    """Processor seconds of a process and all that it started and that still run."""
    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    pids, children = [pid], list[int]()
    while pids:
        one = pids.pop()
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / ticks
        children = [int(child) for task in Path(f"/proc/{one}/task").iterdir()
                    for child in (task / "children").read_text().split()]  # fmt: skip
        pids += children
    return total


def follower_share(config: str, folder: Path, follow_s: int) -> float:
    """Processor seconds of the follower a second, while a row comes every second."""
    resolved = resolve_config(config, ["train.updates=2", "schedule.warmup_updates=1", "eval.tokens=256",
                                       "tracking.wandb=off", f"data.cache_dir={folder / 'cache'}"])  # fmt: skip
    run_training(resolved, folder / "runs", JsonConsole(), True, None, WallClock())
    run = list_runs(folder / "runs")[0]
    mirrors = start_mirrors(run, TrackingConfig(timeout_s=20), WandbChoice("offline", "for this measurement"))
    assert mirrors._process is not None
    time.sleep(6)
    before = processor_s(mirrors._process.pid)
    line = next(text for text in run.file("metrics.jsonl").read_text().splitlines() if '"kind": "update"' in text)
    for _ in range(follow_s):
        with open(run.file("metrics.jsonl"), "a", encoding="utf-8") as file:
            file.write(line + "\n")
        time.sleep(1)
    share = (processor_s(mirrors._process.pid) - before) / follow_s
    print(mirrors.close(20) or f"W&B: {run.read_json('wandb.json')['rows_sent']} rows")
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="baseline", help="the config whose update is compared with (baseline)")
    parser.add_argument("--updates", type=int, default=2000, help="empty updates (2000)")
    parser.add_argument("--follow-s", type=int, default=20, help="seconds to watch the follower (20)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        share = follower_share(options.config, folder, options.follow_s)
        own = [f"train.updates={options.updates + 1}", f"checkpoint.every={options.updates}", "eval.every=0",
               "eval.tokens=256", f"data.cache_dir={folder / 'cache'}"]  # fmt: skip
        config = resolve_config(options.config, own).config
        trainer = make_trainer(config, choose_hardware(config), prepare_dataset(config))
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            train_update(trainer)
            seconds.append(time.perf_counter() - started)
        update_s = statistics.median(seconds[1:])
        (folder / "loop").mkdir()
        around = around_s(trainer, folder / "loop", options.updates)
        shutil.rmtree(folder / "loop")
    print(f"around an update {around * 1e6:,.0f} µs, an update of {options.config} {update_s * 1e3:,.0f} ms: "
          f"{around / update_s:.4%}; the follower {share:.2%} of one processor")  # fmt: skip


if __name__ == "__main__":
    main()
