"""The command `train`: find what to continue, assemble, train, and close the run's folder, whatever happens."""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from typing import Any, NamedTuple

from training_lab import record
from training_lab.checkpoint import Checkpoint, list_checkpoints, newest_good, set_aside_damaged, weights_sha256
from training_lab.console import Console
from training_lab.data.dataset import differences, prepare_dataset
from training_lab.engine import NonFiniteError, Trainer, make_trainer, train
from training_lab.errors import LabError, UserError
from training_lab.identity import identity_of
from training_lab.measurement import milestones, peak_memory, throughput
from training_lab.memory import advice_for_memory, is_out_of_memory
from training_lab.model import count_parameters, expected_initial_loss, is_plausible
from training_lab.optim import describe_groups
from training_lab.precision import choose_hardware
from training_lab.provenance import changed_files, describe_host, describe_source
from training_lab.record import RunFolder
from training_lab.resolve import Resolved
from training_lab.stopping import StopRequest
from training_lab.tracking import MetricsWriter, Recorder, count_processes, read_metrics, rows_of_kind


class Continuation(NamedTuple):
    """An unfinished run of the same config, and the checkpoint to go on from (None: it was killed before the first)."""

    folder: RunFolder
    checkpoint: Checkpoint | None
    damaged: list[str]


class Outcome(NamedTuple):
    """How a process's training ended."""

    state: str
    exit_code: int
    failure: dict[str, Any]


def run_training(resolved: Resolved, runs_dir: Path, console: Console, is_new: bool, stop_after: int | None) -> int:
    """Trains the config to its end, going on with an unfinished run of it. Returns the exit code."""
    config = resolved.config
    if stop_after is not None and not 0 < stop_after <= config.train.updates:
        raise UserError(f"--stop-after {stop_after}: must be from 1 to train.updates = {config.train.updates}")
    started = time.monotonic()
    source = describe_source()
    continued = None if is_new else find_continuation(resolved, runs_dir, source)
    hardware = choose_hardware(config)
    console.preparing(f"Reading and tokenising the text ({config.data.source}, {config.data.tokenizer})")
    dataset = prepare_dataset(config)
    if continued is not None:
        check_same_data(continued.folder, dataset.manifest)
    trainer = make_trainer(config, hardware, dataset)

    folder = record.create_run(runs_dir, resolved.name) if continued is None else continued.folder
    with folder.lock():
        environment = {**describe_host(), **hardware.describe()}
        if continued is None:
            write_beginning(folder, resolved, source, environment, trainer)
            first_line = 0
        else:
            first_line = restore(trainer, continued)
            note_environment(folder, environment, console)
        folder.file(record.MANIFEST).unlink(missing_ok=True)
        folder.write_json(record.SUMMARY, {"state": "running"})
        command = command_of(resolved, runs_dir)
        segment = 1 + count_processes(folder.file(record.METRICS))
        with MetricsWriter(folder.file(record.METRICS)) as writer:
            recorder = Recorder(writer, console.row)
            console.begin(opening(resolved, trainer, folder, continued), command)
            if continued is None:
                recorder.event("start", segment=segment)
            else:
                update = trainer.progress.update
                recorder.event("resume", segment=segment, from_update=update, supersedes_from_line=first_line)
            outcome = train_to_outcome(trainer, folder, recorder, segment, stop_after)
            if outcome.failure:
                recorder.event("failure", state=outcome.state, **outcome.failure)
            recorder.sync()
        summary = summarise(trainer, folder, outcome, segment, time.monotonic() - started)
        folder.write_json(record.SUMMARY, summary)
        folder.write_manifest()
    console.end(summary, folder, command)
    return outcome.exit_code


def train_to_outcome(
    trainer: Trainer, folder: RunFolder, recorder: Recorder, segment: int, stop_after: int | None
) -> Outcome:
    """Trains until the end, a stop or a failure, and says which. An error that is none of these is raised."""
    with StopRequest() as stop:
        try:
            state = train(trainer, folder, recorder, stop, segment, stop_after)
        except NonFiniteError as error:
            return Outcome("failed: non-finite", 1, {"message": str(error), **error.facts})
        except LabError as error:
            return Outcome("failed: error", 1, {"message": str(error)})
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return Outcome("failed: out of memory", 1, {"message": advice_for_memory(trainer.config)})
        return Outcome(state, stop.exit_code if state == "interrupted" else 0, {})


def find_continuation(resolved: Resolved, runs_dir: Path, source: dict[str, Any]) -> Continuation | None:
    """The newest run of this config, if it is unfinished. Raises an error rather than mixing code, or starting
    afresh over checkpoints that are all damaged."""
    for folder in record.list_runs(runs_dir):
        try:
            identity = folder.read_json(record.CONFIG)["identity"]
        except (LabError, KeyError, TypeError):
            continue
        if identity != resolved.identity:
            continue
        state = folder.state()
        if state == "finished":
            return None
        if state == "running":
            raise UserError(
                f"{folder.path}: this config is being trained there now; wait for it, or start another with --new"
            )
        changes = changed_files(folder.read_json(record.SOURCE), source)
        if changes:
            raise UserError(
                f"{folder.path}: is unfinished, but was trained by other code: {', '.join(changes[:5])}"
                f"{', …' if len(changes) > 5 else ''}; start afresh with --new, or go back to its code to continue it"
            )
        checkpoint, damaged = newest_good(folder.file(record.CHECKPOINTS))
        return Continuation(folder, checkpoint, damaged)
    return None


def check_same_data(folder: RunFolder, manifest: dict[str, Any]) -> None:
    """Refuses to continue on other data, and says what differs."""
    before = folder.read_json(record.DATA_MANIFEST)
    if before["identity"] != manifest["identity"]:
        found = "; ".join(differences(before, manifest)) or "the files are the same, their use differs"
        raise UserError(
            f"{folder.path}: its data have changed since: {found}; restore them, or start afresh with --new"
        )


def restore(trainer: Trainer, continued: Continuation) -> int:
    """Brings the trainer to the checkpoint. Returns the first line of the metrics that this supersedes."""
    set_aside_damaged(continued.folder.file(record.CHECKPOINTS), continued.checkpoint)
    if continued.checkpoint is None:
        return 0
    trainer.restore(continued.checkpoint.load())
    return int(continued.checkpoint.describe()["metrics_lines"])


def write_beginning(
    folder: RunFolder, resolved: Resolved, source: dict[str, Any], environment: dict[str, Any], trainer: Trainer
) -> None:
    """Writes what is known before the first update."""
    optimizer = describe_groups(trainer.model, trainer.config.optimizer)
    folder.write_json(record.SOURCE, source)
    folder.write_json(record.ENVIRONMENT, {"processes": [environment]})
    folder.write_json(record.DATA_MANIFEST, trainer.dataset.manifest)
    model = {
        "parameters": count_parameters(trainer.model),
        "optimizer_groups": optimizer,
        "initial_weights_sha256": weights_sha256(trainer.model),
    }
    folder.write_json(record.CONFIG, {**resolved.record(), "model": model})


def note_environment(folder: RunFolder, environment: dict[str, Any], console: Console) -> None:
    """Adds the environment of this process to the record where it differs from the last, and says so."""
    known = folder.read_json(record.ENVIRONMENT)["processes"]
    if identity_of(known[-1]) == identity_of(environment):
        return
    changed = sorted(k for k in {*known[-1], *environment} if known[-1].get(k) != environment.get(k))
    console.warn(
        f"this process differs from the last in {', '.join(changed)} (see {record.ENVIRONMENT}): "
        "the run may not be bit-identical to one that was never stopped"
    )
    folder.write_json(record.ENVIRONMENT, {"processes": [*known, environment]})


def opening(resolved: Resolved, trainer: Trainer, folder: RunFolder, continued: Continuation | None) -> dict[str, Any]:
    """What is shown before the first update."""
    config, dataset, manifest = trainer.config, trainer.dataset, trainer.dataset.manifest
    return {
        "run": folder.run_id,
        "folder": str(folder.path),
        "config": resolved.name,
        "purpose": config.purpose,
        "continues_after_update": None if continued is None else trainer.progress.update,
        "damaged_checkpoints": continued.damaged if continued else [],
        "warnings": resolved.warnings(),
        "parameters": count_parameters(trainer.model),
        "vocab_size": dataset.tokenizer.vocab_size,
        "source": config.data.source,
        "tokenizer": config.data.tokenizer,
        "train_tokens": manifest["split"]["train"]["tokens"],
        "train_documents": manifest["split"]["train"]["documents"],
        "val_target_tokens": manifest["validation"]["target_tokens"],
        "updates": config.train.updates,
        "tokens_per_update": config.batch.update_tokens,
        "expected_initial_loss": expected_initial_loss(dataset.tokenizer.vocab_size, config.model.d_model),
        "checkpoint_every": config.checkpoint.every,
        **trainer.hardware.describe(),
    }


def summarise(trainer: Trainer, folder: RunFolder, outcome: Outcome, segment: int, elapsed_s: float) -> dict[str, Any]:
    """The content of `summary.json`."""
    rows = read_metrics(folder.file(record.METRICS))
    updates, evaluations = rows_of_kind(rows, "update"), rows_of_kind(rows, "evaluation")
    expected = expected_initial_loss(trainer.dataset.tokenizer.vocab_size, trainer.config.model.d_model)
    initial = evaluations[0]["val_loss"] if evaluations and evaluations[0]["update"] == 0 else None
    best = trainer.progress
    saved = [checkpoint.update for checkpoint in list_checkpoints(folder.file(record.CHECKPOINTS))]
    return {
        "state": outcome.state,
        **({"failure": outcome.failure} if outcome.failure else {}),
        "updates": trainer.progress.update,
        "planned_updates": trainer.config.train.updates,
        "target_tokens": trainer.progress.target_tokens,
        "loss": {
            "definition": "mean cross-entropy over the target tokens of an update, in nats",
            "first": updates[0]["loss"] if updates else None,
            "last": updates[-1]["loss"] if updates else None,
        },
        "val_loss": {
            "definition": "mean cross-entropy over the target tokens of the fixed validation set, in nats",
            "validation_identity": trainer.dataset.validation.identity,
            "first": evaluations[0]["val_loss"] if evaluations else None,
            "last": evaluations[-1]["val_loss"] if evaluations else None,
            "best": best.best_val_loss if math.isfinite(best.best_val_loss) else None,
            "best_update": best.best_update if best.best_update >= 0 else None,
        },
        "initial_loss": {
            "expected": expected,
            "measured": initial,
            "is_plausible": None if initial is None else is_plausible(initial, expected),
        },
        "milestones": milestones(updates, evaluations),
        "throughput": throughput(updates, trainer.config.measure.warmup_updates),
        "last_process": {
            "segment": segment,
            "elapsed_s": elapsed_s,
            "peak_memory": peak_memory(trainer.hardware.device),
        },
        "weights_sha256": weights_sha256(trainer.model),
        "checkpoints": sorted(saved),
    }


def command_of(resolved: Resolved, runs_dir: Path) -> str:
    """The command that continues this run, as a person would type it."""
    words = ["python", "-m", "training_lab", "train", *resolved.arguments]
    return shlex.join([*words, *(["--runs", str(runs_dir)] if runs_dir != Path(".runs") else [])])
