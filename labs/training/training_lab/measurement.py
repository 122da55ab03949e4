"""What a run's rows say about its speed, with the definition beside the figure; and the memory that it took."""

from __future__ import annotations

import sys
from typing import Any

import torch

from training_lab.tracking import Row

THROUGHPUT_DEFINITION = (
    "target tokens of the measured updates divided by their seconds, a ratio of sums; an update's seconds cover batch, "
    "transfer, forward, backward, clipping and optimizer, not evaluation, checkpoints and logging"
)


def throughput(updates: list[Row], warmup_updates: int) -> dict[str, Any]:
    """Tokens per second over the update rows, leaving out the first `warmup_updates` of each process.

    `target_tokens_per_s` is None if nothing is left.
    """
    excluded, measured = [], []
    seen_in_segment: dict[int, int] = {}
    for row in updates:
        place = seen_in_segment[row["segment"]] = seen_in_segment.get(row["segment"], 0) + 1
        if place <= warmup_updates:
            excluded.append({"update": row["update"], "reason": f"one of the first {warmup_updates} of its process"})
        else:
            measured.append(row)
    tokens = sum(row["target_tokens"] for row in measured)
    seconds = sum(row["seconds"] for row in measured)
    return {
        "target_tokens_per_s": tokens / seconds if measured else None,
        "definition": THROUGHPUT_DEFINITION,
        "measured_updates": len(measured),
        "measured_target_tokens": tokens,
        "measured_seconds": seconds,
        "excluded": excluded,
    }


def peak_memory(device: torch.device) -> dict[str, Any]:
    """The most memory that the process used so far, in bytes, and what that means on this device."""
    if device.type == "cuda":
        definition = "most bytes in tensors on the GPU at one time (max_memory_allocated)"
        return {"bytes": torch.cuda.max_memory_allocated(device), "definition": definition}
    try:
        import resource
    except ImportError:
        return {"bytes": None, "definition": "not known on this system"}
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"bytes": peak, "definition": "most resident memory of the whole process, Python and libraries included"}
