"""What a run is made of: one frozen dataclass a concern, a line of meaning under each field.

A config file writes only what it changes; `resolve.py` reads files, fills in the rest and records where each
value came from. The checks that a value must pass stand beside it here: the range in its declaration, and what it
must agree with in its class's `problems`. Standard library only, Python 3.9.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from training_lab.config_data import BatchConfig, DataConfig
from training_lab.config_remote import RemoteConfig
from training_lab.settings import Problem, derived, setting


@dataclass(frozen=True)
class ModelConfig:
    """The decoder's size."""

    num_layers: int = setting(6, at_least=1, at_most=10_000)
    """Transformer blocks."""
    d_model: int = setting(256, at_least=1, at_most=1 << 20)
    """Width of the residual stream."""
    num_heads: int = setting(4, at_least=1, at_most=1 << 20)
    """Attention heads; they share the width evenly."""
    max_positions: int = setting(256, at_least=2)
    """Longest piece of text that the model can see at once, in tokens."""
    dropout: float = setting(0.0, at_least=0.0, below=1.0)
    """Share of activations dropped in training, in the embedding, the attention and both residual branches."""

    def problems(self) -> Iterator[Problem]:
        if self.d_model % self.num_heads:
            divisors = (heads for heads in range(1, self.d_model + 1) if self.d_model % heads == 0)
            best = min(divisors, key=lambda heads: abs(heads - self.num_heads))
            yield Problem(
                "model.num_heads",
                f"must divide model.d_model = {self.d_model}, got {self.num_heads}; the nearest that does is {best}",
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become new weights."""

    name: Literal["adamw", "muon"] = "adamw"
    """`adamw`: AdamW for all; weight decay on matrices only. `muon`: Muon for the matrices of the blocks, AdamW for the
    rest."""
    max_lr: float = setting(3e-4, above=0.0)
    """Learning rate at the end of the warm-up."""
    min_lr: float = derived(
        "a tenth of optimizer.max_lr",
        lambda get: get("optimizer.max_lr") / 10,
        at_least=0.0,
        only=("schedule.name", "cosine", "wsd"),
    )
    """Learning rate at the end of the run."""
    beta1: float = setting(0.9, at_least=0.0, below=1.0)
    """Decay of the mean of gradients."""
    beta2: float = setting(0.95, at_least=0.0, below=1.0)
    """Decay of the mean of squared gradients."""
    eps: float = setting(1e-8, above=0.0)
    """Added to the root of the mean square."""
    weight_decay: float = setting(0.1, at_least=0.0)
    """Share of a matrix's weights, times the learning rate, that each update takes away."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """By what all learning rates are multiplied for a batch of other size than `lr_base_tokens`: nothing, the root of
    the ratio of the sizes, or the ratio."""
    lr_base_tokens: int = setting(0, at_least=0, only=("optimizer.lr_scaling", "sqrt", "linear"))
    """Tokens of the update for which the rates above were chosen."""
    grad_clip: float = setting(1.0, at_least=0.0)
    """Largest norm of the whole gradient; a larger one is scaled down to it. 0: no clipping."""

    muon_lr: float = setting(0.02, above=0.0, only=("optimizer.name", "muon"))
    """Learning rate of Muon at the end of the warm-up; from update to update it keeps its ratio to that of AdamW."""
    muon_scale: Literal["spectral", "rms"] = setting("spectral", only=("optimizer.name", "muon"))
    """By what Muon's orthogonal step of a matrix [rows, columns] is multiplied. `spectral`: √max(1, rows/columns).
    `rms`: 0.2·√max(rows, columns), as large as AdamW's, for learning rates like AdamW's."""
    muon_momentum: float = setting(0.95, at_least=0.0, below=1.0, only=("optimizer.name", "muon"))
    """Decay of the momentum, which is Nesterov's."""
    muon_momentum_warmup: int = setting(0, at_least=0, only=("optimizer.name", "muon"))
    """Updates over which the momentum rises linearly from 0.85."""
    muon_steps: int = setting(5, at_least=1, at_most=100, only=("optimizer.name", "muon"))
    """Newton–Schulz iterations that make the step orthogonal."""

    def problems(self) -> Iterator[Problem]:
        if self.min_lr > self.max_lr:
            yield Problem("optimizer.min_lr", f"must not exceed optimizer.max_lr = {self.max_lr}, got {self.min_lr}")
        if self.lr_scaling != "none" and not self.lr_base_tokens:
            yield Problem(
                "optimizer.lr_base_tokens",
                "is needed by optimizer.lr_scaling: the tokens of the update for which max_lr was chosen",
            )


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate from update to update."""

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: `cosine` falls to min_lr over the whole run, `wsd` stays and falls linearly in the last
    `decay_updates`, `constant` stays."""
    warmup_updates: int = derived(
        "2 % of train.updates, at least 1",
        lambda get: min(max(1, round(0.02 * get("train.updates"))), get("train.updates") - 1),
        at_least=0,
    )
    """Updates over which the learning rate rises linearly to max_lr. The first is never 0."""
    decay_updates: int = derived(
        "20 % of train.updates after the warm-up",
        lambda get: max(
            0, min(round(0.2 * get("train.updates")), get("train.updates") - get("schedule.warmup_updates"))
        ),
        at_least=0,
        only=("schedule.name", "wsd"),
    )
    """Updates of the final fall."""


@dataclass(frozen=True)
class PrecisionConfig:
    """The arithmetic. Parameters, gradients and optimizer state are FP32 in every case."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the matrix products. `auto`: BF16 on GPUs that have it in hardware, FP16 with a loss scaler on
    other CUDA GPUs, FP32 elsewhere."""


@dataclass(frozen=True)
class KernelsConfig:
    """Which kernels compute. All compute the same mathematics; another one changes the last bits."""

    attention: Literal["auto", "auto_flex", "flash", "flex", "sdpa"] = "auto"
    """`flash`: variable-length FlashAttention (CUDA, BF16 or FP16). `flex`: FlexAttention (CUDA). `sdpa`: piece by
    piece, anywhere. `auto`: the first of them that works. `auto_flex`: flex where it works, else sdpa."""
    loss: Literal["auto", "liger", "chunked", "reference"] = "auto"
    """LM head and cross-entropy. `liger`: Liger's fused kernel (CUDA). `chunked`: never more than some rows of logits,
    of an aligned width, anywhere. `reference`: all logits at once. `auto`: liger on CUDA if installed, else chunked."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for the model in training. `auto`: on CUDA, and if it fails without it. `on`: or fail."""


@dataclass(frozen=True)
class LossConfig:
    """What is minimised besides the cross-entropy. Validation always measures the cross-entropy alone."""

    label_smoothing: float = setting(0.0, at_least=0.0, below=1.0)
    """Share of each target's probability that is spread evenly over the vocabulary."""
    z_loss: float = setting(0.0, at_least=0.0)
    """Weight of (log Σ exp logits)², which keeps logits from drifting; 1e-4 is usual."""


@dataclass(frozen=True)
class TrainConfig:
    """How long, from which random start, and where."""

    updates: int = setting(200, at_least=1, at_most=10**12)
    """Optimizer steps."""
    seed: int = setting(1337, at_least=0, below=2**63)
    """Seed of initial weights and dropout; of the data's order too, unless data.order_seed says otherwise."""
    init_from: str = ""
    """A run's id or folder whose newest state gives the first weights, in place of random ones: the weights alone, with
    a new optimizer, schedule and order of data. To go on with a run, say `train --resume RUN` instead."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """`auto`: a CUDA GPU, else Apple's MPS, else the CPU."""
    num_threads: int = setting(0, at_least=0, at_most=1024)
    """CPU threads of one operation; 0: every CPU that the process may use, shared with the other processes of its
    machine. Another number changes the last bits."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes, started with torchrun, share the model. `ddp`: each has all of it, and a share of the
    update's micro-batches. `fsdp`: each also has only its part of the weights, gradients and optimizer's states. Says
    how, not what: no part of the config's identity."""

    def problems(self) -> Iterator[Problem]:
        if self.init_from == "latest":
            yield Problem("train.init_from", "must name a run: `latest` is another one as soon as this run has begun")


@dataclass(frozen=True)
class EvalConfig:
    """The measurement on held-back text: before the first update, after the last, and in between."""

    every: int = setting(50, at_least=0)
    """Updates between evaluations; 0: only before the first and after the last."""
    tokens: int = setting(65536, at_least=2)
    """The fixed validation set: at most so many tokens. A smaller set is the beginning of a larger one."""
    pieces: Literal["documents", "windows"] = derived(
        "windows for batch.layout windows, else documents",
        lambda get: "windows" if get("batch.layout") == "windows" else "documents",
    )
    """How it is cut: each document for itself, or stretches of the joined text; at most model.max_positions long."""
    batch_tokens: int = setting(8192, at_least=1)
    """Tokens evaluated in one pass; memory, not results, up to rounding."""


@dataclass(frozen=True)
class CheckpointConfig:
    """States to resume from."""

    every: int = setting(50, at_least=1)
    """Updates between checkpoints. The last state is saved in every case."""
    keep_last: int = setting(2, at_least=1)
    """How many of the newest are kept."""
    keep_best: bool = True
    """Also save and keep the state with the lowest validation loss."""
    keep_every: int = setting(0, at_least=0)
    """Also keep for good the state of every so many updates, a multiple of checkpoint.every; 0: none."""
    background: bool = True
    """Training goes on while a state is written, from a copy that takes as much memory as the state. `false`: it
    waits, and needs none. The states are the same."""
    copy_to: str = ""
    """An address for copies of the run, such as `s3://bucket/runs`, or any that fsspec knows: made in the background
    after each save, verified, kept by the same rule. `train --resume ADDRESS/RUN` goes on from them anywhere."""
    copy_wait_s: float = setting(600.0, at_least=0.0, at_most=86400.0)
    """The longest that the end of a run waits for its last copy."""
    restore: Literal["all", "weights"] = "all"
    """What a run that goes on takes from its checkpoint. `weights`: everything but the optimizer's state, which begins
    anew. It is there to show what that does: such a run is not what one without an interruption would have been."""

    def problems(self) -> Iterator[Problem]:
        if self.keep_every % self.every:
            near = max(1, round(self.keep_every / self.every)) * self.every
            yield Problem(
                "checkpoint.keep_every",
                f"must be a multiple of checkpoint.every = {self.every}, got {self.keep_every}; the nearest is {near}",
            )


@dataclass(frozen=True)
class MeasureConfig:
    """What is observed beside the losses, and what counts as the steady state. None of it changes what is trained."""

    warmup_updates: int = setting(10, at_least=0)
    """First updates of each process that are left out of tokens/s. Nothing to do with the learning rate."""
    timeline_from: int = setting(0, at_least=0)
    """First update whose operations are recorded one by one, in `timeline.json`; 0: none. The update before it, on
    which the profiler warms up, and those recorded are left out of tokens/s."""
    timeline_updates: int = setting(2, at_least=1, at_most=20)
    """How many updates the timeline has."""
    memory_update: int = setting(0, at_least=0)
    """The update whose allocations are recorded one by one, in `memory-events.json` and on CUDA in
    `memory-snapshot.pickle`; 0: none. Left out of tokens/s."""
    matmul_probe: bool = False
    """After training, measure for some seconds how fast this device multiplies matrices, to tell how much of it an
    update reaches."""
    peak_tflops: float = setting(0.0, at_least=0.0)
    """The device's peak rate of dense products in the run's arithmetic, for MFU; 0: from the lab's table of GPUs."""
    peak_source: str = ""
    """Where peak_tflops comes from, in words."""

    def problems(self) -> Iterator[Problem]:
        if self.peak_tflops and not self.peak_source.strip():
            yield Problem("measure.peak_tflops", "needs measure.peak_source: where it comes from, such as a data sheet")
        if self.peak_source and not self.peak_tflops:
            yield Problem("measure.peak_source", "has no meaning without measure.peak_tflops")
        if self.timeline_from and -1 <= self.memory_update - self.timeline_from < self.timeline_updates:
            yield Problem(
                "measure.memory_update",
                f"must not be among the updates of the timeline or the one before them, got {self.memory_update}; one "
                f"after them is {self.timeline_from + self.timeline_updates}",
            )


@dataclass(frozen=True)
class TrackingConfig:
    """Where the metrics are mirrored to while the run goes. `metrics.jsonl` is the truth; no mirror can delay or change
    the training. No part of the config's identity."""

    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """Weights & Biases. `auto`: online if there is a key, else offline, where wandb is installed."""
    project: str = ""
    """Project on W&B. Empty: what WANDB_PROJECT says, else llm-training-lab."""
    entity: str = ""
    """User or team on W&B. Empty: what WANDB_ENTITY says, else the key's own."""
    tensorboard: bool = False
    """TensorBoard's event files, in the run's folder `tensorboard`."""
    csv: bool = False
    """`metrics.csv`, written when the process ends."""
    report: bool = True
    """`report.html` and `report.json`, made when the process ends; the command `report` makes them at any time."""
    timeout_s: float = setting(60.0, above=0.0, at_most=3600.0)
    """The longest that the end of a run waits for its mirrors."""


@dataclass(frozen=True)
class Config:
    """Everything that decides a run. Made by `resolve.resolve_config`, which fills in what follows from the rest."""

    purpose: str
    """What the experiment is for, in a sentence. No part of its identity."""
    data: DataConfig
    model: ModelConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    precision: PrecisionConfig
    kernels: KernelsConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    measure: MeasureConfig
    tracking: TrackingConfig
    remote: RemoteConfig

    def problems(self) -> Iterator[Problem]:
        """What is wrong within a concern, then between concerns; warnings are among them, marked so."""
        for section in sections():
            check = getattr(getattr(self, section), "problems", None)
            if check is not None:
                yield from check()
        updates = self.train.updates
        if self.batch.layout == "windows" and self.batch.block_size > self.model.max_positions:
            yield Problem(
                "batch.block_size",
                f"must not exceed model.max_positions = {self.model.max_positions}, got {self.batch.block_size}",
            )
        if self.batch.layout == "windows" and self.batch.block_size < self.model.max_positions:
            yield Problem(
                "batch.block_size",
                f"{self.batch.block_size} is less than model.max_positions = {self.model.max_positions}: the positions "
                "after it are never trained, but used when the model is evaluated and sampled",
                is_fatal=False,
            )
        if self.batch.layout == "packs" and self.batch.pack_length > self.model.max_positions:
            yield Problem(
                "batch.pack_length",
                f"must not exceed model.max_positions = {self.model.max_positions}, got {self.batch.pack_length}",
            )
        fewest_pieces = -(-self.batch.tokens // self.model.max_positions)
        if self.batch.layout == "token_budget" and self.batch.micro_batches > fewest_pieces:
            yield Problem(
                "batch.micro_batches",
                f"{self.batch.micro_batches} may exceed the pieces: an update of {self.batch.tokens} tokens "
                f"can have as few as {fewest_pieces}, pieces are never cut, and fewer micro-batches are then made",
                is_fatal=False,
            )
        if self.schedule.warmup_updates >= updates and self.schedule.warmup_updates > 0:
            yield Problem(
                "schedule.warmup_updates",
                f"must be smaller than train.updates = {updates}, got {self.schedule.warmup_updates}",
            )
        if self.schedule.name == "wsd" and self.schedule.warmup_updates + self.schedule.decay_updates > updates:
            yield Problem(
                "schedule.decay_updates",
                f"warm-up ({self.schedule.warmup_updates}) and decay ({self.schedule.decay_updates}) together must "
                f"fit into train.updates = {updates}",
            )
        if self.checkpoint.every > updates:
            yield Problem(
                "checkpoint.every",
                f"{self.checkpoint.every} is more than the {updates} updates of the run: only its last state will be "
                "saved, and a run that is killed starts from its beginning",
                is_fatal=False,
            )
        if self.measure.warmup_updates >= updates:
            yield Problem(
                "measure.warmup_updates",
                f"{self.measure.warmup_updates} leaves none of the {updates} updates to measure the speed of",
                is_fatal=False,
            )
        for name, last in (
            ("timeline_from", self.measure.timeline_from + self.measure.timeline_updates - 1),
            ("memory_update", self.measure.memory_update),
        ):
            if getattr(self.measure, name) and last > updates:
                yield Problem(
                    f"measure.{name}",
                    f"reaches update {last}, after the last of the run, {updates}: it is recorded only as far as that",
                    is_fatal=False,
                )
        if self.eval.every > updates:
            yield Problem(
                "eval.every",
                f"{self.eval.every} is more than the {updates} updates of the run: it is evaluated only before and "
                "after",
                is_fatal=False,
            )


def sections() -> dict[str, type]:
    """The concerns of a config: the name of each and its dataclass."""
    return {
        "data": DataConfig,
        "model": ModelConfig,
        "batch": BatchConfig,
        "optimizer": OptimizerConfig,
        "schedule": ScheduleConfig,
        "loss": LossConfig,
        "precision": PrecisionConfig,
        "kernels": KernelsConfig,
        "train": TrainConfig,
        "eval": EvalConfig,
        "checkpoint": CheckpointConfig,
        "measure": MeasureConfig,
        "tracking": TrackingConfig,
        "remote": RemoteConfig,
    }


def fields_by_key() -> dict[str, dataclasses.Field[Any]]:
    """Every setting of a config by its dotted name, such as `optimizer.max_lr`, in the order of declaration."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for section, cls in sections().items():
        for one in dataclasses.fields(cls):
            found[f"{section}.{one.name}"] = one
    return found


def values_of(config: Config) -> dict[str, Any]:
    """The resolved values as nested plain dictionaries, ready for JSON."""
    values = dataclasses.asdict(config)
    for section in values.values():
        if isinstance(section, dict):
            section.update({name: list(value) for name, value in section.items() if isinstance(value, tuple)})
    return values


UNIDENTIFIED = ("purpose", "tracking", "remote")
"""The words, the mirrors and the machine: two configs that differ in them alone are the same experiment."""
UNIDENTIFIED_SETTINGS = (
    ("data", "cache_dir"), ("train", "parallel"), ("checkpoint", "background"), ("checkpoint", "keep_every"),
    ("checkpoint", "copy_to"), ("checkpoint", "copy_wait_s"),
)  # fmt: skip
"""Single settings of the same kind."""


def identified_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config's values that its identity is made of."""
    identified = {name: value for name, value in values.items() if name not in UNIDENTIFIED}
    for section, name in UNIDENTIFIED_SETTINGS:
        identified[section] = {key: value for key, value in identified[section].items() if key != name}
    return identified
