"""Small streams of documents and plans over them, for the tests of layouts and batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from training_lab.data.layout import Pieces, TokenBudget
from training_lab.data.stream import NO_END_OF_TEXT, EndOfText, TokenStream


def stream_of(lengths: Sequence[int], end_of_text: EndOfText = NO_END_OF_TEXT) -> TokenStream:
    """A stream of documents of these lengths, of which token i is i itself; what is put between them not counted."""
    sizes = np.array(lengths, dtype=np.int64)
    tokens = np.arange(sizes.sum(), dtype=np.uint32)
    content, sha256 = (hashes_of(kind, len(lengths)) for kind in ("content", "tokens"))
    return TokenStream(tokens, np.cumsum(sizes) - sizes, sizes, content, sha256, "document {}".format, end_of_text)


def hashes_of(kind: str, number: int) -> np.ndarray:
    """As many hashes of 32 bytes as there are documents; those of the first are the same however many there are."""
    digests = [hashlib.sha256(f"{kind} {document}".encode()).digest() for document in range(number)]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(number, 32)


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
