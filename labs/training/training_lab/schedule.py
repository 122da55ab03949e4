"""The learning rate, and Muon's momentum, as pure functions of the number of the update."""

from __future__ import annotations

import math

from training_lab.config import Config


def learning_rate(config: Config, update: int) -> float:
    """The learning rate that update 1, 2, ..., `train.updates` is made with.

    With k the update, w the warm-up's updates and n all of them: max·k/w for k ≤ w, then by `schedule.name`

    - cosine: min + ½(max − min)(1 + cos π p) with p = (k − 1 − w) / (n − w). The rule is that of
      Loshchilov and Hutter, "SGDR", 2017; the first update after the warm-up still has the maximum.
    - wsd: the maximum, and in the last `decay_updates` (m) linearly down to the minimum, which update n has.
    - constant: the maximum.
    """
    scale = batch_scale(config)
    high, low = scale * config.optimizer.max_lr, scale * config.optimizer.min_lr
    warmup, updates, decay = config.schedule.warmup_updates, config.train.updates, config.schedule.decay_updates
    if update <= warmup:
        return high * update / warmup
    if config.schedule.name == "cosine":
        progress = (update - 1 - warmup) / (updates - warmup)
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * progress))
    if config.schedule.name == "wsd":
        progress = max(0, update - (updates - decay)) / max(1, decay)
        return high * (1 - progress) + low * progress  # in this form the end is exactly the minimum
    return high


def batch_scale(config: Config) -> float:
    """By what the learning rates are multiplied for the size of the batch.

    Linear: Goyal et al., "Accurate, Large Minibatch SGD", 2017. Root: Krizhevsky, "One weird trick", 2014; for AdamW
    Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022.
    """
    if config.optimizer.lr_scaling == "none":
        return 1.0
    ratio = config.batch.update_tokens / config.optimizer.lr_base_tokens
    return ratio if config.optimizer.lr_scaling == "linear" else math.sqrt(ratio)


FIRST_MUON_MOMENTUM = 0.85


def muon_momentum(config: Config, update: int) -> float:
    """Muon's momentum for update 1, 2, ...: from 0.85 linearly to `muon_momentum`, which update
    `muon_momentum_warmup` + 1 and all after it have.

    Source: the momentum warm-up of Keller Jordan's modded-nanogpt.
    """
    last, warmup = config.optimizer.muon_momentum, config.optimizer.muon_momentum_warmup
    progress = min(1.0, (update - 1) / warmup) if warmup else 1.0
    return min(FIRST_MUON_MOMENTUM, last) * (1 - progress) + last * progress
