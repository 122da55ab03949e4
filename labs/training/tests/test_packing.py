"""Documents into packs: nothing is lost, nothing is cut that need not be, and packs are as full as was promised."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest

from training_lab.data.packing import Packing, pack_documents

PACKINGS = ("best_fit", "next_fit", "bfd", "concat")
WHOLE = ("best_fit", "next_fit", "bfd")  # those that keep documents whole
BUFFERS = (1, 2, 64, 256, 10**6)


def drawn(seed: int, number: int, largest: int) -> list[int]:
    """Lengths from 1 to `largest`, many short and few long."""
    generator = np.random.default_rng(seed)
    return [math.ceil(largest**exponent) for exponent in generator.random(number).tolist()]


CASES = {
    # name: (lengths, pack length)
    "one token": ([1], 64),
    "one pack": ([64], 64),
    "one document of a pack and a token": ([65], 64),
    "all ones": ([1] * 300, 64),
    "all full packs": ([64] * 30, 64),
    "all a token less than a pack": ([63] * 30, 64),
    "all a token more than a pack": ([65] * 70, 64),
    "all two packs": ([128] * 30, 64),
    "halves": ([32] * 31, 64),
    "a token more than halves": ([33] * 31, 64),
    "around the pack length": ([63, 64, 65, 1, 127, 128, 129, 2, 62] * 9, 64),
    "a very long one": ([400_000], 4096),
    "a very long one among short ones": ([3, 70, 400_000, 5, 4095, 1, 4097, 8192], 4096),
    "long and short in turn": ([60, 4] * 40, 64),
    "shorter and shorter": (list(range(130, 0, -1)), 64),
    "longer and longer": (list(range(1, 131)), 64),
    "the smallest packs": ([1, 2, 3, 4, 5, 1, 1, 2] * 9, 2),
    "packs larger than everything": ([3, 1, 4, 1, 5, 9, 2, 6], 10_000),
    **{f"drawn {seed}": (drawn(seed, 200, largest), 64) for seed, largest in enumerate((5, 64, 64, 100, 1000))},
}

every_case = pytest.mark.parametrize("case", list(CASES))
every_packing = pytest.mark.parametrize("packing", PACKINGS)


def buffers_of(packing: str) -> tuple[int, ...]:
    """The buffers to try: for those that have none, any two."""
    return BUFFERS if packing in ("best_fit", "bfd") else (1, 64)


@functools.cache
def packed(case: str, packing: str, buffer: int) -> Packing:
    lengths, pack_length = CASES[case]
    return pack_documents(np.array(lengths, dtype=np.int64), pack_length, packing, buffer)


def pieces_of(packs: Packing) -> list[tuple[int, int, int]]:
    """(document, start, length) of each piece, in order."""
    return list(zip(packs.documents.tolist(), packs.starts.tolist(), packs.lengths.tolist(), strict=True))


def contents(packs: Packing) -> list[list[tuple[int, int, int]]]:
    """The pieces of each pack."""
    pieces = pieces_of(packs)
    return [pieces[first:last] for first, last in itertools.pairwise([0, *packs.pack_ends.tolist()])]


def tokens_of(packs: Packing) -> np.ndarray:
    """How many tokens each pack has."""
    return np.add.reduceat(packs.lengths, [0, *packs.pack_ends[:-1]])


# --- what holds for every packing ---


@every_case
@every_packing
def test_every_token_is_placed_exactly_once(case: str, packing: str) -> None:
    for buffer in buffers_of(packing):
        packs = packed(case, packing, buffer)
        ends = [0] * len(CASES[case][0])
        for document, start, length in sorted(pieces_of(packs)):
            assert start == ends[document], "a gap or an overlap"
            assert length >= 1
            ends[document] += length
        assert ends == CASES[case][0]


@every_case
@every_packing
def test_no_pack_is_empty_or_over_its_length(case: str, packing: str) -> None:
    for buffer in buffers_of(packing):
        packs = packed(case, packing, buffer)
        assert packs.pack_ends[-1] == len(packs.lengths) == len(packs.starts) == len(packs.documents)
        assert packs.num_packs == len(packs.pack_ends)
        assert np.diff(packs.pack_ends, prepend=0).min() >= 1
        assert tokens_of(packs).max() <= CASES[case][1]
        assert all(array.dtype == np.int64 for array in packs)


@every_case
@pytest.mark.parametrize("packing", WHOLE)
def test_only_documents_longer_than_a_pack_are_cut_and_those_into_full_packs_and_a_rest(
    case: str, packing: str
) -> None:
    for buffer in buffers_of(packing):
        lengths, pack_length = CASES[case]
        packs = packed(case, packing, buffer)
        found: dict[int, list[int]] = {}
        for document, _, length in sorted(pieces_of(packs)):
            found.setdefault(document, []).append(length)
        for document, length in enumerate(lengths):
            full, rest = divmod(length, pack_length)
            assert found[document] == [pack_length] * full + [rest] * (rest > 0)


@every_case
@every_packing
def test_the_number_of_pieces_follows_from_the_lengths_alone(case: str, packing: str) -> None:
    for buffer in buffers_of(packing):
        lengths, pack_length = CASES[case]
        expected = sum(math.ceil(length / pack_length) for length in lengths)
        if packing == "concat":  # a piece begins where a document begins and where a pack begins, once if both do
            begins = [end - length for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)]
            both = sum(begin % pack_length == 0 for begin in begins)
            expected = len(lengths) + math.ceil(sum(lengths) / pack_length) - both
        assert len(packed(case, packing, buffer).lengths) == expected


@every_case
@every_packing
def test_the_same_lengths_give_the_same_packs_and_are_left_alone(case: str, packing: str) -> None:
    for buffer in buffers_of(packing):
        lengths = np.array(CASES[case][0], dtype=np.int64)
        packs = pack_documents(lengths, CASES[case][1], packing, buffer)
        assert lengths.tolist() == CASES[case][0]
        again = packed(case, packing, 1 if packing in ("next_fit", "concat") else buffer)
        assert pieces_of(packs) == pieces_of(again)
        assert packs.pack_ends.tolist() == again.pack_ends.tolist()


# --- best fit ---


def cut_sizes(case: str) -> list[int]:
    """The pieces to be placed, in the order of the documents."""
    lengths, pack_length = CASES[case]
    return [min(pack_length, length - start) for length in lengths for start in range(0, length, pack_length)]


def number_of(case: str) -> dict[tuple[int, int], int]:
    """The number of each piece by its document and start."""
    lengths, pack_length = CASES[case]
    keys = [(number, start) for number, length in enumerate(lengths) for start in range(0, length, pack_length)]
    return {key: number for number, key in enumerate(keys)}


def packs_of_numbers(case: str, packing: str, buffer: int) -> list[list[int]]:
    """For each pack, the numbers of its pieces."""
    numbers = number_of(case)
    packs = contents(packed(case, packing, buffer))
    return [[numbers[document, start] for document, start, _ in pack] for pack in packs]


def slow_best_fit(sizes: list[int], pack_length: int, buffer: int) -> list[list[int]]:
    """Best fit as it is told: look through all that wait, each time."""
    stream = list(enumerate(sizes))
    waiting, stream = stream[:buffer], stream[buffer:]  # the oldest first
    packs = []
    while waiting:
        pack: list[int] = []
        left = pack_length
        chosen: tuple[int, int] | None = waiting[0]
        while chosen is not None:
            waiting.remove(chosen)
            pack.append(chosen[0])
            left -= chosen[1]
            if stream:
                waiting.append(stream.pop(0))
            chosen = None
            for piece in waiting:
                if piece[1] <= left and (chosen is None or piece[1] > chosen[1]):
                    chosen = piece
        packs.append(pack)
    return packs


@every_case
def test_best_fit_is_what_it_says(case: str) -> None:
    for buffer in BUFFERS:
        assert packs_of_numbers(case, "best_fit", buffer) == slow_best_fit(cut_sizes(case), CASES[case][1], buffer)


@every_case
def test_the_piece_that_waits_longest_always_starts_the_next_pack(case: str) -> None:
    for buffer in BUFFERS:
        placed: set[int] = set()
        oldest = 0
        for pack in packs_of_numbers(case, "best_fit", buffer):
            while oldest in placed:
                oldest += 1
            assert pack[0] == oldest
            placed.update(pack)


@every_case
def test_no_piece_strays_further_than_the_buffer_lets_it(case: str) -> None:
    for buffer in BUFFERS:
        packs = packs_of_numbers(case, "best_fit", buffer)
        order = [number for pack in packs for number in pack]
        pack_of_place = [number for number, pack in enumerate(packs) for _ in pack]
        for place, number in enumerate(order):
            assert number < place + buffer, "placed before it could wait"
            came = max(
                number - buffer, 0
            )  # it came when the piece at this place left, and fewer than `buffer` were older
            assert pack_of_place[place] <= pack_of_place[came] + buffer


@every_case
def test_best_fit_of_one_that_waits_is_next_fit(case: str) -> None:
    assert packs_of_numbers(case, "best_fit", 1) == packs_of_numbers(case, "next_fit", 1)


# --- next fit and concat ---


@every_case
def test_next_fit_keeps_the_order_and_begins_a_pack_only_where_it_must(case: str) -> None:
    sizes = cut_sizes(case)
    packs = packs_of_numbers(case, "next_fit", 1)
    assert [number for pack in packs for number in pack] == list(range(len(sizes)))
    for pack, following in itertools.pairwise(packs):
        assert sum(sizes[number] for number in pack) + sizes[following[0]] > CASES[case][1]


@every_case
def test_concat_is_the_documents_in_order_cut_where_packs_end(case: str) -> None:
    lengths, pack_length = CASES[case]
    tokens = [(document, place) for document, length in enumerate(lengths) for place in range(length)]
    for number, pack in enumerate(contents(packed(case, "concat", 1))):
        found = [(document, place) for document, start, size in pack for place in range(start, start + size)]
        assert found == tokens[number * pack_length : (number + 1) * pack_length]


# --- best-fit decreasing ---


def slow_best_fit_decreasing(sizes: list[int], pack_length: int, buffer: int) -> list[list[list[int]]]:
    """The packs of each window of pieces: the longest first, into the fullest pack that takes it."""
    windows = []
    for first in range(0, len(sizes), buffer):
        window = range(first, min(first + buffer, len(sizes)))
        packs: list[list[int]] = []
        for number in sorted(window, key=lambda number: (-sizes[number], number)):
            room = [pack_length - sum(sizes[other] for other in pack) for pack in packs]
            fitting = [(left, pack) for pack, left in enumerate(room) if left >= sizes[number]]
            if fitting:
                packs[min(fitting)[1]].append(number)
            else:
                packs.append([number])
        windows.append(packs)
    return windows


@every_case
def test_best_fit_decreasing_is_what_it_says_up_to_the_order_of_packs(case: str) -> None:
    for buffer in BUFFERS:
        found = iter(packs_of_numbers(case, "bfd", buffer))
        for window in slow_best_fit_decreasing(cut_sizes(case), CASES[case][1], buffer):
            assert sorted(itertools.islice(found, len(window))) == sorted(window)
        assert next(found, None) is None


def test_the_packs_of_best_fit_decreasing_do_not_come_sorted_by_length() -> None:
    first = [pack[0][2] for pack in contents(pack_documents(web_lengths(), 4096, "bfd", 1000))][:200]
    assert first != sorted(first)
    assert first != sorted(first, reverse=True)
    halves = np.mean(first[:100]), np.mean(first[100:])
    assert abs(halves[0] - halves[1]) < 0.25 * np.mean(first)


# --- how full packs are, on lengths as FineWeb has them ---


@functools.cache
def web_lengths() -> np.ndarray:
    """Lengths of 60,000 documents, as FineWeb's tokens are distributed."""
    generator = np.random.default_rng(0)
    return np.clip(np.exp(generator.normal(math.log(403), 1.037, 60_000)), 24, 400_000).astype(np.int64)


@functools.cache
def web_packs(packing: str, buffer: int) -> Packing:
    return pack_documents(web_lengths(), 4096, packing, buffer)


def fill(packs: Packing) -> float:
    return float(packs.lengths.sum() / (4096 * packs.num_packs))


@pytest.mark.parametrize(
    ("packing", "buffer", "least", "most"),
    [("best_fit", 256, 0.998, 1.0), ("next_fit", 1, 0.80, 0.88), ("bfd", 1000, 0.994, 1.0)],
)
def test_packs_of_web_text_are_as_full_as_promised(packing: str, buffer: int, least: float, most: float) -> None:
    packs = web_packs(packing, buffer)
    assert packs.lengths.sum() == web_lengths().sum()
    assert least <= fill(packs) <= most


def test_every_pack_of_concat_is_full_but_the_last() -> None:
    tokens = tokens_of(web_packs("concat", 1))
    assert set(tokens[:-1].tolist()) == {4096}
    assert 1 <= tokens[-1] <= 4096


def test_hardly_a_pack_of_best_fit_is_less_than_nine_tenths_full() -> None:
    tokens = tokens_of(web_packs("best_fit", 256))
    assert (tokens < 0.9 * 4096).sum() < 5
    assert (tokens[: len(tokens) // 2] >= 0.9 * 4096).all()  # only the last ones have nothing to choose from


@pytest.mark.parametrize(
    ("packing", "share"), [("best_fit", 0.013), ("next_fit", 0.013), ("bfd", 0.013), ("concat", 0.16)]
)
def test_of_web_text_the_share_of_cut_documents_is_as_promised(packing: str, share: float) -> None:
    packs = web_packs(packing, 1000 if packing == "bfd" else 256)
    is_cut = np.bincount(packs.documents) > 1
    tolerance = 0.02 if packing == "concat" else 0.005
    assert abs(is_cut.mean() - share) < tolerance


def test_more_that_wait_fill_packs_better() -> None:
    fills = [fill(web_packs("best_fit", buffer)) for buffer in (1, 4, 16, 64, 256)]
    assert fills == sorted(fills)
