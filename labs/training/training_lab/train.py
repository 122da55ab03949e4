"""The command `train`: find what to continue, assemble, train, and close the run's folder, whatever happens."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from training_lab import record
from training_lab.checkpoint import Checkpoint, list_checkpoints, newest_good, set_aside_damaged, weights_sha256
from training_lab.console import Console
from training_lab.data.dataset import Dataset, differences, prepare_dataset
from training_lab.data.tokenizers import decode
from training_lab.engine import NonFiniteError, Trainer, compile_trainer, make_trainer, train
from training_lab.errors import LabError, UserError
from training_lab.loss import Objective
from training_lab.measurement import milestones, peak_memory, throughput
from training_lab.memory import OutOfMemoryError, advice_when_out_of_memory
from training_lab.model import count_parameters, expected_initial_loss, is_plausible
from training_lab.optim import describe_groups
from training_lab.precision import choose_hardware
from training_lab.provenance import changed_files, describe_host, describe_source
from training_lab.record import RunFolder
from training_lab.resolve import Resolved
from training_lab.stopping import StopRequest
from training_lab.tracking import (
    MetricsWriter,
    Recorder,
    count_lines,
    count_processes,
    read_metrics,
    rows_of_kind,
)


class Continuation(NamedTuple):
    """Where a run goes on."""

    first_line: int
    """The first line of the metrics that is superseded."""
    damaged: list[str]
    """What is wrong with checkpoints that were passed over."""


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
    folder = None if is_new else find_unfinished(resolved, runs_dir, source)
    with contextlib.ExitStack() as held:
        held.enter_context(advice_when_out_of_memory(config))
        held.enter_context(console)
        checkpoint: Checkpoint | None = None
        damaged: list[str] = []
        if folder is not None:
            held.enter_context(folder.lock())
            if folder.state() == "finished":
                raise UserError(f"{folder.path}: another process has just finished it; start another run with --new")
            checkpoint, damaged = newest_good(folder.file(record.CHECKPOINTS))
        hardware = choose_hardware(config)
        with console.preparing(f"Preparing the text ({config.data.source}, {config.data.tokenizer})") as progress:
            dataset = prepare_dataset(config, progress)
            stats = dataset.stats(progress)
        trainer = make_trainer(config, hardware, dataset)
        continuation: Continuation | None = None
        if folder is None:
            folder = record.create_run(runs_dir, resolved.name)
            held.enter_context(folder.lock())
            write_beginning(folder, resolved, source, trainer, stats)
        else:
            check_same_data(folder, dataset.manifest)
            continuation = Continuation(restore(trainer, folder, checkpoint), damaged)
        if stop_after is not None and stop_after <= trainer.progress.update:
            raise UserError(f"--stop-after {stop_after}: the run is already at update {trainer.progress.update}")
        segment = 1 + count_processes(folder.file(record.METRICS))
        compiled = compile_trainer(trainer, console.warn)
        facts = {**describe_host(), **hardware.describe(), **trainer.kernels.describe(), **compiled}
        record_environment(folder, {"segment": segment, **facts}, console)
        return train_in_folder(trainer, folder, resolved, console, continuation, stats, segment, stop_after, started)


def train_in_folder(
    trainer: Trainer,
    folder: RunFolder,
    resolved: Resolved,
    console: Console,
    continuation: Continuation | None,
    stats: dict[str, Any],
    segment: int,
    stop_after: int | None,
    started: float,
) -> int:
    """Trains, and closes the folder however that ends. Returns the exit code."""
    command = command_of(resolved, folder.path.parent)
    folder.file(record.MANIFEST).unlink(missing_ok=True)
    with MetricsWriter(folder.file(record.METRICS)) as writer:
        folder.write_json(record.SUMMARY, summarise(trainer, folder, Outcome("running", 0, {}), segment, started))
        recorder = Recorder(writer, console.row)
        console.begin(opening(resolved, trainer, folder, continuation, stats), command)
        if continuation is None:
            recorder.event("start", segment=segment)
        else:
            update, line = trainer.progress.update, continuation.first_line
            recorder.event("resume", segment=segment, from_update=update, supersedes_from_line=line)
        outcome = train_to_outcome(trainer, folder, recorder, segment, stop_after)
        if outcome.failure:
            with contextlib.suppress(LabError):  # a full disk may take no more rows; the summary has it as well
                recorder.event("failure", state=outcome.state, message=outcome.failure["message"])
    summary = summarise(trainer, folder, outcome, segment, started)
    folder.write_json(record.SUMMARY, summary)
    folder.write_manifest()
    losses = [row["loss"] for row in rows_of_kind(read_metrics(folder.file(record.METRICS)), "update")]
    console.end(summary, losses, folder, command, example_prompt(trainer.dataset))
    if "traceback" in outcome.failure:
        print(outcome.failure["traceback"], file=sys.stderr)
    return outcome.exit_code


def train_to_outcome(
    trainer: Trainer, folder: RunFolder, recorder: Recorder, segment: int, stop_after: int | None
) -> Outcome:
    """Trains until the end, a stop or a failure, and says which."""
    with StopRequest() as stop:
        try:
            with advice_when_out_of_memory(trainer.config):
                state = train(trainer, folder, recorder, stop, segment, stop_after)
            recorder.sync()
        except NonFiniteError as error:
            return Outcome("failed: non-finite", 1, {"message": str(error), **error.facts})
        except OutOfMemoryError as error:
            return Outcome("failed: out of memory", 1, {"message": str(error)})
        except LabError as error:
            return Outcome("failed: error", 1, {"message": str(error)})
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            return Outcome("failed: error", 1, {"message": message, "traceback": traceback.format_exc()})
        return Outcome(state, stop.exit_code if state == "interrupted" else 0, {})


def find_unfinished(resolved: Resolved, runs_dir: Path, source: dict[str, Any]) -> RunFolder | None:
    """The newest run of this config, if it is unfinished. Raises an error rather than mixing code, or passing over a
    folder that may be the one."""
    for folder in record.list_runs(runs_dir):
        try:
            identity = folder.read_json(record.CONFIG, identity=str)["identity"]
        except LabError as error:
            if not folder.run_id.startswith(f"{resolved.name}-"):
                continue
            raise LabError(f"{error}; it may be the run to go on with: mend or remove it, or use --new") from error
        if identity != resolved.identity:
            continue
        state = folder.state()
        if state == "finished":
            return None
        if state == "running":
            raise UserError(
                f"{folder.path}: this config is being trained there now; wait for it, or start another with --new"
            )
        changes = changed_files(folder.read_json(record.SOURCE, files=dict), source)
        if changes:
            raise UserError(
                f"{folder.path}: is unfinished, but was trained by other code: {', '.join(changes[:5])}"
                f"{', …' if len(changes) > 5 else ''}; start afresh with --new, or go back to its code to continue it"
            )
        return folder
    return None


def check_same_data(folder: RunFolder, manifest: dict[str, Any]) -> None:
    """Refuses to continue on other data, and says what differs."""
    before = folder.read_json(record.DATA_MANIFEST, identity=str, source=dict)
    if before["identity"] != manifest["identity"]:
        found = "; ".join(differences(before, manifest)) or "the files are the same, their use differs"
        raise UserError(
            f"{folder.path}: its data have changed since: {found}; restore them, or start afresh with --new"
        )


def restore(trainer: Trainer, folder: RunFolder, checkpoint: Checkpoint | None) -> int:
    """Brings the trainer to the checkpoint (None: the run was killed before its first one).

    Returns the first line of the metrics that going on supersedes. Raises LabError if rows before it are lost.
    """
    set_aside_damaged(folder.file(record.CHECKPOINTS), checkpoint)
    if checkpoint is None:
        return 0
    trainer.restore(checkpoint.load())
    rows = rows_of_kind(read_metrics(folder.file(record.METRICS)), "update")
    lost = sorted(set(range(1, checkpoint.update + 1)) - {row["update"] for row in rows})
    first_line: int = checkpoint.describe()["metrics_lines"]
    if lost or count_lines(folder.file(record.METRICS)) < first_line:
        first_lost = lost[0] if lost else checkpoint.update
        raise LabError(
            f"{folder.file(record.METRICS)}: rows are lost, among them update {first_lost}: the record would have "
            "a gap; start afresh with --new"
        )
    return first_line


def write_beginning(
    folder: RunFolder, resolved: Resolved, source: dict[str, Any], trainer: Trainer, stats: dict[str, Any]
) -> None:
    """Writes what is known before the first update; the config last, because with it the folder is a run."""
    folder.write_json(record.SOURCE, source)
    folder.write_json(record.DATA_MANIFEST, trainer.dataset.manifest)
    folder.write_json(record.DATA_STATS, stats)
    model = {
        "parameters": count_parameters(trainer.model),
        "optimizer_groups": describe_groups(trainer.model, trainer.config.optimizer),
        "initial_weights_sha256": weights_sha256(trainer.model),
    }
    folder.write_json(record.CONFIG, {**resolved.record(), "model": model})


def record_environment(folder: RunFolder, environment: dict[str, Any], console: Console) -> None:
    """Adds what this process runs in and on, and says where it differs from the process before it."""
    known: list[Any] = []
    if folder.file(record.ENVIRONMENT).exists():
        known = folder.read_json(record.ENVIRONMENT, processes=list)["processes"]
    before = known[-1] if known and isinstance(known[-1], dict) else environment
    changed = sorted(key for key in {*before, *environment} - {"segment"} if before.get(key) != environment.get(key))
    if changed:
        console.warn(
            f"this process differs from the last in {', '.join(changed)} (see {record.ENVIRONMENT}): "
            "the run may not be bit-identical to one that was never stopped"
        )
    folder.write_json(record.ENVIRONMENT, {"processes": [*known, environment]})


def opening(
    resolved: Resolved, trainer: Trainer, folder: RunFolder, continuation: Continuation | None, stats: dict[str, Any]
) -> dict[str, Any]:
    """What is shown before the first update."""
    config, dataset, manifest = trainer.config, trainer.dataset, trainer.dataset.manifest
    return {
        "run": folder.run_id,
        "folder": str(folder.path),
        "config": resolved.name,
        "purpose": config.purpose,
        "continues_after_update": trainer.progress.update if continuation else None,
        "damaged_checkpoints": continuation.damaged if continuation else [],
        "warnings": [*resolved.warnings(), *dataset.warnings()],
        "parameters": count_parameters(trainer.model),
        "vocab_size": dataset.tokenizer.vocab_size,
        "source": config.data.source,
        "tokenizer": config.data.tokenizer,
        "packing": stats["packing"],
        "train_tokens": manifest["split"]["train"]["tokens"],
        "train_documents": manifest["split"]["train"]["documents"],
        "val_target_tokens": manifest["validation"]["target_tokens"],
        "updates": config.train.updates,
        "tokens_per_update": config.batch.update_tokens,
        "expected_initial_loss": expected_initial_loss(dataset.tokenizer.vocab_size, config.model.d_model),
        "checkpoint_every": config.checkpoint.every,
        **trainer.hardware.describe(),
        **trainer.kernels.describe(),
    }


def summarise(trainer: Trainer, folder: RunFolder, outcome: Outcome, segment: int, started: float) -> dict[str, Any]:
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
            "definition": loss_definition(trainer.objective),
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
            "elapsed_s": time.monotonic() - started,
            "peak_memory": peak_memory(trainer.hardware.device),
        },
        "weights_sha256": weights_sha256(trainer.model),
        "checkpoints": sorted(saved),
    }


def loss_definition(objective: Objective) -> str:
    """What the training loss is, in words."""
    terms = [f"label smoothing {objective.label_smoothing:g}"] if objective.label_smoothing else []
    terms += [f"z-loss {objective.z_loss:g}"] if objective.z_loss else []
    with_terms = f", with {' and '.join(terms)}" if terms else ""
    return f"mean cross-entropy{with_terms} over the target tokens of an update, in nats"


def example_prompt(dataset: Dataset) -> str:
    """A word of the validation text, as something to let the model go on with: its tokenizer knows it."""
    validation = dataset.validation.stream
    words = decode(dataset.tokenizer, validation.take(np.arange(min(512, validation.size))).tolist()).split()
    return next((word for word in words if word.isalpha() and len(word) > 2), "the")


def command_of(resolved: Resolved, runs_dir: Path) -> str:
    """The command that continues this run, as a person would type it."""
    words = ["python", "-m", "training_lab", "train", *resolved.arguments]
    return shlex.join([*words, *(["--runs", str(runs_dir)] if runs_dir != Path(".runs") else [])])
