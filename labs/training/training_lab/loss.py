"""LM head and cross-entropy in one: the sum of −log p over the positions that have a label, in nats.

Always a sum, never a mean: the one who calls divides by the number of target tokens of the whole update, so that
neither micro-batches nor their unequal sizes change anything. The head runs in FP32, also under autocast.

Shapes: T positions, d the width, V the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn import LinearCrossEntropyOptions

from training_lab.data.batches import IGNORED

CHUNK_TOKENS = 1024
"""Rows of logits that exist at one time; 1,024 was the fastest of 256 to 4,096 at 50,257 columns on a CPU."""


def chunked_loss(hidden_Td: torch.Tensor, head_Vd: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """The loss with never more than CHUNK_TOKENS rows of logits; gradients are formed in the same pass."""
    with torch.autocast(hidden_Td.device.type, enabled=False):
        hidden_Td = hidden_Td.float()
        if torch.is_grad_enabled():
            options = LinearCrossEntropyOptions(batch_chunk_size=CHUNK_TOKENS, acc_policy="compact")
            return F.linear_cross_entropy(
                hidden_Td, head_Vd, labels_T, reduction="sum", ignore_index=IGNORED, options=options
            )
        chunks = zip(hidden_Td.split(CHUNK_TOKENS), labels_T.split(CHUNK_TOKENS), strict=True)
        return torch.stack([reference_loss(hidden, head_Vd, labels) for hidden, labels in chunks]).sum()


def reference_loss(hidden_Td: torch.Tensor, head_Vd: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """The loss by the textbook: all logits, then torch's cross-entropy."""
    return F.cross_entropy(F.linear(hidden_Td, head_Vd), labels_T, reduction="sum", ignore_index=IGNORED)
