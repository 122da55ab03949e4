"""The loss on the fixed validation set. It reads the model and changes nothing: no gradient, no random number."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from training_lab.data.batches import make_batch, split_by_tokens
from training_lab.data.dataset import ValidationSet
from training_lab.distributed import ALONE, Processes
from training_lab.loss import CROSS_ENTROPY
from training_lab.parallel import SummedLoss, in_turn, own_share
from training_lab.precision import Hardware


class Evaluation(NamedTuple):
    """A measured validation loss."""

    loss: float
    """Mean −log p over the target tokens, in nats."""
    target_tokens: int
    seconds: float


def evaluate(
    whole: SummedLoss, validation: ValidationSet, hardware: Hardware, batch_tokens: int, processes: Processes = ALONE
) -> Evaluation:
    """Measures a model on the whole validation set, `batch_tokens` tokens in a pass, with a share of the passes in each
    process. The sum is exact, so that it does not depend on who adds what."""
    started = time.perf_counter()
    was_training = whole.training
    whole.eval()
    batches = [make_batch(validation.stream, pieces) for pieces in split_by_tokens(validation.pieces, batch_tokens)]
    with torch.no_grad(), hardware.autocast():
        own = own_share(batches, processes)
        sums = [whole(batch.to(hardware.device), CROSS_ENTROPY).item() for batch in own]
    whole.train(was_training)
    total = math.fsum(in_turn(processes.gather(sums), len(batches)))
    tokens = validation.num_target_tokens
    return Evaluation(total / tokens, tokens, time.perf_counter() - started)
