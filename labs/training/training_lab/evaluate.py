"""The loss on the fixed validation set. It reads the model and changes nothing: no gradient, no random number."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from training_lab.data.batches import make_batch, split_by_tokens
from training_lab.data.dataset import ValidationSet
from training_lab.loss import CROSS_ENTROPY, HeadLoss
from training_lab.model import Decoder
from training_lab.precision import Hardware


class Evaluation(NamedTuple):
    """A measured validation loss."""

    loss: float
    """Mean −log p over the target tokens, in nats."""
    target_tokens: int
    seconds: float


def evaluate(
    model: Decoder, head_loss: HeadLoss, validation: ValidationSet, hardware: Hardware, batch_tokens: int
) -> Evaluation:
    """Measures `model` on the whole validation set, `batch_tokens` tokens in a pass."""
    started = time.perf_counter()
    was_training = model.training
    model.eval()
    total = 0.0
    with torch.inference_mode(), hardware.autocast():
        for pieces in split_by_tokens(validation.pieces, batch_tokens):
            batch = make_batch(validation.stream, pieces).to(hardware.device)
            hidden_Td = model(batch.tokens_T, batch.positions_T, batch.cu_seqlens)
            total += head_loss(hidden_Td, model.head_Vd, batch.labels_T, CROSS_ENTROPY).item()
    model.train(was_training)
    tokens = validation.num_target_tokens
    return Evaluation(total / tokens, tokens, time.perf_counter() - started)
