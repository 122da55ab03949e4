"""Running out of memory: recognising it, and saying which settings to lower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from training_lab.config import Config
from training_lab.errors import LabError


class OutOfMemoryError(LabError):
    """The device or the machine has no memory left; the message says what to lower."""


@contextlib.contextmanager
def advice_when_out_of_memory(config: Config) -> Iterator[None]:
    """Turns running out of memory into an OutOfMemoryError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(advice_for_memory(config)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the machine has no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error)
        for words in ("DefaultCPUAllocator: can't allocate memory", "not enough memory", "out of memory")
    )


def advice_for_memory(config: Config) -> str:
    """What to change so that less memory is needed, best first, with the present values; only what can help."""
    batch, model = config.batch, config.model
    pieces = batch.batch_size if batch.layout == "windows" else max(1, batch.tokens // model.max_positions)
    advice = []
    if batch.micro_batches < pieces:
        wanted = min(pieces, batch.micro_batches * 2)
        advice.append(f"raise batch.micro_batches from {batch.micro_batches} to {wanted} (the update stays the same)")
    else:
        size = "batch.block_size" if batch.layout == "windows" else "model.max_positions"
        value = batch.block_size if batch.layout == "windows" else model.max_positions
        advice.append(f"lower {size}, now {value}")
    if config.eval.batch_tokens > model.max_positions:
        advice.append(f"lower eval.batch_tokens, now {config.eval.batch_tokens}")
    advice.append(f"lower model.num_layers ({model.num_layers}) or model.d_model ({model.d_model})")
    return "out of memory: " + "; or ".join(advice)
