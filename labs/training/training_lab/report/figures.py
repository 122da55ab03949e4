"""The key figures of a run: from its summary if it was closed, else from the rows that there are. Pure."""

from __future__ import annotations

import math
from typing import Any

from training_lab import measurement, record
from training_lab.report.gather import Gathered
from training_lab.report.reading import at, mapping, number, numbers, records, words
from training_lab.tracking import Row

MEASURED_KEYS = ("target_tokens", "input_tokens", "seconds", "segment")
LARGEST_LOSS = 700.0
"""Beyond it exp overflows."""


def key_figures(found: Gathered) -> dict[str, Any]:
    """Every key figure with its definition; None where the record has none."""
    summary = found[record.SUMMARY]
    return {
        "from": record.SUMMARY if found.is_closed else record.METRICS,
        "updates": done_of(found),
        "planned_updates": planned_of(found),
        "parameters": number(at(found[record.CONFIG], "model", "parameters")),
        "target_tokens": target_tokens(found),
        "loss": training_loss(found),
        "val_loss": validation_loss(found),
        "initial_loss": mapping(summary.get("initial_loss")),
        "throughput": throughput(found),
        "utilisation": utilisation(found),
        "memory": memory(found),
        "wall_clock_s": sum(process["elapsed_s"] for process in processes(found)) or None,
    }


def done_of(found: Gathered) -> int | None:
    """Completed updates."""
    said: int | None = number(found[record.SUMMARY].get("updates")) if found.is_closed else None
    last: int | None = found.updates[-1]["update"] if found.updates else None
    return last if said is None else said


def planned_of(found: Gathered) -> int | None:
    """Updates that the run was to have."""
    said: int | None = number(found[record.SUMMARY].get("planned_updates"))
    planned: int | None = number(at(found[record.CONFIG], "values", "train", "updates"))
    return planned if said is None else said


def target_tokens(found: Gathered) -> int | None:
    """Target tokens trained on."""
    said: int | None = number(found[record.SUMMARY].get("target_tokens")) if found.is_closed else None
    if said is not None or not found.updates:
        return said
    return sum(number(row.get("target_tokens")) or 0 for row in found.updates)


def training_loss(found: Gathered) -> dict[str, Any]:
    """The training loss of the first update and of the last."""
    said = mapping(found[record.SUMMARY].get("loss"))
    losses = [number(row.get("loss")) for row in found.updates]
    rows = {"first": losses[0] if losses else None, "last": losses[-1] if losses else None}
    return {"definition": words(said.get("definition")), **first_last(said if found.is_closed else {}, rows)}


def validation_loss(found: Gathered) -> dict[str, Any]:
    """The validation loss before the first update, after the last, and at its best, with perplexities."""
    said = mapping(found[record.SUMMARY].get("val_loss"))
    losses = [number(row.get("val_loss")) for row in found.evaluations]
    known = [(loss, row["update"]) for loss, row in zip(losses, found.evaluations, strict=True) if loss is not None]
    best, best_update = min(known, default=(None, None))
    if found.is_closed and number(said.get("best")) is not None:
        best, best_update = number(said["best"]), number(said.get("best_update"))
    rows = {"first": losses[0] if losses else None, "last": losses[-1] if losses else None}
    edges = first_last(said if found.is_closed else {}, rows)
    return {
        "definition": words(said.get("definition")),
        "validation_identity": words(said.get("validation_identity")),
        **edges,
        "best": best,
        "best_update": best_update,
        "perplexity": {name: perplexity(value) for name, value in {**edges, "best": best}.items()},
    }


def first_last(said: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """What a summary says of the first and the last; where it does not, what the rows say."""
    return {name: number(said[name]) if name in said else value for name, value in rows.items()}


def perplexity(loss: float | None) -> float | None:
    """e to the loss."""
    return math.exp(loss) if loss is not None and loss < LARGEST_LOSS else None


def throughput(found: Gathered) -> dict[str, Any]:
    """The speed, and what was left out of it. Of a run that was not closed it is computed as a summary would."""
    said = mapping(found[record.SUMMARY].get("throughput"))
    if not found.is_closed or not said:
        said = computed_throughput(found)
    excluded = [
        {"update": one["update"], "reason": words(one.get("reason"), 200)}
        for one in records(said.get("excluded"))
        if number(one.get("update")) is not None
    ]
    return {**numbers(said), "definition": words(said.get("definition")), "excluded": excluded}


def computed_throughput(found: Gathered) -> dict[str, Any]:
    """The speed over the rows that have all that it is made of."""
    whole: list[Row] = [row for row in found.updates if all(number(row.get(key)) is not None for key in MEASURED_KEYS)]
    warmup = number(at(found[record.CONFIG], "values", "measure", "warmup_updates"))
    if warmup is None or not whole or any(row["seconds"] <= 0 for row in whole):
        return {}
    return measurement.throughput(whole, warmup)


def utilisation(found: Gathered) -> dict[str, Any]:
    """Rates, MFU and share of the measured matrix-multiply rate, and why one is not there."""
    said = mapping(found[record.SUMMARY].get("utilisation")) if found.is_closed else {}
    peak, probe = mapping(said.get("peak")), mapping(said.get("matmul_probe"))
    shape = probe.get("shape")
    return {
        "definition": words(said.get("definition")),
        "formulas": {name: words(text, 200) for name, text in mapping(said.get("formulas")).items()},
        "measured_flops": numbers(said.get("measured_flops")),
        "tflops_per_s": numbers(said.get("tflops_per_s")),
        "mfu": numbers(said.get("mfu")),
        "matmul_share": numbers(said.get("matmul_share")),
        "peak": {**numbers(peak), **{key: words(peak.get(key), 200) for key in ("dtype", "source", "device")}}
        if number(peak.get("tflops")) is not None
        else None,
        "matmul_probe": {
            **numbers(probe),
            "dtype": words(probe.get("dtype"), 20),
            "shape": [one for one in shape[:3] if number(one) is not None] if isinstance(shape, list) else [],
        }
        if number(probe.get("tflops")) is not None
        else None,
        "reason": words(said.get("reason"), 500) or why_no_utilisation(found, said),
    }


def why_no_utilisation(found: Gathered, said: dict[str, Any]) -> str:
    """Why there is no figure of utilisation at all, if there is none."""
    if found.state == "damaged":
        return "there is no summary that can be read"
    if not found.is_closed:
        return "the run was not closed, and only the summary of a closed one says it"
    return "" if said else "the summary does not say it"


def memory(found: Gathered) -> dict[str, Any]:
    """Peaks by scope and of the process; an earlier version said one peak of the last process."""
    summary = found[record.SUMMARY]
    said = mapping(summary.get("memory")) if found.is_closed else {}
    last = mapping(at(summary, "last_process", "peak_memory"))
    predicted = mapping(said.get("predicted"))
    process_peak = number(said.get("process_peak_bytes"))
    return {
        "definition": words(said.get("definition")) or words(last.get("definition")),
        "scopes": {
            words(name, 40): numbers(figures)
            for name, figures in mapping(said.get("scopes")).items()
            if numbers(figures)
        },
        "process_peak_bytes": process_peak if said else number(last.get("bytes")),
        "predicted": {
            "parts": numbers(predicted.get("parts")),
            "total_bytes": number(predicted.get("total_bytes")),
            "of": words(predicted.get("of"), 300),
        }
        if numbers(predicted.get("parts"))
        else None,
    }


def processes(found: Gathered) -> list[dict[str, Any]]:
    """How long each process of the run took, and on what; of those that ended by themselves."""
    summary = found[record.SUMMARY]
    said = records(at(summary, "wall_clock", "processes")) if found.is_closed else []
    if not said:
        ends = [row for row in found.events if row.get("event") == "end"]
        said = [{**end, "parts": end.get("wall_clock")} for end in ends]
    if not said and found.is_closed:
        said = [mapping(summary.get("last_process"))]
    return [
        {"segment": number(one.get("segment")), "elapsed_s": one["elapsed_s"], "parts": numbers(one.get("parts"))}
        for one in said
        if number(one.get("elapsed_s")) is not None
    ]
