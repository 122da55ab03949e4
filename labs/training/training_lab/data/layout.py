"""From a stream of documents to the pieces of each update: an endless sequence, planned and never drawn.

A layout answers one question, "which tokens does update u see?", as a pure function of u. So the whole state of the
data is the number of the next update; resuming, micro-batches and readers in the background cannot change it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import numpy as np

from training_lab.config import BatchConfig
from training_lab.data.corpus import TokenStream
from training_lab.errors import UserError
from training_lab.identity import identity_of
from training_lab.randomness import U64, derived_seed, splitmix64


class Pieces(NamedTuple):
    """Stretches of a token stream that nothing attends across; one entry of each int64 array is one piece."""

    starts: np.ndarray
    """Index of the first input token in the stream."""
    lengths: np.ndarray
    """Number of input tokens."""
    num_targets: np.ndarray
    """How many of the input tokens, from the first on, have a label; the label is the token after them."""

    def part(self, first: int, last: int) -> Pieces:
        """The pieces from number `first` up to, not including, `last`."""
        return Pieces(*(array[first:last] for array in self))


class Layout(Protocol):
    """A plan of which tokens each update sees."""

    def pieces_of_update(self, update: int) -> Pieces:
        """The pieces of update 1, 2, ...: any of them, in any order, always the same."""

    def manifest(self) -> dict[str, Any]:
        """What decides the plan; its identity names it."""


class Windows:
    """Random stretches of `block_size` tokens, drawn with replacement by a counter: window i of the endless sequence
    is the same whatever was drawn before it."""

    def __init__(self, stream: TokenStream, block_size: int, batch_size: int, seed: int) -> None:
        self.stream, self.block_size, self.batch_size, self.seed = stream, block_size, batch_size, seed
        self._key = derived_seed(seed, "windows")
        self._num_starts = len(stream.tokens) - block_size

    def pieces_of_update(self, update: int) -> Pieces:
        first = (update - 1) * self.batch_size
        counters = [(self._key + i * 0x9E3779B97F4A7C15) & U64 for i in range(first, first + self.batch_size)]
        drawn = splitmix64(np.array(counters, dtype=np.uint64))
        # The high half of a 64 × 64-bit product maps the draw evenly onto the possible starts.
        starts = np.array([(int(value) * self._num_starts) >> 64 for value in drawn], dtype=np.int64)
        lengths = np.full(self.batch_size, self.block_size, dtype=np.int64)
        return Pieces(starts, lengths, lengths)

    def manifest(self) -> dict[str, Any]:
        return {"layout": "windows-v1", "block_size": self.block_size, "batch_size": self.batch_size, "seed": self.seed}


class TokenBudget:
    """Whole documents one after the other, in an order of their own in each epoch, `tokens` tokens an update.

    The epochs joined are one endless stream; update u takes tokens (u − 1)·budget to u·budget of it. A document is
    cut where an update ends and after every `max_positions` tokens.
    """

    def __init__(self, stream: TokenStream, budget: int, max_positions: int, seed: int) -> None:
        self.stream, self.budget, self.max_positions, self.seed = stream, budget, max_positions, seed
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the documents, and where each ends in the epoch."""
        key = np.uint64(derived_seed(self.seed, "order", epoch))
        order = np.argsort(splitmix64(self.stream.hashes ^ key), kind="stable")
        return order, np.cumsum(np.diff(self.stream.offsets)[order])

    def pieces_of_update(self, update: int) -> Pieces:
        epoch_tokens = len(self.stream.tokens)
        first, last = (update - 1) * self.budget, update * self.budget
        starts, lengths = [], []
        for epoch in range(first // epoch_tokens, (last - 1) // epoch_tokens + 1):
            low = max(first - epoch * epoch_tokens, 0)
            high = min(last - epoch * epoch_tokens, epoch_tokens)
            order, ends = self._epoch(epoch)
            for place in range(np.searchsorted(ends, low, "right"), np.searchsorted(ends, high, "left") + 1):
                begin, end = self.stream.offsets[order[place]], self.stream.offsets[order[place] + 1]
                shift = begin - (ends[place] - (end - begin))  # from places in the epoch to places in the stream
                cuts = np.arange(max(low + shift, begin), min(high + shift, end), self.max_positions)
                starts.append(cuts)
                lengths.append(np.minimum(self.max_positions, min(high + shift, end) - cuts))
        joined = np.concatenate(lengths)
        return Pieces(np.concatenate(starts), joined, joined - 1)

    def manifest(self) -> dict[str, Any]:
        return {
            "layout": "token-budget-v1",
            "tokens": self.budget,
            "max_positions": self.max_positions,
            "seed": self.seed,
        }


def make_layout(stream: TokenStream, batch: BatchConfig, max_positions: int, seed: int) -> Layout:
    """The configured layout. Raises UserError if the stream is smaller than one update."""
    needed = batch.update_tokens + (1 if batch.layout == "windows" else 0)
    if len(stream.tokens) < needed:
        key = "batch.batch_size or batch.block_size" if batch.layout == "windows" else "batch.tokens"
        raise UserError(
            f"data: the training text is smaller than one update: needs {needed:,} tokens, has {len(stream.tokens):,}; "
            f"give more text, or lower {key}"
        )
    if batch.layout == "windows":
        return Windows(stream, batch.block_size, batch.batch_size, seed)
    return TokenBudget(stream, batch.tokens, max_positions, seed)


def plan_identity(stream: TokenStream, layout: Layout) -> str:
    """The name of an endless sequence of updates: what it reads, and how."""
    return identity_of({"stream": stream.identity, **layout.manifest()})
