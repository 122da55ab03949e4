"""How long training waits for a checkpoint of `corrected` (126.7 M parameters with AdamW's state, 1.5 GB), beside a
plain `torch.save` and fsync of the same state on the same disk in the same process.

    python benchmarks/saving.py [FOLDER]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from training_lab.config import CheckpointConfig
from training_lab.distributed import ALONE
from training_lab.record import CHECKPOINTS, RunFolder
from training_lab.saving import Saver

VALUES, TENSORS = 126_716_160, 148
ROUNDS = 4


def make_state() -> dict[str, Any]:
    """Three tensors of every parameter, as a checkpoint has them."""
    size = VALUES // TENSORS
    model, first, second = ({str(number): torch.randn(size) for number in range(TENSORS)} for _ in range(3))
    return {"model": model, "moments": [first, second], "progress": {"update": 0}}


def plain_seconds(state: dict[str, Any], path: Path) -> float:
    """`torch.save`, and the disk."""
    started = time.perf_counter()
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def products_per_s(seconds: float) -> float:
    """How much a training would get done meanwhile: matrix products a second, with all threads."""
    a, count, started = torch.randn(768, 768), 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        a @ a
        count += 1
    return count / (time.perf_counter() - started)


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        folder, state = RunFolder(Path(name)), make_state()
        folder.file(CHECKPOINTS).mkdir()
        saver = Saver(folder, CheckpointConfig(keep_last=1, keep_best=False), 0, ALONE, False, None)
        undisturbed = products_per_s(3.0)
        for number in range(1, ROUNDS + 1):
            plain = plain_seconds(state, Path(name) / "plain.pt")
            saver.save(number, state, {"metrics_lines": 0}, None)
            meanwhile = products_per_s(2.0)
            saver.wait()
            (row,) = saver.news()
            print(f"round {number}: plain {plain:.2f} s; waited {row['blocked_s']:.3f} s, "
                  f"{row['blocked_s'] / plain:.1%}; on the disk after {row['seconds']:.2f} s; work meanwhile at "
                  f"{meanwhile / undisturbed:.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
