"""Small streams of documents and plans over them, for the tests of layouts and batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from training_lab.data.corpus import TokenStream
from training_lab.data.layout import Pieces, TokenBudget
from training_lab.randomness import splitmix64


def stream_of(lengths: Sequence[int]) -> TokenStream:
    """A stream of documents of these lengths, where token i of the stream is i itself."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    hashes = splitmix64(np.arange(len(lengths), dtype=np.uint64))
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    return TokenStream(tokens, offsets, hashes, [f"document {number}" for number in range(len(lengths))])


def inputs_of(pieces: Pieces) -> list[int]:
    """The places in the stream of all input tokens, in order."""
    return [
        place
        for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
        for place in range(start, start + length)
    ]


def same(one: Pieces, other: Pieces) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype == np.int64 for a, b in zip(one, other, strict=True))


MANY = [3, 1, 17, 40, 1, 8, 2, 64, 5, 30, 11, 1, 1, 9, 25]

PLANS = {
    # name: (documents, budget, max_positions)
    "documents shorter than an update": (MANY, 50, 16),
    "documents longer than an update": ([70, 90, 40], 16, 8),
    "an update is an epoch": (MANY, sum(MANY), 64),
    "an update is nearly an epoch": (MANY, sum(MANY) - 1, 64),
    "a single document": ([101], 7, 4),
    "documents of one token": ([1] * 37, 5, 2),
    "the smallest of everything": ([1, 1], 2, 2),
    "no cuts but the update's": (MANY, 33, 10_000),
}

every_plan = pytest.mark.parametrize("plan", list(PLANS))


def token_budget(plan: str, seed: int = 0) -> TokenBudget:
    lengths, budget, max_positions = PLANS[plan]
    return TokenBudget(stream_of(lengths), budget, max_positions, seed)
