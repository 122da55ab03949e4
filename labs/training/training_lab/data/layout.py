"""From a stream of documents to the pieces of each update: an endless sequence, planned and never drawn.

A layout answers one question, "which tokens does update u see?", as a pure function of u. So the whole state of the
data is one integer, the next pack, window or token of the sequence; resuming, micro-batches, ranks and readers in the
background cannot change it.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from typing import Any, NamedTuple, Protocol

import numpy as np

from training_lab.config_data import BatchConfig
from training_lab.data.packing import Packing, cut, pack_documents
from training_lab.data.stream import TokenStream
from training_lab.errors import UserError
from training_lab.identity import identity_of
from training_lab.seeds import U64, derived_seed, splitmix64

MOST_PLANNED = 64
"""Epochs, of packs their segments, that are planned ahead to know the most pieces of a run exactly; a longer run takes
an upper limit."""


class Pieces(NamedTuple):
    """Stretches of a token stream that nothing attends across; one entry of each int64 array is one piece."""

    starts: np.ndarray
    """Place of the first input token in the stream."""
    lengths: np.ndarray
    """Number of input tokens."""
    num_targets: np.ndarray
    """How many of the input tokens, from the first on, have a label; the label is the token after them."""
    rows: np.ndarray
    """Number of the row (a pack, a window, or the piece alone) that each is in, from 0, never falling. Micro-batches
    and ranks take whole rows."""

    def part(self, first: int, last: int) -> Pieces:
        """The pieces from number `first` up to, not including, `last`."""
        return Pieces(*(array[first:last] for array in self))

    def rows_of_rank(self, rank: int, world_size: int) -> Pieces:
        """The rows that one of several ranks takes, in turn; their numbers stay. Ranks may get unequally many."""
        return Pieces(*(array[self.rows % world_size == rank] for array in self))


class Layout(Protocol):
    """A plan of which tokens each update sees."""

    row_tokens: int | None
    """Token slots of every row; None where a row is as long as its piece."""

    def pieces_of_update(self, update: int) -> Pieces:
        """The pieces of update 1, 2, ...: any of them, in any order, always the same."""

    def state_after(self, update: int) -> dict[str, int]:
        """Where the endless sequence goes on after an update: all that a checkpoint needs to know."""

    def max_pieces(self, updates: int, micro_batches: int) -> int:
        """No micro-batch of the first `updates` updates has more pieces: the size of `cu_seqlens` for a whole run."""

    def manifest(self) -> dict[str, Any]:
        """What decides the sequence; its identity names it."""


class Windows:
    """Random stretches of `block_size` tokens, drawn with replacement by a counter: window i of the endless sequence
    is the same whatever was drawn before it."""

    def __init__(self, stream: TokenStream, block_size: int, batch_size: int, seed: int) -> None:
        self.stream, self.block_size, self.batch_size, self.seed = stream, block_size, batch_size, seed
        self.row_tokens: int | None = block_size
        self._key = derived_seed(seed, "windows")
        self._num_starts = stream.size - block_size

    def pieces_of_update(self, update: int) -> Pieces:
        first = (update - 1) * self.batch_size
        counters = [(self._key + i * 0x9E3779B97F4A7C15) & U64 for i in range(first, first + self.batch_size)]
        drawn = splitmix64(np.array(counters, dtype=np.uint64))
        # The high half of a 64 × 64-bit product maps the draw evenly onto the possible starts.
        starts = np.array([(int(value) * self._num_starts) >> 64 for value in drawn], dtype=np.int64)
        lengths = np.full(self.batch_size, self.block_size, dtype=np.int64)
        return Pieces(starts, lengths, lengths, np.arange(self.batch_size))

    def state_after(self, update: int) -> dict[str, int]:
        return {"next_window": update * self.batch_size}

    def max_pieces(self, updates: int, micro_batches: int) -> int:
        """The windows of a micro-batch; where one has a window less, padding takes its place."""
        return -(-self.batch_size // micro_batches)

    def manifest(self) -> dict[str, Any]:
        return {"layout": "windows-v1", "block_size": self.block_size, "seed": self.seed}


class TokenBudget:
    """Whole documents one after the other, in an order of their own in each epoch, `tokens` tokens an update.

    The epochs joined are one endless stream; update u takes tokens (u − 1)·budget to u·budget of it. A document is
    cut where an update ends and after every `max_positions` tokens.
    """

    def __init__(self, stream: TokenStream, budget: int, max_positions: int, seed: int) -> None:
        self.stream, self.budget, self.max_positions, self.seed = stream, budget, max_positions, seed
        self.row_tokens: int | None = None
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the documents, and where each ends in the epoch."""
        order = document_order(self.stream, self.seed, epoch)
        return order, np.cumsum(np.diff(self.stream.offsets)[order])

    def pieces_of_update(self, update: int) -> Pieces:
        epoch_tokens = self.stream.size
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
        return Pieces(np.concatenate(starts), joined, joined - 1, np.arange(len(joined)))

    def state_after(self, update: int) -> dict[str, int]:
        return {"next_token": update * self.budget}

    def max_pieces(self, updates: int, micro_batches: int) -> int:
        """Each document that an update touches, and each cut after `max_positions` tokens, counted generously."""
        cuts = self.budget // self.max_positions + 1
        num_epochs = (updates * self.budget - 1) // self.stream.size + 1
        if num_epochs > MOST_PLANNED:
            return 2 * most_that_fit(np.diff(self.stream.offsets), self.budget) + 2 + cuts
        most = 0
        for epoch in range(num_epochs):
            _, ends = self._epoch(epoch)
            edges = np.arange(-epoch * self.stream.size % self.budget, self.stream.size + self.budget, self.budget)
            touched = np.diff(np.searchsorted(ends, edges, "left"), prepend=0) + 1
            most = max(most, int(touched.max()))
        return 2 * most + cuts  # an update may touch the documents of two epochs

    def manifest(self) -> dict[str, Any]:
        return {
            "layout": "token-budget-v1",
            "tokens": self.budget,
            "max_positions": self.max_positions,
            "seed": self.seed,
        }


class Packs:
    """Rows of `pack_length` slots, filled with documents that fit together, `packs` of them an update.

    The documents of an epoch come in an order of their own and are packed in segments, each for itself. All packs of
    all epochs are one endless sequence that does not depend on how many an update takes.
    """

    SEGMENT_DOCUMENTS = 65_536

    def __init__(self, stream: TokenStream, pack_length: int, packs: int, packing: str, buffer: int, seed: int) -> None:
        self.stream, self.pack_length, self.packs, self.seed = stream, pack_length, packs, seed
        self.packing, self.buffer = packing, buffer
        self.row_tokens: int | None = pack_length
        self.num_segments = -(-stream.num_documents // self.SEGMENT_DOCUMENTS)
        self._order = functools.lru_cache(maxsize=2)(functools.partial(document_order, stream, seed))
        self._segment = functools.lru_cache(maxsize=4)(self._pack_segment)
        self._ends: list[int] = []  # how many packs there are up to and including each segment of the sequence
        self._most_pieces: list[int] = []  # the most in a pack of each segment
        self._planning = threading.RLock()

    def _pack_segment(self, number: int) -> Packing:
        """Segment `number` of the endless sequence; the documents in it are numbers of the stream."""
        epoch, segment = divmod(number, self.num_segments)
        first = segment * self.SEGMENT_DOCUMENTS
        order = self._order(epoch)[first : first + self.SEGMENT_DOCUMENTS]
        lengths = np.diff(self.stream.offsets)[order]
        packed = pack_documents(lengths, self.pack_length, self.packing, self.buffer)
        return packed._replace(documents=order[packed.documents])

    def segment(self, number: int) -> Packing:
        """The plan of a segment; the segments before it are planned too, once, because their packs come first."""
        with self._planning:
            while len(self._ends) <= number:
                before = self._ends[-1] if self._ends else 0
                packed = self._segment(len(self._ends))
                self._ends.append(before + packed.num_packs)
                self._most_pieces.append(int(np.diff(packed.pack_ends, prepend=0).max()))
            return self._segment(number)

    def find_pack(self, pack: int) -> tuple[int, int]:
        """The segment that pack 0, 1, ... of the sequence is in, and its number there."""
        while not self._ends or self._ends[-1] <= pack:
            self.segment(len(self._ends))
        number = bisect_right(self._ends, pack)
        return number, pack - (self._ends[number - 1] if number else 0)

    def pieces_between(self, first: int, last: int) -> Pieces:
        """The pieces of the packs from `first` up to, not including, `last` of the sequence."""
        found = []
        pack = first
        while pack < last:
            number, inside = self.find_pack(pack)
            packed = self.segment(number)
            end = min(inside + last - pack, packed.num_packs)
            bounds = np.concatenate([[0], packed.pack_ends])[inside : end + 1]
            piece = slice(bounds[0], bounds[-1])
            starts = self.stream.offsets[packed.documents[piece]] + packed.starts[piece]
            lengths = packed.lengths[piece]
            rows = np.repeat(np.arange(pack - first, pack - first + end - inside), np.diff(bounds))
            found.append(Pieces(starts, lengths, lengths - 1, rows))
            pack += end - inside
        return Pieces(*map(np.concatenate, zip(*found, strict=True)))

    def pieces_of_update(self, update: int) -> Pieces:
        return self.pieces_between((update - 1) * self.packs, update * self.packs)

    def state_after(self, update: int) -> dict[str, int]:
        return {"next_pack": update * self.packs}

    def epoch(self, epoch: int) -> list[Packing]:
        """The segments of one epoch."""
        return [self.segment(epoch * self.num_segments + number) for number in range(self.num_segments)]

    def max_pieces(self, updates: int, micro_batches: int) -> int:
        """The most pieces in any pack of the run, and a piece for its padding, times the packs of a micro-batch.

        A run that is too long to be planned ahead takes the number of the shortest pieces that fit into a pack.
        """
        last_pack = updates * self.packs - 1
        while len(self._ends) < MOST_PLANNED and (not self._ends or self._ends[-1] <= last_pack):
            self.segment(len(self._ends))
        if self._ends[-1] <= last_pack:
            sizes = cut(np.diff(self.stream.offsets), self.pack_length)[2]
            most = most_that_fit(sizes, self.pack_length) + 2
        else:
            last, inside = self.find_pack(last_pack)
            in_last = np.diff(self.segment(last).pack_ends[: inside + 1], prepend=0)
            most = max([int(in_last.max()), *self._most_pieces[:last]])
        return -(-self.packs // micro_batches) * (most + 1)

    def manifest(self) -> dict[str, Any]:
        buffer = {"buffer": self.buffer} if self.packing in ("best_fit", "bfd") else {}
        return {
            "layout": "packs-v1",
            "packing": self.packing,
            **buffer,
            "pack_length": self.pack_length,
            "segment_documents": self.SEGMENT_DOCUMENTS,
            "seed": self.seed,
        }


def most_that_fit(lengths: np.ndarray, size: int) -> int:
    """How many of the shortest fit into `size` together."""
    return int(np.searchsorted(np.cumsum(np.sort(lengths)), size, "right"))


def document_order(stream: TokenStream, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch reads the documents: by a hash of each one's content, the seed and the epoch. A
    document that is added changes no other's place relative to a third."""
    key = np.uint64(derived_seed(seed, "order", epoch))
    return np.argsort(splitmix64(stream.order_keys ^ key), kind="stable")


def make_layout(stream: TokenStream, batch: BatchConfig, max_positions: int, seed: int) -> Layout:
    """The configured layout. Raises UserError if the stream is smaller than one update."""
    if batch.layout == "packs":  # a text smaller than an update is gone through several times in it
        return Packs(stream, batch.pack_length, batch.packs, batch.packing, batch.packing_buffer, seed)
    needed = batch.update_tokens + (1 if batch.layout == "windows" else 0)
    if stream.size < needed:
        key = "batch.batch_size or batch.block_size" if batch.layout == "windows" else "batch.tokens"
        raise UserError(
            f"data: the training text is smaller than one update: needs {needed:,} tokens, has {stream.size:,}; "
            f"give more text, or lower {key}"
        )
    if batch.layout == "windows":
        return Windows(stream, batch.block_size, batch.batch_size, seed)
    return TokenBudget(stream, batch.tokens, max_positions, seed)


def plan_identity(stream: TokenStream, layout: Layout) -> str:
    """The name of an endless sequence of rows: what it reads, and how."""
    return identity_of({"stream": stream.identity, **layout.manifest()})
