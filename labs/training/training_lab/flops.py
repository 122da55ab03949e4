"""Floating-point operations of matrix products in training: pure formulas, one multiplication and addition as two.

Counted: the linear layers, attention within pieces, and the head, forward and twice that backward. Not counted: norms,
GELU, softmax, optimizer. Symbols: L layers of width d, T input tokens in pieces of n₁, n₂, ..., vocabulary V.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from training_lab.config import ModelConfig

FORMULAS = {
    "causal": "72·T·L·d² + 6·T·V·d + 6·L·d·Σ n(n + 1): of attention only the pairs that may attend, piece by piece",
    "full": "72·T·L·d² + 6·T·V·d + 12·L·d·Σ n²: of attention the whole square of each piece, as it is often reported",
}


class Flops(NamedTuple):
    """One count for each convention of attention."""

    causal: int
    """Only pairs that may attend: 6·L·d·Σ n(n + 1). What has to be computed."""
    full: int
    """The whole square of each piece: 12·L·d·Σ n². What is often reported."""


def training_flops(model: ModelConfig, vocab_size: int, tokens: int, squares: int) -> Flops:
    """Operations to train on `tokens` input tokens in pieces whose squared lengths add up to `squares`."""
    layers, width = model.num_layers, model.d_model
    products = 72 * tokens * layers * width**2 + 6 * tokens * vocab_size * width
    attention = 6 * layers * width
    return Flops(products + attention * (squares + tokens), products + 2 * attention * squares)


def flops_of_pieces(model: ModelConfig, vocab_size: int, lengths: Iterable[int]) -> Flops:
    """Operations to train on pieces of these many input tokens each."""
    sizes = [int(length) for length in lengths]
    return training_flops(model, vocab_size, sum(sizes), sum(size * size for size in sizes))
