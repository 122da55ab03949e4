"""What a run's rows say about its speed, with the definition beside the figure. Pure."""

from __future__ import annotations

from typing import Any

from training_lab.tracking import Row

THROUGHPUT_DEFINITION = (
    "target tokens of the measured updates divided by their seconds and devices, a ratio of sums. An update's seconds "
    "cover batch, transfer, forward, backward, clipping and optimizer; evaluation, checkpoints, logging and the export "
    "of profiles fall between updates. Updates that follow each other make a window; the device is waited for where a "
    "window begins and ends, not inside"
)

OBSERVED = {
    "timeline warm-up": "the profiler warmed up on it",
    "timeline": "its operations were recorded",
    "memory": "its allocations were recorded",
}
"""What a row's `observed` says, and why the update is then left out."""


def exclusions(updates: list[Row], warmup_updates: int) -> dict[int, str]:
    """The updates that are no part of the steady state, each with the reason: the first `warmup_updates` of each
    process, and those that were observed at work."""
    excluded: dict[int, str] = {}
    seen_in_segment: dict[int, int] = {}
    for row in updates:
        place = seen_in_segment[row["segment"]] = seen_in_segment.get(row["segment"], 0) + 1
        if place <= warmup_updates:
            excluded[row["update"]] = f"one of the first {warmup_updates} of its process"
        elif row.get("observed") in OBSERVED:
            excluded[row["update"]] = OBSERVED[row["observed"]]
    return excluded


def measured_rows(updates: list[Row], warmup_updates: int) -> list[Row]:
    """The update rows of the steady state."""
    excluded = exclusions(updates, warmup_updates)
    return [row for row in updates if row["update"] not in excluded]


def throughput(updates: list[Row], warmup_updates: int, devices: int = 1) -> dict[str, Any]:
    """Tokens per second and device over the update rows of the steady state; None if there are none."""
    measured = measured_rows(updates, warmup_updates)
    seconds = sum(row["seconds"] for row in measured) * devices
    targets, inputs = (sum(row[key] for row in measured) for key in ("target_tokens", "input_tokens"))
    return {
        "target_tokens_per_s": targets / seconds if measured else None,
        "input_tokens_per_s": inputs / seconds if measured else None,
        "definition": THROUGHPUT_DEFINITION,
        "devices": devices,
        "measured_updates": len(measured),
        "measured_target_tokens": targets,
        "measured_input_tokens": inputs,
        "measured_seconds": seconds / devices,
        "excluded": [
            {"update": update, "reason": reason} for update, reason in exclusions(updates, warmup_updates).items()
        ],
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
