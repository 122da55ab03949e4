"""How much memory a run will take, before it runs: from the config, the arithmetic and the kernels.

What is held at the worst moment, early in the backward pass: weights, gradients, optimizer states, what the forward
pass kept of each layer, the head's buffers, and one block at work. Per token and layer, with width d and H heads, the
model keeps the inputs of both norms (FP32), of the four linear layers and of GELU, and q, k, v: 64·d bytes in FP32,
36·d under autocast to 16 bits; for the norms' means and deviations 16, for the attention's log-sums 4·H. Counting the
tensors that autograd saves gives exactly this.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from training_lab.config import Config
from training_lab.errors import UserError
from training_lab.gpus import GPUS
from training_lab.kernels import Kernels
from training_lab.loss import ALIGNED, CHUNK_TOKENS, CHUNK_TOKENS_GPU
from training_lab.memory_peaks import machine_memory_bytes, resident_bytes
from training_lab.model import Decoder
from training_lab.optim import describe_groups
from training_lab.precision import Hardware

MOMENT_BYTES = {"adamw": 8, "muon": 4}
"""Of each trained value: the optimizer's two moments, or one, in FP32."""
GPU_OVERHEAD_BYTES = 1 << 30
"""Of a GPU, for the CUDA context, libraries' workspaces and what the allocator cannot fill."""


class Memory(NamedTuple):
    """A prediction."""

    parts: dict[str, int]
    """Bytes by what they are for."""
    of: str
    """What it can be compared with."""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> dict[str, Any]:
        """What the record says of it."""
        return {"parts": self.parts, "total_bytes": self.total_bytes, "of": self.of}


def predict_memory(
    config: Config, vocab_size: int, hardware: Hardware, kernels: Kernels, base_bytes: int | None = None
) -> Memory:
    """The most memory of an update, in bytes. `base_bytes` are those of Python and its libraries, by default what this
    process takes now."""
    with torch.device("meta"):
        model = Decoder(config.model, vocab_size)
    groups = describe_groups(model, config.optimizer)
    values = sum(group["values"] for group in groups)
    tokens, width = micro_batch_tokens(config), config.model.d_model
    is_exact = hardware.compute == "fp32"
    parts = {
        "weights": 4 * values,
        "gradients": 4 * values,
        "optimizer states": sum(MOMENT_BYTES[group["optimizer"]] * group["values"] for group in groups),
        "weights in 16 bits": 0 if is_exact else 2 * values,
        "activations": tokens * activation_bytes(config, is_exact),
        "head and loss": head_bytes(kernels.loss, tokens, vocab_size, width, hardware),
        "block at work": tokens * width * (24 if is_exact else 16),
    }
    if hardware.device.type == "cuda":
        of = "peak allocated in updates"
    else:
        parts["Python and libraries"] = (resident_bytes() or 0) if base_bytes is None else base_bytes
        of = "peak resident memory of the process; without what libraries keep for themselves in passing"
    return Memory({name: number for name, number in parts.items() if number}, of)


def activation_bytes(config: Config, is_exact: bool) -> int:
    """What the forward pass keeps of one token."""
    model = config.model
    layer = (64 if is_exact else 36) * model.d_model + 16 + 4 * model.num_heads
    masks = (2 * model.num_layers + 1) * model.d_model if model.dropout else 0
    return model.num_layers * layer + masks


def head_bytes(loss: str, tokens: int, vocab_size: int, width: int, hardware: Hardware) -> int:
    """What the head keeps besides its gradient. Liger's logits are gone when the worst moment comes."""
    size = 4 if hardware.compute == "fp32" else 2
    if loss == "liger":
        return 0
    if loss == "reference":
        return tokens * vocab_size * (size + 8)
    aligned = -(-vocab_size // ALIGNED) * ALIGNED
    rows = min(tokens, CHUNK_TOKENS if hardware.device.type == "cpu" else CHUNK_TOKENS_GPU)
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


def micro_batches_to_fit(
    config: Config, vocab_size: int, hardware: Hardware, kernels: Kernels, limit: int
) -> int | None:
    """The fewest micro-batches with which an update takes at most `limit` bytes; None if none are enough."""
    rows = {"windows": config.batch.batch_size, "packs": config.batch.packs}.get(
        config.batch.layout, config.batch.tokens // config.model.max_positions
    )
    for number in range(config.batch.micro_batches, rows + 1):
        if rows % number and number < rows:
            continue
        batch = dataclasses.replace(config.batch, micro_batches=number)
        changed = dataclasses.replace(config, batch=batch)
        if predict_memory(changed, vocab_size, hardware, kernels).total_bytes <= limit:
            return number
    return None


def memory_there(hardware: Hardware) -> int | None:
    """The bytes that a run may take where it is to be: on a GPU less what is not torch's. None where nobody knows."""
    if hardware.device.type != "cuda":
        return machine_memory_bytes()
    if hardware.is_here:
        return torch.cuda.mem_get_info(hardware.device)[1] - GPU_OVERHEAD_BYTES
    assert hardware.gpu is not None
    return GPUS[hardware.gpu].memory_gb * 10**9 - GPU_OVERHEAD_BYTES


def need_memory(config: Config, vocab_size: int, hardware: Hardware, kernels: Kernels) -> None:
    """Raises UserError if an update surely takes more memory than there is, with what to change."""
    there = memory_there(hardware)
    needed = predict_memory(config, vocab_size, hardware, kernels).total_bytes
    if there is None or needed <= there:
        return
    enough = micro_batches_to_fit(config, vocab_size, hardware, kernels, int(0.8 * there))
    advice = f"--set batch.micro_batches={enough} (the update stays the same)" if enough else "a smaller model"
    raise UserError(
        f"an update takes about {needed / 2**30:,.0f} GiB of memory, and {hardware.gpu or 'this machine'} has "
        f"{there / 2**30:,.0f} GiB: use {advice}"
    )
