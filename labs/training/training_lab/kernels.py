"""Which kernels compute: attention, head and loss, and whether the model is compiled. Decided once, with reasons, and
recorded; each choice computes the same mathematics."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from training_lab.attention import SdpaAttention
from training_lab.config import Config
from training_lab.errors import UserError
from training_lab.memory import is_out_of_memory
from training_lab.model import Decoder
from training_lab.precision import Hardware


@dataclass(frozen=True)
class Kernels:
    """The kernels of a run, each with the reason for it."""

    attention: str
    attention_reason: str
    loss: str
    loss_reason: str
    compile: bool
    compile_reason: str

    def describe(self) -> dict[str, Any]:
        """What the record says of them."""
        return asdict(self)


def choose_kernels(config: Config, hardware: Hardware) -> Kernels:
    """Decides all three. Raises UserError for what cannot work here."""
    attention = choose_attention(config, hardware)
    return Kernels(*attention, *choose_loss(config.kernels.loss, hardware), *choose_compile(config, hardware))


def choose_attention(config: Config, hardware: Hardware) -> tuple[str, str]:
    """The backend for `kernels.attention`, and the reason."""
    wanted = config.kernels.attention
    obstacles = {
        "flash": obstacle_to_flash(config, hardware),
        "flex": obstacle_to_flex(config, hardware),
        "sdpa": "",
    }
    if wanted in ("auto", "auto_flex"):
        candidates = [name for name in obstacles if wanted == "auto" or name != "flash"]
        name = next(name for name in candidates if not obstacles[name])
        passed_over = [f"no {other}: {obstacles[other]}" for other in candidates[: candidates.index(name)]]
        return name, "; ".join(passed_over) or "the first choice, and it works here"
    if obstacles[wanted]:
        there = ", ".join(name for name, obstacle in obstacles.items() if not obstacle)
        raise UserError(
            f"kernels.attention: {wanted} cannot be used on {hardware.device}: {obstacles[wanted]}; use {there}"
        )
    return wanted, "asked for by kernels.attention"


def obstacle_to_flash(config: Config, hardware: Hardware) -> str:
    """Why variable-length FlashAttention cannot be used; empty if it can."""
    if hardware.device.type != "cuda":
        return "it runs on CUDA only"
    if hardware.compute == "fp32":
        return "it computes in BF16 or FP16 only"
    if hardware.capability < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    dimensions = config.model.d_model // config.model.num_heads
    if dimensions % 8 or dimensions > 256:
        return "it needs heads of a multiple of 8 dimensions, at most 256"
    return obstacle_of_dropout(config)


def obstacle_to_flex(config: Config, hardware: Hardware) -> str:
    """Why FlexAttention cannot be used; empty if it can."""
    if hardware.device.type != "cuda":
        return "FlexAttention has no backward pass there"
    if missing_packages(hardware, "triton"):
        return "triton is not installed"
    if config.model.d_model // config.model.num_heads < 16:
        return "it needs heads of at least 16 dimensions"
    if has_rows_of_many_lengths(config):
        return "the micro-batches of a token budget differ in length"
    return obstacle_of_dropout(config)


def missing_packages(hardware: Hardware, *names: str) -> list[str]:
    """Those that are not installed where the run is to be."""
    return [name for name in names if hardware.is_here and importlib.util.find_spec(name) is None]


def has_rows_of_many_lengths(config: Config) -> bool:
    """Whether micro-batches differ in length. Each length would be compiled for, and torch gives up after some: the
    rest would run as they are, with other bits and in other memory."""
    return config.batch.layout == "token_budget" and config.batch.micro_batches > 1


def obstacle_of_dropout(config: Config) -> str:
    """Why a kernel without dropout cannot be used; empty if it can."""
    return "it has no dropout, and model.dropout is not 0" if config.model.dropout else ""


def choose_loss(wanted: str, hardware: Hardware) -> tuple[str, str]:
    """The kernel for `kernels.loss`, and the reason."""
    missing = missing_packages(hardware, "liger_kernel", "triton")
    obstacle = ""
    if hardware.device.type != "cuda":
        obstacle = "Liger's kernels run on CUDA only"
    elif missing:
        obstacle = f"{', '.join(missing)} is not installed (pip install 'training-lab[gpu]')"
    if wanted == "auto":
        return ("chunked", f"no liger: {obstacle}") if obstacle else ("liger", "Liger is there, and the device is CUDA")
    if wanted == "liger" and obstacle:
        raise UserError(f"kernels.loss: liger cannot be used on {hardware.device}: {obstacle}; use chunked")
    return wanted, "asked for by kernels.loss"


def choose_compile(config: Config, hardware: Hardware) -> tuple[bool, str]:
    """Whether to compile, for `kernels.compile`, and the reason."""
    wanted, device = config.kernels.compile, hardware.device.type
    if wanted == "off":
        return False, "switched off by kernels.compile"
    obstacle = ""
    if device == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        obstacle = "no C++ compiler (c++, g++ or clang++) on PATH"
    elif device == "cuda" and missing_packages(hardware, "triton"):
        obstacle = "triton is not installed"
    elif device == "mps":
        obstacle = "not supported on MPS"
    elif has_rows_of_many_lengths(config):
        obstacle = "the micro-batches of a token budget differ in length"
    elif config.train.parallel == "fsdp":
        obstacle = "train.parallel=fsdp gathers each block's weights when its turn comes"
    if wanted == "on":
        if obstacle:
            raise UserError(f"kernels.compile: on is not possible here: {obstacle}; use auto or off")
        return True, "asked for by kernels.compile"
    if device == "cpu":
        return False, "on a CPU it costs half a minute and gains nothing that could be measured"
    return (False, obstacle) if obstacle else (True, "it pays on CUDA")


def compile_body(
    model: Decoder, try_update: Callable[[], None], is_required: bool, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Compiles the model's body, and tries it with `try_update`, a forward and backward pass that leaves no trace.

    Returns what the record says. If it fails, the model stays as it was, and `warn` gets one line; if it `is_required`,
    UserError is raised.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # Compiled code adds up the embedding's gradient in any order, unless it is told not to.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads what it did not write
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # or it would go on uncompiled, with other bits
    if isinstance(model.backends.training, SdpaAttention):
        model.backends.training.leave_compiled_code()
    model.compiled_body = torch.compile(model.body, dynamic=False)
    try:
        try_update()
    except Exception as error:  # whatever a compiler may raise
        model.compiled_body = None
        torch.use_deterministic_algorithms(was_deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        if is_required:
            raise UserError(f"kernels.compile: on, but compiling failed: {reason}; use auto or off") from error
        warn(f"compiling failed, so the model runs as it is: {reason}")
        return {"compile_state": "requested, not active", "compile_failure": reason}
    return {"compile_state": "active"}
