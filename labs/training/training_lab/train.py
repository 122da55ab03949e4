"""The command `train`: find what to continue, assemble, train, and close the run's folder, whatever happens."""

from __future__ import annotations

import contextlib
import datetime
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiment_runner.durable import write_atomically
from training_lab import record
from training_lab.beginning import (
    check_same_beginning,
    check_same_data,
    find_unfinished,
    first_superseded,
    is_finished,
    record_environment,
    restore,
    take_first_weights,
    write_beginning,
)
from training_lab.checkpoint import Checkpoint, newest_good, weights_sha256
from training_lab.config import Config, TrackingConfig
from training_lab.console import Console
from training_lab.copies import Copier
from training_lab.csv_export import metrics_table
from training_lab.data.dataset import Dataset, prepare_dataset
from training_lab.data.tokenizers import decode
from training_lab.distributed import Processes, first_line, is_lost_connection, joined
from training_lab.engine import NonFiniteError, Process, compile_trainer, observe, train
from training_lab.errors import LabError, UserError
from training_lab.footprint import micro_batch_tokens, share_out
from training_lab.identity import identity_of
from training_lab.kernels import choose_kernels
from training_lab.memory import OutOfMemoryError, advice_when_out_of_memory
from training_lab.memory_peaks import PeakMemory
from training_lab.mirrors.handle import Mirrors, need_mirrors, start_mirrors
from training_lab.mirrors.mode import WandbChoice, choose_wandb
from training_lab.model import count_parameters, expected_initial_loss
from training_lab.observation import Observation
from training_lab.parallel import is_sharded
from training_lab.precision import Hardware, choose_hardware
from training_lab.prediction import need_memory
from training_lab.probe import measure_matmul_rate
from training_lab.provenance import describe_host, describe_source
from training_lab.record import RunFolder
from training_lab.report import write_report
from training_lab.resolve import Resolved
from training_lab.resuming import changed_config, resume
from training_lab.stopping import StopRequest
from training_lab.storage import need_copies
from training_lab.summary import Outcome, end_of_process, summarise
from training_lab.tracking import (
    MetricsWriter,
    Recorder,
    Unrecorded,
    count_processes,
    read_metrics,
    rows_of_kind,
)
from training_lab.trainer import Trainer, make_trainer
from training_lab.wall_clock import WallClock


class Continuation(NamedTuple):
    """Where a run goes on."""

    first_line: int
    """The first line of the metrics that is superseded."""
    damaged: list[str]
    """What is wrong with checkpoints that were passed over."""


class Begun(NamedTuple):
    """What a process knows before its first update."""

    continuation: Continuation | None
    """Where the run goes on; None for one that begins."""
    stats: dict[str, Any]
    """The figures of the data."""
    segment: int
    stop_after: int | None
    clock: WallClock
    peaks: PeakMemory
    wandb: WandbChoice


def run_training(
    resolved: Resolved, runs_dir: Path, console: Console, is_new: bool, stop_after: int | None, clock: WallClock,
    run_id: str | None = None,
) -> int:  # fmt: skip
    """Trains the config to its end, going on with an unfinished run of it; a new one may be given its id. Returns the
    exit code. Where torchrun started several processes, the first keeps the record and the others follow it."""
    with joined(os.environ) as processes:
        return run_shared(processes, resolved, runs_dir, console, is_new, stop_after, clock, run_id)


def resume_training(
    text: str, overrides: Sequence[str], runs_dir: Path, console: Console, stop_after: int | None, clock: WallClock
) -> int:
    """Goes on with the run that `text` names, or the copy at that address. Returns the exit code."""
    with joined(os.environ) as processes:
        found = processes.from_first("resumes", lambda: str(resume(text, overrides, runs_dir, console).path.absolute()))
        folder = RunFolder(Path(found))
        resolved = changed_config(folder, overrides)
        runs_dir = runs_dir if folder.path.parent == runs_dir.absolute() else folder.path.parent
        return run_shared(processes, resolved, runs_dir, console, False, stop_after, clock, folder.run_id)


def run_shared(
    processes: Processes, resolved: Resolved, runs_dir: Path, console: Console, is_new: bool, stop_after: int | None,
    clock: WallClock, run_id: str | None,
) -> int:  # fmt: skip
    """What this process has to do in a run. Returns its exit code."""
    updates = resolved.config.train.updates
    if stop_after is not None and not 0 < stop_after <= updates:
        raise UserError(f"--stop-after {stop_after}: must be from 1 to train.updates = {updates}")
    config = share_out(resolved.config, processes.world_size)
    if not processes.is_first:
        return follow(config, processes, stop_after, clock)
    return lead(config, processes, resolved, runs_dir, console, is_new, stop_after, clock, run_id)


def lead(
    config: Config, processes: Processes, resolved: Resolved, runs_dir: Path, console: Console, is_new: bool,
    stop_after: int | None, clock: WallClock, run_id: str | None,
) -> int:  # fmt: skip
    """The part of the first process, or of the only one: it keeps the run's folder."""
    choice = choose_wandb(config.tracking, os.environ)
    need_mirrors(config.tracking)
    if config.checkpoint.copy_to:
        for message in need_copies(config.checkpoint.copy_to):
            console.warn(message)
    source = describe_source()
    folder = None if is_new else find_unfinished(resolved, runs_dir, source, run_id)
    with contextlib.ExitStack() as held:
        held.enter_context(advice_when_out_of_memory(config))
        held.enter_context(console)
        checkpoint: Checkpoint | None = None
        damaged: list[str] = []
        if folder is not None:
            held.enter_context(folder.lock())
            if is_finished(folder, config.train.updates):
                raise UserError(f"{folder.path}: another process has just finished it; start another run with --new")
            checkpoint, damaged = newest_good(folder.file(record.CHECKPOINTS))
        console.note(f"W&B: {choice.mode} ({choice.reason})")
        hardware = choose_hardware(config, processes)
        peaks = PeakMemory(hardware.device)
        with clock.part("data"), console.preparing(preparing(config)) as progress:
            dataset = prepare_dataset(config, progress)
            stats = dataset.stats(progress)
        need_memory(config, dataset.tokenizer.vocab_size, hardware, choose_kernels(config, hardware))
        trainer, initial_sha256 = assemble(config, hardware, dataset, processes, source, runs_dir)
        if folder is not None:
            check_same_data(folder, dataset.manifest)
        at_update = checkpoint.update if checkpoint else 0
        if stop_after is not None and stop_after <= at_update:
            raise UserError(f"--stop-after {stop_after}: the run is already at update {at_update}")
        continuation: Continuation | None = None
        if folder is None:
            folder = record.create_run(runs_dir, resolved.name, run_id)
            held.enter_context(folder.lock())
            write_beginning(folder, resolved, source, trainer, stats, initial_sha256)
        else:
            continuation = Continuation(first_superseded(folder, checkpoint), damaged)
            if checkpoint is None:
                check_same_beginning(folder, initial_sha256)
        place = str(folder.path.resolve())
        processes.from_first("begins", lambda: (place, checkpoint is not None))
        if checkpoint is not None:
            restore(trainer, checkpoint)
        segment = 1 + count_processes(folder.file(record.METRICS))
        compiled = compile_trainer(trainer, console.warn)
        facts = {**describe_host(), **hardware.describe(), **trainer.kernels.describe(), **compiled}
        record_environment(folder, {"segment": segment, **facts, **describe_sharing(trainer)}, console)
        begun = Begun(continuation, stats, segment, stop_after, clock, peaks, choice)
        return train_in_folder(trainer, folder, resolved, console, begun)


def follow(config: Config, processes: Processes, stop_after: int | None, clock: WallClock) -> int:
    """The part of every other process: it trains its share, and writes nothing."""
    with advice_when_out_of_memory(config):
        hardware = choose_hardware(config, processes)
        peaks = PeakMemory(hardware.device)
        dataset = prepare_dataset(config)
        trainer, _ = assemble(config, hardware, dataset, processes, describe_source(), Path())
        path, goes_on = processes.from_first("begins", lambda: ("", False))
        folder = RunFolder(Path(path))
        if is_sharded(trainer.shared) and not folder.file(record.CONFIG).exists():
            raise UserError(
                f"{path}: not seen by process {processes.rank}: with train.parallel=fsdp each process saves its own "
                "parts, so give --runs a folder on a disk that all machines share"
            )
        if goes_on:
            restore(trainer, None)
        compile_trainer(trainer, lambda message: None)
        recorder = Unrecorded()
        with StopRequest() as stop:
            observation = Observation({}, folder, recorder, trainer.phases, hardware.device, trainer.held)
            process = Process(0, stop_after, recorder, stop, clock, peaks, observation)
            outcome = train_to_outcome(trainer, folder, process)
    if outcome.failure:
        print(f"process {processes.rank}: {outcome.failure['message']}", file=sys.stderr)
    return outcome.exit_code


def assemble(
    config: Config, hardware: Hardware, dataset: Dataset, processes: Processes, source: dict[str, Any], runs_dir: Path
) -> tuple[Trainer, str]:
    """The trainer of this process, before the first update, and the hash of its weights. Raises UserError if the
    processes have not the same code, data or weights."""
    processes.need_same("code", identity_of(source["files"]))
    processes.need_same("data", dataset.manifest["identity"])
    processes.form_group(hardware.device)
    trainer = make_trainer(config, hardware, dataset, processes)
    take_first_weights(trainer, runs_dir)
    initial_sha256 = weights_sha256(trainer.model)
    processes.need_same("initial weights", initial_sha256)
    return trainer, initial_sha256


def describe_sharing(trainer: Trainer) -> dict[str, Any]:
    """What the record says of how an update is shared."""
    parallel = trainer.config.train.parallel if trainer.processes.are_several else None
    return {**trainer.processes.describe(), "parallel": parallel, "micro_batches": trainer.config.batch.micro_batches}


def preparing(config: Config) -> str:
    """What is being done before the first update, in words."""
    return f"Preparing the text ({config.data.source}, {config.data.tokenizer})"


def train_in_folder(trainer: Trainer, folder: RunFolder, resolved: Resolved, console: Console, begun: Begun) -> int:
    """Trains, and closes the folder however that ends. Returns the exit code."""
    command = command_of(resolved, folder.path.parent, trainer.processes)
    folder.file(record.MANIFEST).unlink(missing_ok=True)
    with MetricsWriter(folder.file(record.METRICS)) as writer, StopRequest() as stop:
        recorder = Recorder(writer, console.row)
        observation = observe(trainer, folder, recorder)
        copy_to = trainer.config.checkpoint.copy_to
        copier = Copier(folder, copy_to) if copy_to else None
        process = Process(
            begun.segment, begun.stop_after, recorder, stop, begun.clock, begun.peaks, observation, copier
        )
        folder.write_json(record.SUMMARY, summarise(trainer, folder, Outcome("running", 0, {}), process, None))
        console.begin(opening(resolved, trainer, folder, begun), command)
        facts = {"segment": begun.segment, "utc": utc_now()}
        if begun.continuation is None:
            recorder.event("start", **facts)
        else:
            update, line = trainer.progress.update, begun.continuation.first_line
            recorder.event("resume", from_update=update, supersedes_from_line=line, **facts)
        mirrors = start_mirrors(folder, trainer.config.tracking, begun.wandb)
        begun.clock.switch("other")
        outcome = train_to_outcome(trainer, folder, process)
        if copier is not None:
            copier.wait(trainer.config.checkpoint.copy_wait_s)
        probe = probe_device(trainer, process, outcome)
        summary = summarise(trainer, folder, outcome, process, probe)
        folder.write_json(record.SUMMARY, summary)
        with contextlib.suppress(LabError):  # a full disk may take no more rows; the summary has it as well
            for news in copier.news() if copier else []:
                recorder.event(**news)
            if outcome.failure:
                recorder.event("failure", state=outcome.state, message=outcome.failure["message"])
            recorder.event("end", utc=utc_now(), **end_of_process(process))
            recorder.sync()
    warnings = close_folder(folder, trainer.config.tracking, mirrors)
    warnings += copier.close(trainer.config.checkpoint.copy_wait_s) if copier else []
    losses = [row["loss"] for row in rows_of_kind(read_metrics(folder.file(record.METRICS)), "update")]
    console.end(summary, losses, folder, command, example_prompt(trainer.dataset))
    for message in warnings:
        console.warn(message)
    if "traceback" in outcome.failure:
        print(outcome.failure["traceback"], file=sys.stderr)
    return outcome.exit_code


def close_folder(folder: RunFolder, tracking: TrackingConfig, mirrors: Mirrors) -> list[str]:
    """Waits for the mirrors, makes what is made of the metrics, and writes the manifest. Returns what went wrong: the
    training is done, and is not spoiled by any of it."""
    warnings: list[str] = []
    with noting_errors(warnings):
        unmirrored = mirrors.close(tracking.timeout_s)
        warnings += [unmirrored] if unmirrored else []
    with noting_errors(warnings):
        if tracking.csv:
            write_atomically(folder.file(record.CSV), metrics_table(folder).encode("utf-8"))
    folder.write_manifest()
    with noting_errors(warnings):
        if tracking.report:
            write_report(folder)
    return warnings


@contextlib.contextmanager
def noting_errors(warnings: list[str]) -> Iterator[None]:
    """Turns an error into a warning."""
    try:
        yield
    except LabError as error:
        warnings.append(str(error))


def train_to_outcome(trainer: Trainer, folder: RunFolder, process: Process) -> Outcome:
    """Trains until the end, a stop or a failure, and says which."""
    try:
        with advice_when_out_of_memory(trainer.config):
            state = train(trainer, folder, process)
        process.recorder.sync()
    except NonFiniteError as error:  # the same in every process
        return Outcome("failed: non-finite", 1, {"message": str(error), **error.facts})
    except OutOfMemoryError as error:
        trainer.processes.tell_failure(str(error))
        return Outcome("failed: out of memory", 1, {"message": str(error)})
    except LabError as error:
        trainer.processes.tell_failure(str(error))
        return Outcome("failed: error", 1, {"message": str(error)})
    except Exception as error:
        return unforeseen(error, trainer.processes)
    return Outcome(state, process.stop.exit_code if state == "interrupted" else 0, {})


def unforeseen(error: Exception, processes: Processes) -> Outcome:
    """The outcome of an error that nobody expects: in one of several processes mostly that another one has ended."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, RuntimeError) and processes.are_several:
        elsewhere = processes.failure_elsewhere()
        if elsewhere is not None:
            return Outcome("failed: error", 1, {"message": f"ended because another process failed: {elsewhere}"})
        if is_lost_connection(error):
            gone = "another process of the run is gone: it was killed, or its machine is lost"
            return Outcome("failed: error", 1, {"message": f"{gone} ({first_line(error)}); the same command goes on"})
    processes.tell_failure(message)
    return Outcome("failed: error", 1, {"message": message, "traceback": traceback.format_exc()})


def probe_device(trainer: Trainer, process: Process, outcome: Outcome) -> dict[str, Any] | None:
    """The rate of matrix products here, where the config asks for it and the run is finished: nothing is trained
    after it."""
    config = trainer.config
    if not config.measure.matmul_probe or outcome.state != "finished":
        return None
    with process.clock.part("profile"):
        try:
            return measure_matmul_rate(trainer.hardware, micro_batch_tokens(config), config.model.d_model)
        except Exception as error:  # out of memory, above all: the run is finished, and stays so
            message = f"{type(error).__name__}: {error}"
            process.recorder.event("not recorded", path="the rate of matrix products", message=message)
            return None


def utc_now() -> str:
    """The time, as ISO 8601 in UTC to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def opening(resolved: Resolved, trainer: Trainer, folder: RunFolder, begun: Begun) -> dict[str, Any]:
    """What is shown before the first update."""
    continuation = begun.continuation
    config, dataset, manifest = trainer.config, trainer.dataset, trainer.dataset.manifest
    mirrored = {"wandb": begun.wandb.mode, "wandb_reason": begun.wandb.reason, "wandb_project": begun.wandb.project}
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
        "packing": begun.stats["packing"],
        "train_tokens": manifest["split"]["train"]["tokens"],
        "train_documents": manifest["split"]["train"]["documents"],
        "val_target_tokens": manifest["validation"]["target_tokens"],
        "updates": config.train.updates,
        "tokens_per_update": config.batch.update_tokens,
        "expected_initial_loss": expected_initial_loss(dataset.tokenizer.vocab_size, config.model.d_model),
        "checkpoint_every": config.checkpoint.every,
        **mirrored,
        **trainer.hardware.describe(),
        **trainer.kernels.describe(),
        **describe_sharing(trainer),
    }


def example_prompt(dataset: Dataset) -> str:
    """A word of the validation text, as something to let the model go on with: its tokenizer knows it."""
    validation = dataset.validation.stream
    words = decode(dataset.tokenizer, validation.take(np.arange(min(512, validation.size))).tolist()).split()
    return next((word for word in words if word.isalpha() and len(word) > 2), "the")


def command_of(resolved: Resolved, runs_dir: Path, processes: Processes) -> str:
    """The command that continues this run, as a person would type it."""
    launcher = ["python"]
    if processes.are_several:
        machines = processes.world_size // processes.local_world_size
        launcher = ["torchrun", f"--nproc-per-node={processes.local_world_size}"]
        launcher += [f"--nnodes={machines}"] if machines > 1 else ["--standalone"]
    words = [*launcher, "-m", "training_lab", "train", *resolved.arguments]
    return shlex.join([*words, *(["--runs", str(runs_dir)] if runs_dir != Path(".runs") else [])])
