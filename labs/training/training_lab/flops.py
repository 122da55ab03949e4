"""Floating-point operations of matrix products in training: pure formulas, one multiplication and addition as two.

Counted: the linear layers, attention within pieces, and the head, forward and twice that backward. Not counted: norms,
GELU, softmax, optimizer. Symbols: L layers of width d, T input tokens in pieces of n₁, n₂, ..., vocabulary V.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from training_lab.config import ModelConfig


class Flops(NamedTuple):
    """One count for each convention of attention."""

    causal: int
    """Only pairs that may attend: 6·L·d·Σ n(n + 1). What has to be computed."""
    full: int
    """The whole square of each piece: 12·L·d·Σ n². What is often reported."""


def training_flops(model: ModelConfig, vocab_size: int, lengths: np.ndarray) -> Flops:
    """Operations to train on pieces of `lengths` input tokens: 72·T·L·d² + 6·T·V·d, and attention."""
    layers, width, tokens = model.num_layers, model.d_model, int(lengths.sum())
    squares = int((lengths.astype(np.int64) ** 2).sum())
    products = 72 * tokens * layers * width**2 + 6 * tokens * vocab_size * width
    attention = 6 * layers * width
    return Flops(products + attention * (squares + tokens), products + 2 * attention * squares)
