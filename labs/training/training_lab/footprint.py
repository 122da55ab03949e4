"""How many values a model trains, and how much memory that takes: from the config alone. Pure, and on Python 3.9.

What is held at the worst moment, early in the backward pass: weights, gradients, optimizer states, what the forward
pass kept of each layer, the head's buffers, and one block at work. Per token and layer, with width d and H heads, the
model keeps the inputs of both norms (FP32), of the four linear layers and of GELU, and q, k, v: 64·d bytes in FP32,
36·d under autocast to 16 bits; for the norms' means and deviations 16, for the attention's log-sums 4·H. Counting the
tensors that autograd saves gives exactly this.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from training_lab.config import Config, ModelConfig
from training_lab.errors import UserError
from training_lab.gpus import Gpu

MOMENT_BYTES = {"adamw": 8, "muon": 4}
"""Of each trained value: the optimizer's two moments, or one, in FP32."""
GPU_OVERHEAD_BYTES = 1 << 30
"""Of a GPU, for the CUDA context, libraries' workspaces and what the allocator cannot fill."""
CHUNK_TOKENS = 1024
"""Rows of logits that the chunked head holds at one time; 1,024 was the fastest of 256 to 4,096 at 50,257 columns on a
CPU."""
CHUNK_TOKENS_GPU = 4096
"""The same on a GPU, which is not filled by less."""
ALIGNED = 64
"""Matrix products are slow where rows of logits are no multiple of this many values: the chunked head rounds up."""
VOCABULARIES = {"byte": 256, "gpt2": 50_257}
"""Of the tokenizers whose vocabulary does not follow from the text."""


class Kind(NamedTuple):
    """What decides how much is held, besides the config."""

    compute: str
    """`fp32`, `bf16` or `fp16`."""
    loss: str
    """`liger`, `chunked` or `reference`."""
    is_cpu: bool


def share_out(config: Config, world_size: int) -> Config:
    """The config as so many processes run it: each takes every so-many-th micro-batch of the update, which stays the
    same. Raises UserError if there is too little for all."""
    batch = config.batch
    rows = {"windows": batch.batch_size, "packs": batch.packs}.get(batch.layout)
    if rows is not None and world_size > rows:
        setting = "batch.packs" if batch.layout == "packs" else "batch.batch_size"
        raise UserError(
            f"{setting}: an update of {rows} {batch.layout} cannot occupy {world_size} processes; start at most "
            f"{rows}, or set {setting} to {world_size} or more"
        )
    micro_batches = -(-batch.micro_batches // world_size) * world_size
    return dataclasses.replace(config, batch=dataclasses.replace(batch, micro_batches=micro_batches))


def parameter_values(model: ModelConfig, vocab_size: int) -> dict[str, int]:
    """Trained values by part; the head is the token embedding, and counted once."""
    width, layers = model.d_model, model.num_layers
    return {
        "token embedding, which is the head": vocab_size * width,
        "positions": model.max_positions * width,
        "matrices of the blocks": 12 * layers * width**2,
        "norms": (4 * layers + 2) * width,
    }


def memory_parts(config: Config, vocab_size: int, kind: Kind) -> dict[str, int]:
    """Bytes at the worst moment of an update, by what they are for."""
    values = parameter_values(config.model, vocab_size)
    total, blocks = sum(values.values()), values["matrices of the blocks"]
    by_muon = blocks if config.optimizer.name == "muon" else 0
    tokens, width, is_exact = micro_batch_tokens(config), config.model.d_model, kind.compute == "fp32"
    parts = {
        "weights": 4 * total,
        "gradients": 4 * total,
        "optimizer states": MOMENT_BYTES["muon"] * by_muon + MOMENT_BYTES["adamw"] * (total - by_muon),
        "weights in 16 bits": 0 if is_exact else 2 * total,
        "activations": tokens * activation_bytes(config, is_exact),
        "head and loss": head_bytes(tokens, vocab_size, width, kind),
        "block at work": tokens * width * (24 if is_exact else 16),
    }
    return {name: number for name, number in parts.items() if number}


def activation_bytes(config: Config, is_exact: bool) -> int:
    """What the forward pass keeps of one token."""
    model = config.model
    layer = (64 if is_exact else 36) * model.d_model + 16 + 4 * model.num_heads
    masks = (2 * model.num_layers + 1) * model.d_model if model.dropout else 0
    return model.num_layers * layer + masks


def head_bytes(tokens: int, vocab_size: int, width: int, kind: Kind) -> int:
    """What the head keeps besides its gradient. Liger's logits are gone when the worst moment comes."""
    size = 4 if kind.compute == "fp32" else 2
    if kind.loss == "liger":
        return 0
    if kind.loss == "reference":
        return tokens * vocab_size * (size + 8)
    aligned = -(-vocab_size // ALIGNED) * ALIGNED
    rows = min(tokens, CHUNK_TOKENS if kind.is_cpu else CHUNK_TOKENS_GPU)
    return aligned * (rows + width) * size


def micro_batch_tokens(config: Config) -> int:
    """Token slots of the largest micro-batch."""
    batch = config.batch
    row, rows = {
        "windows": (batch.block_size, batch.batch_size),
        "packs": (batch.pack_length, batch.packs),
        "token_budget": (1, batch.tokens),
    }[batch.layout]
    return row * -(-rows // batch.micro_batches)


def micro_batches_to_fit(config: Config, vocab_size: int, kind: Kind, limit: int) -> int | None:
    """The fewest micro-batches with which an update takes at most `limit` bytes; None if none are enough."""
    rows = {"windows": config.batch.batch_size, "packs": config.batch.packs}.get(
        config.batch.layout, config.batch.tokens // config.model.max_positions
    )
    for number in range(config.batch.micro_batches, rows + 1):
        if rows % number and number < rows:
            continue
        batch = dataclasses.replace(config.batch, micro_batches=number)
        changed = dataclasses.replace(config, batch=batch)
        if sum(memory_parts(changed, vocab_size, kind).values()) <= limit:
            return number
    return None


def compute_on(gpu: Gpu) -> str:
    """The arithmetic of `precision.compute: auto` on a GPU."""
    return "bf16" if gpu.capability >= (8, 0) or not any(gpu.capability) else "fp16"


def memory_of_gpu(gpu: Gpu) -> int:
    """The bytes of a GPU that a run may take."""
    return gpu.memory_gb * 10**9 - GPU_OVERHEAD_BYTES


def kind_on_gpu(config: Config, gpu: Gpu) -> Kind:
    """What a config computes with on a GPU machine where everything is installed."""
    compute = compute_on(gpu) if config.precision.compute == "auto" else config.precision.compute
    return Kind(compute, "liger" if config.kernels.loss == "auto" else config.kernels.loss, is_cpu=False)
