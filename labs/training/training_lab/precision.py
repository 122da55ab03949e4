"""Which device computes, in which arithmetic, and why. Decided once, at the start, and recorded."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from training_lab.config import Config
from training_lab.distributed import ALONE, Processes
from training_lab.errors import UserError
from training_lab.footprint import compute_on
from training_lab.gpus import need_gpu
from training_lab.provenance import usable_cpus

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Hardware:
    """The device and arithmetic of a run, each with the reason for it."""

    device: torch.device
    device_reason: str
    compute: str
    compute_reason: str
    num_threads: int
    gpu: str | None = None
    """The CUDA GPU's own name."""
    capability: tuple[int, int] = (0, 0)
    """Its CUDA compute capability."""
    is_here: bool = True
    """False for a GPU that is only planned for: what is installed there is not known, and taken to be complete."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Matrix products in the chosen type; parameters stay FP32."""
        return torch.autocast(self.device.type, dtype=TYPES[self.compute], enabled=self.compute != "fp32")

    def make_scaler(self) -> torch.amp.GradScaler:
        """The loss scaler: at work for FP16, and passing everything through otherwise."""
        return torch.amp.GradScaler(self.device.type, enabled=self.compute == "fp16")

    def synchronise(self) -> None:
        """Waits until the device has done all that it was given, so that a clock read now counts it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def describe(self) -> dict[str, Any]:
        """What the record says of it."""
        facts: dict[str, Any] = {
            "device": str(self.device),
            "device_reason": self.device_reason,
            "compute": self.compute,
            "compute_reason": self.compute_reason,
            "num_threads": self.num_threads,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        if self.gpu is not None:
            facts |= {"gpu": self.gpu, "cudnn": torch.backends.cudnn.version()}
        return facts


def choose_hardware(config: Config, processes: Processes = ALONE) -> Hardware:
    """Decides device, arithmetic and threads, and sets the threads. Raises UserError for what is not there.

    The number of threads is set here whatever the environment says, because it decides the last bits of results.
    """
    device, device_reason = choose_device(config.train.device)
    device = own_device(device, processes)
    compute, compute_reason = choose_compute(config.precision.compute, device)
    num_threads = config.train.num_threads or max(1, usable_cpus() // processes.local_world_size)
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision("highest")  # FP32 means FP32, whatever an environment variable says
    hardware = Hardware(device, device_reason, compute, compute_reason, num_threads)
    if device.type != "cuda":
        return hardware
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return dataclasses.replace(hardware, gpu=name, capability=capability)


def plan_hardware(config: Config, name: str) -> Hardware:
    """The hardware of a run on a GPU that need not be here. Raises UserError for one that the lab does not know."""
    gpu, wanted = need_gpu(name), config.precision.compute
    has = "has" if compute_on(gpu) == "bf16" else "has no"
    by_default = (compute_on(gpu), f"{name} {has} BF16 in hardware")
    compute, reason = by_default if wanted == "auto" else (wanted, "asked for by precision.compute")
    device = torch.device("cuda")
    return Hardware(device, "planned with --gpu", compute, reason, usable_cpus(), name, gpu.capability, is_here=False)


def choose_device(wanted: str) -> tuple[torch.device, str]:
    """The device for `train.device`, and the reason."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        kind = next(kind for kind, is_there in available.items() if is_there)
        reason = "no GPU that torch can use" if kind == "cpu" else f"the first of cuda, mps, cpu that is there: {kind}"
        return torch.device(kind), reason
    if not available[wanted]:
        there = ", ".join(kind for kind, is_there in available.items() if is_there)
        raise UserError(f"train.device: {wanted} is not available to torch {torch.__version__} here; there is: {there}")
    return torch.device(wanted), "asked for by train.device"


def own_device(device: torch.device, processes: Processes) -> torch.device:
    """This process's own device of a kind. Raises UserError if the machine has too few."""
    if not processes.are_several or device.type == "cpu":
        return device
    there = torch.cuda.device_count() if device.type == "cuda" else 1
    if processes.local_world_size > there:
        raise UserError(
            f"LOCAL_WORLD_SIZE: {processes.local_world_size} processes on a machine with {there} "
            f"{device.type.upper()} device{'s' if there > 1 else ''}: give torchrun --nproc-per-node={there}, or train "
            "with --set train.device=cpu"
        )
    own = torch.device(device.type, processes.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(own)
    return own


def choose_compute(wanted: str, device: torch.device) -> tuple[str, str]:
    """The arithmetic for `precision.compute` on a device, and the reason."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted == "bf16" and device.type == "cuda" and not has_bf16:
        raise UserError("precision.compute: this GPU has no BF16 in hardware; use fp16 or fp32")
    if wanted == "fp16" and device.type == "mps":
        raise UserError(
            "precision.compute: fp16 needs a loss scaler, which the lab does not use on MPS; use bf16 or fp32"
        )
    if wanted != "auto":
        return wanted, "asked for by precision.compute"
    if device.type != "cuda":
        return "fp32", f"exact, and what the device {device.type} is best at"
    return ("bf16", "the GPU has BF16 in hardware") if has_bf16 else ("fp16", "the GPU has no BF16 in hardware")
