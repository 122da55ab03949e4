"""LM head and cross-entropy in one: the sum of −log p over the positions that have a label, in nats.

Always a sum, never a mean: the one who calls divides by the number of target tokens of the whole update, so that
neither micro-batches nor their unequal sizes change anything. Label smoothing and z-loss are sums over the same
positions. The matrix products are in the type of autocast, everything after them in FP32.

Three kernels of one mathematics: `reference` by the textbook, `chunked` with never more than CHUNK_TOKENS rows of
logits, and `liger`, Liger's Triton kernel for CUDA.

Shapes: T positions, C positions of a chunk, d the width, V the vocabulary, W the vocabulary made a multiple of ALIGNED.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from training_lab.data.batches import IGNORED
from training_lab.footprint import ALIGNED, CHUNK_TOKENS, CHUNK_TOKENS_GPU


@dataclass(frozen=True)
class Objective:
    """What is minimised, summed over the target tokens.

    (1 − s)·−log p(label) + s·mean over the vocabulary of −log p + z·(log Σ exp logits)². The middle term is label
    smoothing (Szegedy et al., 2016), the last z-loss (PaLM, Chowdhery et al., 2022).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


CROSS_ENTROPY = Objective()
"""−log p(label) alone: what validation measures, whatever training minimises."""


class HeadLoss(Protocol):
    """A kernel: hidden states [T, d], head [V, d] and labels [T] to a sum, a scalar that backward can start from."""

    def __call__(
        self, hidden_Td: torch.Tensor, head_Vd: torch.Tensor, labels_T: torch.Tensor, objective: Objective
    ) -> torch.Tensor: ...


def make_head_loss(kernel: str) -> HeadLoss:
    """The kernel named `liger`, `chunked` or `reference`."""
    if kernel == "chunked":
        return ChunkedLoss()
    return liger_loss if kernel == "liger" else reference_loss


def head_buffers(head_loss: HeadLoss) -> list[torch.Tensor]:
    """The memory that a head and loss keeps from call to call."""
    return head_loss.buffers() if isinstance(head_loss, ChunkedLoss) else []


def reference_loss(
    hidden_Td: torch.Tensor, head_Vd: torch.Tensor, labels_T: torch.Tensor, objective: Objective = CROSS_ENTROPY
) -> torch.Tensor:
    """The loss by the textbook: all logits, then torch's cross-entropy."""
    logits_TV = F.linear(hidden_Td, head_Vd)
    logits_TV = logits_TV.float() if logits_TV.dtype in (torch.bfloat16, torch.float16) else logits_TV
    loss = F.cross_entropy(
        logits_TV, labels_T, reduction="sum", ignore_index=IGNORED, label_smoothing=objective.label_smoothing
    )
    if objective.z_loss:
        lse_T = logits_TV.logsumexp(-1)[labels_T != IGNORED]
        loss = loss + objective.z_loss * lse_T.square().sum()
    return loss


class ChunkedLoss:
    """The loss chunk by chunk, with the gradients formed in the same pass, so that no logits outlive their chunk.

    The logits of a chunk and the aligned head are in buffers that live as long as the run: on a CPU fresh memory costs
    as much as half of the matrix product that fills it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(
        self,
        hidden_Td: torch.Tensor,
        head_Vd: torch.Tensor,
        labels_T: torch.Tensor,
        objective: Objective = CROSS_ENTROPY,
    ) -> torch.Tensor:
        kind, (vocab_size, width) = hidden_Td.device.type, head_Vd.shape
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_Td.dtype
        num_rows = min(CHUNK_TOKENS if kind == "cpu" else CHUNK_TOKENS_GPU, max(1, len(hidden_Td)))
        aligned = -(-vocab_size // ALIGNED) * ALIGNED
        logits_CW = self._buffer("logits", num_rows, aligned, compute, head_Vd.device)
        head_Wd = self._buffer("head", aligned, width, compute, head_Vd.device)
        head_Wd[:vocab_size] = head_Vd.detach()
        head_Wd[vocab_size:] = 0
        loss: torch.Tensor = _Chunks.apply(hidden_Td, head_Vd, labels_T, head_Wd, logits_CW, objective)  # type: ignore[no-untyped-call]
        return loss

    def buffers(self) -> list[torch.Tensor]:
        """The memory that is kept."""
        return list(self._buffers.values())

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that is kept for the next call; its content is what the last one left."""
        held = self._buffers.get(name)
        if held is None or held.dtype != dtype or held.device != device or held.numel() < rows * columns:
            with torch.inference_mode(False):  # one made in evaluation could not be used in training
                held = self._buffers[name] = torch.empty(rows * columns, dtype=dtype, device=device)
        return held[: rows * columns].view(rows, columns)


class _Chunks(torch.autograd.Function):
    """The gradients with respect to a sum of 1 are made in `forward`; `backward` multiplies them by what comes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_Td: torch.Tensor,
        head_Vd: torch.Tensor,
        labels_T: torch.Tensor,
        head_Wd: torch.Tensor,
        logits_CW: torch.Tensor,
        objective: Objective,
    ) -> torch.Tensor:
        compute, vocab_size = logits_CW.dtype, len(head_Vd)
        exact = torch.promote_types(compute, torch.float32)
        grad_hidden_Td = torch.empty_like(hidden_Td, dtype=compute) if ctx.needs_input_grad[0] else None
        grad_head_Wd = torch.zeros_like(head_Wd, dtype=exact) if ctx.needs_input_grad[1] else None
        sums = []
        for first in range(0, len(hidden_Td), len(logits_CW)):
            part = slice(first, first + len(logits_CW))
            hidden_Cd, labels_C = hidden_Td[part].to(compute), labels_T[part]
            products_CW = torch.mm(hidden_Cd, head_Wd.t(), out=logits_CW[: len(hidden_Cd)])
            scores_CW = products_CW.to(exact)
            sums.append(_loss_to_gradient(scores_CW, labels_C, vocab_size, objective))
            gradient_CW = scores_CW.to(compute)
            if grad_hidden_Td is not None:
                torch.mm(gradient_CW, head_Wd, out=grad_hidden_Td[part])
            if grad_head_Wd is not None and compute == exact:
                grad_head_Wd.addmm_(gradient_CW.t(), hidden_Cd)
            elif grad_head_Wd is not None:
                grad_head_Wd += gradient_CW.t() @ hidden_Cd
        ctx.gradients = grad_hidden_Td, None if grad_head_Wd is None else grad_head_Wd[:vocab_size]
        return torch.stack(sums).sum() if sums else logits_CW.new_zeros((), dtype=exact)

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_Td, head_Vd = ctx.gradients
        del ctx.gradients  # a second backward would multiply them again
        grad_hidden_Td = None if hidden_Td is None else hidden_Td.mul_(grad_loss)
        grad_head_Vd = None if head_Vd is None else head_Vd.mul_(grad_loss)
        return grad_hidden_Td, grad_head_Vd, None, None, None, None


def _loss_to_gradient(
    logits_CW: torch.Tensor, labels_C: torch.Tensor, vocab_size: int, objective: Objective
) -> torch.Tensor:
    """The sum of a chunk's losses; the logits are overwritten by its gradient with respect to them."""
    smoothing, z = objective.label_smoothing, objective.z_loss
    has_label_C = labels_C != IGNORED
    is_whole = labels_C.is_cpu and bool(has_label_C.all())  # to ask a GPU would be to wait for it
    labels_C1 = labels_C.clamp(min=0).unsqueeze(1)
    label_logits_C = logits_CW.gather(1, labels_C1).squeeze(1)
    mean_logits_C = logits_CW[:, :vocab_size].mean(1) if smoothing else torch.zeros_like(label_logits_C)
    logits_CW[:, vocab_size:] = -torch.inf
    top_C = logits_CW.amax(1)
    torch.softmax(logits_CW, 1, out=logits_CW)
    # The largest probability is exp(top - log sum exp), at least 1/V: its logarithm loses nothing.
    lse_C = top_C - logits_CW.amax(1).log()
    losses_C = lse_C - (1 - smoothing) * label_logits_C - smoothing * mean_logits_C + z * lse_C.square()
    if z:
        logits_CW *= (1 + 2 * z * lse_C).unsqueeze(1)
    if smoothing:
        logits_CW[:, :vocab_size] -= smoothing / vocab_size
    logits_CW.scatter_add_(1, labels_C1, torch.full_like(label_logits_C, smoothing - 1).unsqueeze(1))
    if is_whole:
        return losses_C.sum()
    # Filled, not multiplied by 0: what is not a number at such a position is none of the loss.
    logits_CW.masked_fill_(~has_label_C.unsqueeze(1), 0.0)
    return losses_C.masked_fill(~has_label_C, 0.0).sum()


def liger_loss(
    hidden_Td: torch.Tensor, head_Vd: torch.Tensor, labels_T: torch.Tensor, objective: Objective = CROSS_ENTROPY
) -> torch.Tensor:
    """Liger's fused linear cross-entropy: as many rows of logits at a time as take the memory of the hidden states."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    options = {
        "ignore_index": IGNORED,
        "lse_square_scale": objective.z_loss,
        "label_smoothing": objective.label_smoothing,
        "reduction": "sum",
        "accum_dtype": torch.float32,
    }
    names = ("bias", "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap",
             "return_z_loss", "accum_dtype")  # fmt: skip
    arguments = [{"return_z_loss": False, **options}.get(name) for name in names]
    if head_Vd.requires_grad and not hidden_Td.requires_grad:  # Liger would leave out the head's gradient as well
        hidden_Td = hidden_Td.detach().requires_grad_()
    loss: torch.Tensor = LigerFusedLinearCrossEntropyFunction.apply(hidden_Td, head_Vd, labels_T, *arguments)[0]
    return loss
