"""The training loop, whole and in view: take a batch, move it, forward, backward, clip, step, record, evaluate, save.

`update = k` means k completed updates. Everything that an update reads or changes is in a `Trainer`; everything that
observes it receives finished values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from training_lab.checkpoint import weights_sha256
from training_lab.config import Config
from training_lab.copies import Copier
from training_lab.data.batches import Batch, UpdateData
from training_lab.data.dataset import Dataset
from training_lab.data.layout import Pieces
from training_lab.data.reading_ahead import ReadingAhead
from training_lab.errors import LabError
from training_lab.evaluate import evaluate
from training_lab.kernels import compile_body
from training_lab.memory_peaks import PeakMemory
from training_lab.model import expected_initial_loss, is_plausible
from training_lab.observation import Observation, plan_observation
from training_lab.optim import set_rates
from training_lab.parallel import (
    backward_alone,
    in_turn,
    is_sharded,
    keep_parts_only,
    own_share,
    part_of,
    whole_of,
)
from training_lab.randomness import global_streams, restore_global_streams, seed_global_streams
from training_lab.record import MEMORY_EVENTS, TIMELINE, RunFolder
from training_lab.saving import Saver
from training_lab.schedule import learning_rate, muon_momentum
from training_lab.stopping import StopRequest
from training_lab.tracking import Recorder, Row
from training_lab.trainer import Trainer
from training_lab.wall_clock import Span, WallClock


class NonFiniteError(LabError):
    """A loss or gradient that is not a number. Nothing was changed by the update that made it."""

    def __init__(self, message: str, facts: dict[str, Any]) -> None:
        super().__init__(message)
        self.facts = facts


@dataclass
class Process:
    """One process's part in a run: what surrounds its updates. It observes, and changes nothing."""

    segment: int
    """Which process of the run it is, from 1."""
    stop_after: int | None
    """The update after which it ends, if it was told to."""
    recorder: Recorder
    stop: StopRequest
    clock: WallClock
    peaks: PeakMemory
    observation: Observation
    copier: Copier | None = None

    @contextlib.contextmanager
    def part(self, name: str, scope: str) -> Iterator[Span]:
        """Gives the time of what is done in it to a part of the wall clock, its memory to a scope."""
        with self.clock.part(name) as span, self.peaks.scope(scope):
            yield span


def observe(trainer: Trainer, folder: RunFolder, recorder: Recorder) -> Observation:
    """The observation that the config asks for, of a process that goes on where the trainer is."""
    first, last = trainer.progress.update + 1, trainer.config.train.updates
    is_there = (folder.file(name).exists() for name in (TIMELINE, MEMORY_EVENTS))
    plan = plan_observation(trainer.config.measure, first, last, *is_there)
    return Observation(plan, folder, recorder, trainer.phases, trainer.hardware.device, trainer.held)


def compile_trainer(trainer: Trainer, warn: Callable[[str], None]) -> dict[str, Any]:
    """Compiles the model if that was chosen, and returns what the record says. No batch is consumed, and no random
    number: it is tried on a micro-batch of the next update, which is read again when its turn comes."""
    if not trainer.kernels.compile:
        return {"compile_state": "off"}
    update = min(trainer.progress.update + 1, trainer.config.train.updates)
    data = trainer.dataset.update_data(update)
    device = trainer.hardware.device
    micro_batch = next((one for one in data.micro_batches if one.num_target_tokens), data.micro_batches[0])

    def try_update() -> None:
        streams = global_streams(device)
        try:
            with backward_alone(trainer.shared):
                forward_backward(trainer, micro_batch.to(device), max(1, data.num_target_tokens))
            trainer.hardware.synchronise()
        finally:
            trainer.model.zero_grad(set_to_none=True)
            restore_global_streams(streams, device)

    facts = compile_body(trainer.model, try_update, trainer.config.kernels.compile == "on", warn)
    is_active = facts["compile_state"] == "active"
    if trainer.processes.maximum(not is_active) and is_active:  # all compute with the same kernels, or none does
        trainer.model.compiled_body = None
        return {"compile_state": "requested, not active", "compile_failure": "it failed in another process"}
    return facts


def train(trainer: Trainer, folder: RunFolder, process: Process) -> str:
    """Trains to the end of the config, or until it is told to stop. Returns the state in which the run is left.

    Raises NonFiniteError before an optimizer step with a loss or gradient that is not a number.
    """
    config, progress, recorder = trainer.config, trainer.progress, process.recorder
    is_in_parts = is_sharded(trainer.shared)
    saver = Saver(folder, config.checkpoint, progress.update, trainer.processes, is_in_parts, process.copier)
    with ReadingAhead(trainer.dataset, config.train.updates) as reader, process.observation as observation, saver:
        is_stop = process.stop.agree(trainer.processes.maximum)
        while True:
            is_last = progress.update == config.train.updates
            if is_due(config.eval.every, progress.update, is_last) and (is_last or not is_stop):
                with process.part("evaluation", "evaluation"):
                    measure(trainer, recorder)
                is_stop = is_stop or process.stop.agree(trainer.processes.maximum)
            is_best = config.checkpoint.keep_best and progress.best_update == progress.update > 0
            if is_last or is_stop or is_best or is_due(config.checkpoint.every, progress.update, is_last):
                with process.part("checkpoint", "checkpoint"):
                    save(trainer, saver, recorder, is_awaited=is_last or is_stop)
            for facts in saver.news():
                recorder.event(**facts)
            if is_last:
                return "finished"
            if is_stop:
                return process.stop.state()
            update = progress.update + 1
            with process.clock.part("profile"), observation.of(update) as observed:
                with process.part("update", "observed updates" if observed else "updates") as span:
                    row = train_update(trainer, reader.take)
                    is_stop = process.stop.agree(trainer.processes.maximum) or update == process.stop_after
                    if is_stop or observation.is_edge(update) or is_interrupted(config, update):
                        trainer.hardware.synchronise()  # no work of this update runs into what comes between
                row |= {"seconds": span.seconds, "memory_bytes": process.peaks.now(), **observed}
            recorder.log({**row, "segment": process.segment})


def is_interrupted(config: Config, update: int) -> bool:
    """Whether something comes between an update and the next."""
    is_last = update == config.train.updates
    return is_due(config.eval.every, update, is_last) or is_due(config.checkpoint.every, update, is_last)


def is_due(every: int, update: int, is_last: bool) -> bool:
    """Whether something that happens every so many updates (0: only first and last) happens after this one."""
    return is_last or update == 0 or (every > 0 and update % every == 0)


def train_update(trainer: Trainer, read: Callable[[int], UpdateData] | None = None) -> Row:
    """Makes one update, on what `read` (by default the dataset) gives for its number, and returns its row.

    Raises NonFiniteError instead of stepping on what is not a number.
    """
    config, optimizers, scaler, phases = trainer.config, trainer.optimizers, trainer.scaler, trainer.phases
    update = trainer.progress.update + 1

    with phases("batch"):
        data = (read or trainer.dataset.update_data)(update)
    num_targets = data.num_target_tokens
    if num_targets == 0:
        raise LabError(
            f"update {update}: has no token to predict: each of its {len(data.pieces.lengths)} pieces is one token "
            f"long, of {name_documents(trainer.dataset, data.pieces)}; leave such documents out, or raise the size of "
            "the batch"
        )

    lr = learning_rate(config, update)
    set_rates(optimizers, lr, muon_momentum(config, update))
    with phases("zero_grad"):
        trainer.model.zero_grad(set_to_none=True)
    losses = []
    own = own_share(data.micro_batches, trainer.processes)
    for number, micro_batch in enumerate(own, start=1):
        with phases("transfer"):
            there = micro_batch.to(trainer.hardware.device)
        is_last = number == len(own)
        with contextlib.nullcontext() if is_last else backward_alone(trainer.shared):
            seed_dropout(trainer, update, number)
            losses.append(forward_backward(trainer, there, num_targets, is_last))

    with phases("clip"):
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        max_norm = config.optimizer.grad_clip or math.inf
        grad_norm = whole_of(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), max_norm)).item()
        own_losses = [loss.item() for loss in losses]
        micro_losses = in_turn(trainer.processes.gather(own_losses), len(data.micro_batches))
    # An overflow of scaled FP16 gradients is no failure: the step is skipped and the scale lowered.
    is_overflow = not math.isfinite(grad_norm) and scaler.get_scale() > 1 and has_overflow(trainer)
    refuse_non_finite(trainer, update, data, micro_losses, 0.0 if is_overflow else grad_norm, lr)
    with phases("optimizer"):
        if not is_overflow:  # the scaler would skip those optimizers alone whose own gradients overflowed
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()

    trainer.progress.update = update
    trainer.progress.target_tokens += num_targets
    return {
        "kind": "update",
        "update": update,
        "loss": math.fsum(micro_losses),
        "lr": lr,
        "grad_norm": None if is_overflow else grad_norm,
        "target_tokens": num_targets,
        "input_tokens": int(data.pieces.lengths.sum()),
        "sum_of_squared_lengths": int((data.attended.astype("int64") ** 2).sum()),
        "batch_sha256": data.sha256,
    }


def seed_dropout(trainer: Trainer, update: int, number: int) -> None:
    """Gives a micro-batch a random stream of its own, so that what is dropped depends on neither the processes nor on
    what ran before."""
    if trainer.config.model.dropout:
        place = (number - 1) * trainer.processes.world_size + trainer.processes.rank
        seed_global_streams(trainer.config.train.seed, update, place)


def forward_backward(trainer: Trainer, micro_batch: Batch, num_targets: int, is_last: bool = False) -> torch.Tensor:
    """Adds a micro-batch's gradient. Returns its share of the update's loss: its sum over the update's targets."""
    is_joint = trainer.processes.are_several and (is_last or is_sharded(trainer.shared))
    if micro_batch.num_target_tokens == 0 and not is_joint:
        return torch.zeros(())
    with trainer.phases("forward"), trainer.hardware.autocast():
        loss: torch.Tensor = trainer.shared(micro_batch, trainer.objective) / num_targets
    with trainer.phases("backward"):
        trainer.scaler.scale(loss).backward()
    return loss.detach()


def refuse_non_finite(
    trainer: Trainer, update: int, data: UpdateData, micro_losses: list[float], grad_norm: float, lr: float
) -> None:
    """Raises NonFiniteError if a loss or the gradient is not a number, with where it came from."""
    broken = [number for number, loss in enumerate(micro_losses) if not math.isfinite(loss)]
    if not broken and math.isfinite(grad_norm):
        return
    pieces = data.parts[broken[0]] if broken else data.pieces
    documents = name_documents(trainer.dataset, pieces)
    facts = {
        "update": update,
        "micro_batch": broken[0] + 1 if broken else None,
        "num_micro_batches": len(data.parts),
        "loss": str(micro_losses[broken[0]] if broken else math.fsum(micro_losses)),
        "grad_norm": str(grad_norm),
        "lr": lr,
        "documents": documents,
    }
    place = f"micro-batch {facts['micro_batch']} of {len(data.parts)}" if broken else "its gradient"
    raise NonFiniteError(
        f"update {update}: not finite in {place}: loss {facts['loss']}, grad_norm {grad_norm}, lr {lr:.3g}; documents: "
        f"{documents}. The optimizer step was not made. "
        "Lower optimizer.max_lr, lengthen schedule.warmup_updates, or look at the documents.",
        facts,
    )


def has_overflow(trainer: Trainer) -> bool:
    """Whether the loss scaler sees gradients that are not finite, and so will skip the step."""
    if not trainer.scaler.is_enabled():
        return False
    gradients = (parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None)
    is_finite = all(bool(part_of(gradient).isfinite().all()) for gradient in gradients)
    return trainer.processes.maximum(not is_finite) > 0


def name_documents(dataset: Dataset, pieces: Pieces, at_most: int = 5) -> str:
    """The names of the documents that some pieces come from, for a message."""
    names: dict[str, None] = {}
    for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        names.update(dict.fromkeys(dataset.train.documents_between(start, start + length)))
    return ", ".join(list(names)[:at_most]) + (f" and {len(names) - at_most} more" if len(names) > at_most else "")


def measure(trainer: Trainer, recorder: Recorder) -> None:
    """Measures the validation loss after the present update, once."""
    progress, config = trainer.progress, trainer.config
    if progress.evaluated_update == progress.update:
        return
    validation, batch_tokens = trainer.dataset.validation, config.eval.batch_tokens
    result = evaluate(trainer.whole, validation, trainer.hardware, batch_tokens, trainer.processes)
    keep_parts_only(trainer.shared)
    progress.evaluated_update, progress.val_loss = progress.update, result.loss
    if result.loss < progress.best_val_loss:
        progress.best_update, progress.best_val_loss = progress.update, result.loss
    recorder.log(
        {
            "kind": "evaluation",
            "update": progress.update,
            "val_loss": result.loss if math.isfinite(result.loss) else None,
            "target_tokens": result.target_tokens,
            "seconds": result.seconds,
        }
    )
    expected = expected_initial_loss(trainer.dataset.tokenizer.vocab_size, config.model.d_model)
    if progress.update == 0 and not is_plausible(result.loss, expected):
        recorder.event("implausible initial loss", measured=str(result.loss), expected=expected)


def save(trainer: Trainer, saver: Saver, recorder: Recorder, is_awaited: bool) -> None:
    """Begins to save the present state, unless that was done already; waits for it if `is_awaited`.

    The rows so far reach the disk first, so that a checkpoint never knows of an update that the metrics do not.
    """
    progress, is_in_parts = trainer.progress, is_sharded(trainer.shared)
    if saver.saved_update != progress.update and (trainer.processes.is_first or is_in_parts):
        is_measured = progress.evaluated_update == progress.update and math.isfinite(progress.val_loss)
        val_loss = progress.val_loss if is_measured else None
        facts: dict[str, Any] = {"metrics_lines": recorder.sync(), "val_loss": val_loss}
        if is_in_parts:
            trainer.hashed = (progress.update, weights_sha256(trainer.model))
            facts["weights_sha256"] = trainer.hashed[1]
        best = progress.best_update if trainer.config.checkpoint.keep_best else None
        saver.save(progress.update, trainer.state(), facts, best)
    if is_awaited:
        saver.wait()
