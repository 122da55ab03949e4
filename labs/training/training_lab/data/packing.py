"""Documents into packs: rows of a fixed number of token slots, filled as well as can be. Pure functions of lengths.

A document longer than a pack is cut into full packs and a rest; a shorter one stays whole, except with `concat`.
Measured on lengths as FineWeb's have them, in the table of `docs/data.md`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from training_lab.seeds import splitmix64

KEY_BITS = 32
OLDEST_FIRST = (1 << KEY_BITS) - 1


class Packing(NamedTuple):
    """Pieces in the order of their packs; int64 arrays."""

    documents: np.ndarray
    """Number of the document that each piece is of."""
    starts: np.ndarray
    """First token of the piece in its document."""
    lengths: np.ndarray
    """Tokens of the piece."""
    pack_ends: np.ndarray
    """For each pack, how many pieces there are up to and including it."""

    @property
    def num_packs(self) -> int:
        return len(self.pack_ends)


def pack_documents(lengths: np.ndarray, pack_length: int, packing: str, buffer: int) -> Packing:
    """Packs documents of these lengths, each at least 1, in this order. Every token is placed exactly once."""
    if packing == "concat":
        return concatenate(lengths, pack_length)
    documents, starts, sizes = cut(lengths, pack_length)
    if packing == "best_fit":
        order, pack_ends = best_fit(sizes, pack_length, buffer)
    elif packing == "next_fit":
        order, pack_ends = next_fit(sizes, pack_length)
    else:
        order, pack_ends = best_fit_decreasing(sizes, pack_length, buffer)
    return Packing(documents[order], starts[order], sizes[order], pack_ends)


def cut(lengths: np.ndarray, pack_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pieces of documents that are cut after every `pack_length` tokens: document, start and length of each."""
    num_pieces = -(-lengths // pack_length)
    documents = np.repeat(np.arange(len(lengths)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    starts = (np.arange(len(documents)) - first_piece[documents]) * pack_length
    return documents, starts, np.minimum(pack_length, lengths[documents] - starts)


def best_fit(sizes: np.ndarray, pack_length: int, buffer: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of pieces, and where packs end, by streaming best-fit.

    `buffer` pieces wait. A pack takes the one that waits longest, then again and again the longest that still fits,
    the oldest among equals; the next piece of the stream takes the place of each that leaves. So nothing strays
    further from its place than the buffer lets it, and no pack is left nearly empty but the last ones.
    """
    waiting = [(size << KEY_BITS) | (OLDEST_FIRST - number) for number, size in enumerate(sizes.tolist())]
    keys = sorted(waiting[:buffer])  # by size, then the newest first, so that a search from above finds the oldest
    is_placed = bytearray(len(waiting))
    order: list[int] = []
    pack_ends: list[int] = []
    oldest, following = 0, len(keys)
    while keys:
        while is_placed[oldest]:
            oldest += 1
        left = pack_length
        place = bisect_left(keys, waiting[oldest])
        while place >= 0:
            key = keys.pop(place)
            number = OLDEST_FIRST - (key & OLDEST_FIRST)
            is_placed[number] = True
            order.append(number)
            left -= key >> KEY_BITS
            if following < len(waiting):
                insort(keys, waiting[following])
                following += 1
            place = bisect_left(keys, (left + 1) << KEY_BITS) - 1
        pack_ends.append(len(order))
    return np.array(order, dtype=np.int64), np.array(pack_ends, dtype=np.int64)


def next_fit(sizes: np.ndarray, pack_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces in their order; a new pack begins with each that does not fit into the one before."""
    ends = np.cumsum(sizes)
    pack_ends = []
    first = 0
    while first < len(sizes):
        begin = ends[first] - sizes[first]
        first = int(np.searchsorted(ends, begin + pack_length, "right"))
        pack_ends.append(first)
    return np.arange(len(sizes)), np.array(pack_ends, dtype=np.int64)


def best_fit_decreasing(sizes: np.ndarray, pack_length: int, buffer: int) -> tuple[np.ndarray, np.ndarray]:
    """`buffer` pieces at a time, the longest first, each into the fullest pack that still takes it.

    That leaves packs sorted by the length of their first piece, so those of one time are put into another order.
    """
    packs: list[list[int]] = []
    for first in range(0, len(sizes), buffer):
        window = sizes[first : first + buffer]
        opened: list[list[int]] = []
        room: list[tuple[int, int]] = []  # (slots left, number of the pack), sorted
        for number in np.argsort(-window, kind="stable").tolist():
            size = int(window[number])
            place = bisect_left(room, (size, 0))
            if place < len(room):
                left, pack = room.pop(place)
            else:
                left, pack = pack_length, len(opened)
                opened.append([])
            opened[pack].append(first + number)
            insort(room, (left - size, pack))
        shuffled = np.argsort(splitmix64(np.arange(len(opened), dtype=np.uint64)), kind="stable")
        packs += [opened[pack] for pack in shuffled.tolist()]
    order = [number for pack in packs for number in pack]
    return np.array(order, dtype=np.int64), np.cumsum([len(pack) for pack in packs])


def concatenate(lengths: np.ndarray, pack_length: int) -> Packing:
    """Documents one after the other, cut where a pack ends: every pack full but the last."""
    ends = np.cumsum(lengths)
    cuts = np.union1d(ends - lengths, np.arange(0, ends[-1], pack_length))
    sizes = np.diff(cuts, append=ends[-1])
    documents = np.searchsorted(ends, cuts, "right")
    pack_ends = np.searchsorted(cuts, np.arange(pack_length, ends[-1] + pack_length, pack_length), "left")
    return Packing(documents, cuts - (ends - lengths)[documents], sizes, pack_ends)
