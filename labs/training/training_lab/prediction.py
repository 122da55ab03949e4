"""How much memory a run will take where it is to run, and whether that is there, before it runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from training_lab.config import Config
from training_lab.errors import UserError
from training_lab.footprint import GPU_OVERHEAD_BYTES, Kind, memory_of_gpu, memory_parts, micro_batches_to_fit
from training_lab.gpus import GPUS
from training_lab.kernels import Kernels
from training_lab.memory_peaks import machine_memory_bytes, resident_bytes
from training_lab.precision import Hardware


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


def kind_of(hardware: Hardware, kernels: Kernels) -> Kind:
    """What of device and kernels decides how much is held."""
    return Kind(hardware.compute, kernels.loss, hardware.device.type == "cpu")


def predict_memory(
    config: Config, vocab_size: int, hardware: Hardware, kernels: Kernels, base_bytes: int | None = None
) -> Memory:
    """The most memory of an update, in bytes. `base_bytes` are those of Python and its libraries, by default what this
    process takes now; on a GPU they do not count."""
    parts = memory_parts(config, vocab_size, kind_of(hardware, kernels))
    if hardware.device.type == "cuda":
        return Memory(parts, "peak allocated in updates")
    parts["Python and libraries"] = (resident_bytes() or 0) if base_bytes is None else base_bytes
    of = "peak resident memory of the process; without what libraries keep for themselves in passing"
    return Memory({name: number for name, number in parts.items() if number}, of)


def memory_there(hardware: Hardware) -> int | None:
    """The bytes that a run may take where it is to be: on a GPU less what is not torch's. None where nobody knows."""
    if hardware.device.type != "cuda":
        return machine_memory_bytes()
    if hardware.is_here:
        return torch.cuda.mem_get_info(hardware.device)[1] - GPU_OVERHEAD_BYTES
    assert hardware.gpu is not None
    return memory_of_gpu(GPUS[hardware.gpu])


def enough_micro_batches(
    config: Config, vocab_size: int, hardware: Hardware, kernels: Kernels, there_bytes: int
) -> int | None:
    """The fewest micro-batches with which an update fits into the memory that is there; None if none are enough."""
    base_bytes = 0 if hardware.device.type == "cuda" else resident_bytes() or 0
    return micro_batches_to_fit(config, vocab_size, kind_of(hardware, kernels), there_bytes - base_bytes)


def need_memory(config: Config, vocab_size: int, hardware: Hardware, kernels: Kernels) -> None:
    """Raises UserError if an update surely takes more memory than there is, with what to change."""
    there = memory_there(hardware)
    needed = predict_memory(config, vocab_size, hardware, kernels).total_bytes
    if there is None or needed <= there:
        return
    enough = enough_micro_batches(config, vocab_size, hardware, kernels, int(0.8 * there))
    advice = f"--set batch.micro_batches={enough} (the update stays the same)" if enough else "a smaller model"
    raise UserError(
        f"an update takes about {needed / 2**30:,.0f} GiB of memory, and {hardware.gpu or 'this machine'} has "
        f"{there / 2**30:,.0f} GiB: use {advice}"
    )
