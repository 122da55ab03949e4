"""The content of `summary.json`: how a run stands, its key figures, each with its definition beside it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from training_lab import memory_peaks, record, wall_clock
from training_lab.checkpoint import list_checkpoints, weights_sha256
from training_lab.engine import Process
from training_lab.loss import Objective
from training_lab.measurement import measured_rows, milestones, throughput
from training_lab.model import expected_initial_loss, is_plausible
from training_lab.parallel import is_sharded
from training_lab.prediction import predict_memory
from training_lab.record import RunFolder
from training_lab.tracking import Row, read_metrics, rows_of_kind
from training_lab.trainer import Trainer
from training_lab.utilisation import peak_of, utilisation


class Outcome(NamedTuple):
    """How a process's training ended."""

    state: str
    exit_code: int
    failure: dict[str, Any]


def summarise(
    trainer: Trainer, folder: RunFolder, outcome: Outcome, process: Process, probe: dict[str, Any] | None
) -> dict[str, Any]:
    """What the run's rows, the trainer and the process say. `probe` is the rate of matrix products, if measured."""
    rows = read_metrics(folder.file(record.METRICS))
    updates, evaluations, events = (rows_of_kind(rows, kind) for kind in ("update", "evaluation", "event"))
    config, hardware, progress = trainer.config, trainer.hardware, trainer.progress
    vocab_size = trainer.dataset.tokenizer.vocab_size
    measured = measured_rows(updates, config.measure.warmup_updates)
    peak = peak_of(str(hardware.device), hardware.compute, hardware.gpu, config.measure)
    ended = [*(event for event in events if event["event"] == "end"), end_of_process(process)]
    saved = [checkpoint.update for checkpoint in list_checkpoints(folder.file(record.CHECKPOINTS))]
    return {
        "state": outcome.state,
        **({"failure": outcome.failure} if outcome.failure else {}),
        "updates": progress.update,
        "planned_updates": config.train.updates,
        "target_tokens": progress.target_tokens,
        "loss": {
            "definition": loss_definition(trainer.objective),
            "first": updates[0]["loss"] if updates else None,
            "last": updates[-1]["loss"] if updates else None,
        },
        **describe_evaluations(trainer, evaluations),
        "milestones": milestones(updates, evaluations),
        "throughput": throughput(updates, config.measure.warmup_updates),
        "utilisation": utilisation(
            config.model, vocab_size, measured, peak, hardware.compute, probe, trainer.processes.world_size
        ),
        "memory": describe_memory(trainer, ended, process.peaks.base_bytes),
        "wall_clock": {
            "definition": wall_clock.DEFINITION,
            "processes": [
                {"segment": end["segment"], "elapsed_s": end["elapsed_s"], "parts": end["wall_clock"]} for end in ended
            ],
        },
        "timeline": next((event["summary"] for event in reversed(events) if event["event"] == "timeline"), None),
        "last_process": {
            "segment": process.segment,
            "elapsed_s": process.clock.elapsed_s(),
            "peak_memory": process.peaks.peak(),
        },
        "weights_sha256": hash_of_weights(trainer),
        "checkpoints": sorted(saved),
    }


def hash_of_weights(trainer: Trainer) -> str | None:
    """The hash of the weights. Where each process has only a part of them they are hashed when they are saved, and None
    otherwise."""
    if not is_sharded(trainer.shared):
        return weights_sha256(trainer.model)
    return trainer.hashed[1] if trainer.hashed and trainer.hashed[0] == trainer.progress.update else None


def describe_evaluations(trainer: Trainer, evaluations: list[Row]) -> dict[str, Any]:
    """The validation losses, and whether the first is what it should be."""
    expected = expected_initial_loss(trainer.dataset.tokenizer.vocab_size, trainer.config.model.d_model)
    initial = evaluations[0]["val_loss"] if evaluations and evaluations[0]["update"] == 0 else None
    progress = trainer.progress
    return {
        "val_loss": {
            "definition": "mean cross-entropy over the target tokens of the fixed validation set, in nats",
            "validation_identity": trainer.dataset.validation.identity,
            "first": evaluations[0]["val_loss"] if evaluations else None,
            "last": evaluations[-1]["val_loss"] if evaluations else None,
            "best": progress.best_val_loss if math.isfinite(progress.best_val_loss) else None,
            "best_update": progress.best_update if progress.best_update >= 0 else None,
        },
        "initial_loss": {
            "expected": expected,
            "measured": initial,
            "is_plausible": None if initial is None else is_plausible(initial, expected),
        },
    }


def end_of_process(process: Process) -> dict[str, Any]:
    """What a process leaves in the metrics when it ends: where its time went, and the most memory that it took."""
    return {
        "segment": process.segment,
        "elapsed_s": process.clock.elapsed_s(),
        "wall_clock": process.clock.parts_s(),
        "memory_scopes": process.peaks.scopes,
        "process_peak_bytes": memory_peaks.process_peak_bytes(),
    }


def describe_memory(trainer: Trainer, ended: list[dict[str, Any]], base_bytes: int) -> dict[str, Any]:
    """The highest figures over all processes of the run that ended by themselves, and what was to be expected."""
    scopes: dict[str, dict[str, int]] = {}
    for end in ended:
        for name, figures in end["memory_scopes"].items():
            highest = scopes.setdefault(name, {})
            highest.update({key: max(number, highest.get(key, 0)) for key, number in figures.items()})
    peaks = [end["process_peak_bytes"] for end in ended if end["process_peak_bytes"]]
    vocab_size = trainer.dataset.tokenizer.vocab_size
    predicted = predict_memory(trainer.config, vocab_size, trainer.hardware, trainer.kernels, base_bytes)
    return {
        "definition": memory_peaks.DEFINITION,
        "scopes": scopes,
        "process_peak_bytes": max(peaks, default=None),
        "predicted": predicted.describe(),
    }


def loss_definition(objective: Objective) -> str:
    """What the training loss is, in words."""
    terms = [f"label smoothing {objective.label_smoothing:g}"] if objective.label_smoothing else []
    terms += [f"z-loss {objective.z_loss:g}"] if objective.z_loss else []
    with_terms = f", with {' and '.join(terms)}" if terms else ""
    return f"mean cross-entropy{with_terms} over the target tokens of an update, in nats"
