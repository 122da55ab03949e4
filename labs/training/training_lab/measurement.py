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


def milestones(updates: list[Row], evaluations: list[Row], at_most: int = 12) -> list[dict[str, Any]]:
    """The first update, and the updates after which the validation loss was measured, thinned to `at_most` rows.

    `loss` and `grad_norm` of update k are those that its step was made from, `val_loss` is measured after it.
    """
    by_update = {row["update"]: row for row in updates}
    val_losses = {row["update"]: row["val_loss"] for row in evaluations}
    chosen = sorted({*val_losses, *list(by_update)[:1]})
    if len(chosen) > at_most:
        chosen = [chosen[round(i * (len(chosen) - 1) / (at_most - 1))] for i in range(at_most)]
    return [
        {
            "update": update,
            **{key: by_update.get(update, {}).get(key) for key in ("loss", "lr", "grad_norm")},
            "val_loss": val_losses.get(update),
        }
        for update in chosen
    ]


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
