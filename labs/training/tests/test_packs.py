"""The endless sequence of packs: the same for every way of asking, over the edges of segments and epochs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from streams import MANY, inputs_of, same, stream_of, token_budget
from streams import PLANS as BUDGETS

from training_lab.config_data import BatchConfig
from training_lab.data.batches import make_update_data
from training_lab.data.layout import Packs, Pieces, document_order, make_layout
from training_lab.data.stream import EndOfText

PACKINGS = ("best_fit", "next_fit", "bfd", "concat")

PLANS = {
    # name: (documents, pack length, packs in an update, documents in a segment)
    "several segments": (MANY, 16, 3, 4),
    "a document is a segment": (MANY, 16, 3, 1),
    "a segment is an epoch": (MANY, 16, 5, 15),
    "a segment is longer than an epoch": (MANY, 16, 5, 1000),
    "a last segment of one document": (MANY, 16, 2, 14),
    "one pack in an update": (MANY, 64, 1, 4),
    "an update of several epochs": ([5, 3, 2], 8, 4, 2),
    "a single document": ([101], 8, 3, 4),
    "a document smaller than a pack": ([3], 64, 4, 4),
    "the smallest of everything": ([2], 2, 1, 1),
    "rests of one token": ([17] * 9, 16, 4, 3),
    "documents of one token": ([1] * 20, 4, 2, 6),
}

every_plan = pytest.mark.parametrize("plan", list(PLANS))
every_packing = pytest.mark.parametrize("packing", PACKINGS)


@pytest.fixture(autouse=True)
def segments_of_the_plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments so small that a few updates cross many of them; those of the plan, where the test has one."""
    called = getattr(request.node, "callspec", None)
    plan = called.params.get("plan") if called else None
    monkeypatch.setattr(Packs, "SEGMENT_DOCUMENTS", PLANS[plan][3] if plan in PLANS else 40)


def packs_of(plan: str, packing: str = "best_fit", seed: int = 0, packs: int = 0) -> Packs:
    lengths, pack_length, of_plan, _ = PLANS[plan]
    return Packs(stream_of(lengths), pack_length, packs or of_plan, packing, 4, seed)


def web_packs(packs: int, packing: str = "best_fit") -> Packs:
    """Packs over 150 documents of very different lengths, so four segments an epoch."""
    lengths = np.ceil(300 ** np.random.default_rng(1).random(150)).astype(int)
    return Packs(stream_of(lengths.tolist()), 64, packs, packing, 16, 5)


def joined(parts: Sequence[Pieces]) -> Pieces:
    return Pieces(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def shifted(pieces: Pieces, rows: int) -> Pieces:
    return pieces._replace(rows=pieces.rows + rows)


def packs_of_epochs(layout: Packs, epochs: int) -> list[int]:
    """How many packs there are before each epoch, and before the one after the last."""
    sizes = [sum(segment.num_packs for segment in layout.epoch(epoch)) for epoch in range(epochs)]
    return [0, *itertools.accumulate(sizes)]


# --- one sequence ---


@every_plan
@every_packing
def test_every_epoch_places_every_token_exactly_once(plan: str, packing: str) -> None:
    layout = packs_of(plan, packing)
    for first, last in itertools.pairwise(packs_of_epochs(layout, 3)):
        assert sorted(inputs_of(layout.pieces_between(first, last))) == list(range(layout.stream.size))


@every_plan
@every_packing
def test_the_updates_joined_are_the_packs_of_the_epochs_joined(plan: str, packing: str) -> None:
    layout = packs_of(plan, packing)
    end = packs_of_epochs(layout, 3)[-1]
    num_updates = math.ceil(end / layout.packs)
    updates = [layout.pieces_of_update(update) for update in range(1, num_updates + 1)]
    found = joined([shifted(pieces, number * layout.packs) for number, pieces in enumerate(updates)])
    expected = layout.pieces_between(0, num_updates * layout.packs)
    assert same(found, expected)
    epochs = [segment for epoch in range(3) for segment in layout.epoch(epoch)]
    starts = [layout.stream.offsets[segment.documents] + segment.starts for segment in epochs]
    in_epochs = joined([expected]).rows < end
    assert np.concatenate(starts).tolist() == expected.starts[in_epochs].tolist()
    assert np.concatenate([segment.lengths for segment in epochs]).tolist() == expected.lengths[in_epochs].tolist()


@every_plan
@every_packing
def test_an_update_has_its_number_of_packs_none_empty_and_none_over_its_length(plan: str, packing: str) -> None:
    layout = packs_of(plan, packing)
    for update in range(1, 20):
        pieces = layout.pieces_of_update(update)
        assert pieces.rows.tolist() == sorted(pieces.rows.tolist())
        tokens = np.bincount(pieces.rows, weights=pieces.lengths)
        assert len(tokens) == layout.packs
        assert tokens.min() >= 1
        assert tokens.max() <= layout.pack_length == layout.row_tokens
        assert pieces.num_targets.tolist() == (pieces.lengths - 1).tolist()


@every_plan
@every_packing
def test_no_piece_of_a_pack_holds_tokens_of_two_documents(plan: str, packing: str) -> None:
    layout = packs_of(plan, packing)
    for update in range(1, 20):
        pieces = layout.pieces_of_update(update)
        first, last = (
            np.searchsorted(layout.stream.offsets, places, "right")
            for places in (pieces.starts, pieces.starts + pieces.lengths - 1)
        )
        assert first.tolist() == last.tolist()


@every_plan
@pytest.mark.parametrize("packing", ["best_fit", "next_fit", "bfd"])
@pytest.mark.parametrize("place", ["none", "start", "end"])
def test_the_target_tokens_of_an_epoch_follow_from_the_lengths_alone(plan: str, packing: str, place: str) -> None:
    lengths, pack_length, packs, _ = PLANS[plan]
    end_of_text = {"none": EndOfText(), "start": EndOfText("start"), "end": EndOfText("end")}[place]
    layout = Packs(stream_of(lengths, end_of_text), pack_length, packs, packing, 4, 0)
    sizes = [length + end_of_text.size for length in lengths]
    for first, last in itertools.pairwise(packs_of_epochs(layout, 3)):
        targets = layout.pieces_between(first, last).num_targets.sum()
        assert targets == sum(size - math.ceil(size / pack_length) for size in sizes)


# --- however it is asked for ---


@every_plan
@every_packing
def test_any_update_of_packs_in_any_order_is_the_same(plan: str, packing: str) -> None:
    updates = list(range(1, 26))
    layout = packs_of(plan, packing)
    in_order = {update: layout.pieces_of_update(update) for update in updates}
    random.Random(0).shuffle(updates)
    other = packs_of(plan, packing)
    for update in updates:
        assert same(layout.pieces_of_update(update), in_order[update])
        assert same(other.pieces_of_update(update), in_order[update])


@every_plan
@every_packing
def test_a_run_that_stops_and_goes_on_at_any_position_sees_the_same(plan: str, packing: str) -> None:
    whole = packs_of(plan, packing)
    for stop in range(12):
        resumed = packs_of(plan, packing)  # knows nothing of what came before
        for update in range(stop + 1, stop + 4):
            assert same(resumed.pieces_of_update(update), whole.pieces_of_update(update))
        again = packs_of(plan, packing)  # stopped a second time
        assert same(again.pieces_of_update(stop + 4), whole.pieces_of_update(stop + 4))


@every_plan
def test_the_state_is_the_next_pack_of_the_sequence_and_enough_to_go_on(plan: str) -> None:
    whole = packs_of(plan)
    for update in range(30):
        state = whole.state_after(update)
        assert state == {"next_pack": update * whole.packs}
        first = state["next_pack"]
        assert same(packs_of(plan).pieces_between(first, first + whole.packs), whole.pieces_of_update(update + 1))
    assert whole.state_after(10**12) == {"next_pack": 10**12 * whole.packs}


@every_packing
def test_the_packs_of_an_update_twice_as_large_are_those_of_two_updates(packing: str) -> None:
    small, large = web_packs(35, packing), web_packs(70, packing)
    for update in range(1, 12):
        first, second = small.pieces_of_update(2 * update - 1), small.pieces_of_update(2 * update)
        assert same(large.pieces_of_update(update), joined([first, shifted(second, 35)]))


@every_plan
def test_the_sequence_of_packs_does_not_depend_on_how_many_make_an_update(plan: str) -> None:
    expected = packs_of(plan).pieces_between(0, 60)
    for size in (1, 2, 3, 20, 60):
        layout = packs_of(plan, packs=size)
        updates = [shifted(layout.pieces_of_update(number + 1), number * size) for number in range(60 // size)]
        assert same(joined(updates), expected)


@every_packing
@pytest.mark.parametrize("packs", [1, 6, 35])
def test_ranks_take_whole_packs_and_together_the_update(packing: str, packs: int) -> None:
    layout = web_packs(packs, packing)
    for update in (1, 2, 9):
        pieces = layout.pieces_of_update(update)
        for world_size in (1, 2, 4, 7):
            ranks = [pieces.rows_of_rank(rank, world_size) for rank in range(world_size)]
            assert [set((part.rows % world_size).tolist()) - {rank} for rank, part in enumerate(ranks)] == (
                [set()] * world_size
            )
            together = joined(ranks)
            assert same(Pieces(*(array[np.argsort(together.rows, kind="stable")] for array in together)), pieces)
            counts = [len(set(part.rows.tolist())) for part in ranks]
            assert max(counts) - min(counts) <= 1


def test_threads_that_ask_at_once_get_the_same() -> None:
    expected = {update: web_packs(5).pieces_of_update(update) for update in range(1, 90)}
    updates = list(expected) * 2
    random.Random(0).shuffle(updates)
    for _ in range(5):
        layout = web_packs(5)
        with ThreadPoolExecutor(8) as pool:
            for update, pieces in zip(updates, pool.map(layout.pieces_of_update, updates), strict=True):
                assert same(pieces, expected[update])


def test_the_configured_layout_is_this_one() -> None:
    stream = stream_of(MANY)
    batch = BatchConfig(layout="packs", pack_length=16, packs=3, packing="bfd", packing_buffer=4)
    layout, direct = make_layout(stream, batch, 64, 9), Packs(stream, 16, 3, "bfd", 4, 9)
    assert layout.manifest() == direct.manifest()
    for update in range(1, 20):
        assert same(layout.pieces_of_update(update), direct.pieces_of_update(update))


# --- orders ---


def test_every_epoch_and_every_seed_has_packs_of_its_own() -> None:
    layouts = [packs_of("several segments", seed=seed) for seed in range(4)]
    orders = []
    for layout in layouts:
        bounds = packs_of_epochs(layout, 4)
        orders += [tuple(inputs_of(layout.pieces_between(*pair))) for pair in itertools.pairwise(bounds)]
    assert len(set(orders)) == 16


def test_documents_that_are_added_leave_the_order_of_the_others_as_it_was() -> None:
    for seed, epoch in itertools.product(range(3), range(3)):
        before = document_order(stream_of([5] * 40), seed, epoch).tolist()
        after = document_order(stream_of([5] * 40 + [7] * 60), seed, epoch).tolist()
        assert sorted(after) == list(range(100))
        assert [number for number in after if number < 40] == before
        assert after[60:] != [number for number in after if number >= 40]  # mixed among them, not appended


@every_plan
@every_packing
def test_a_segment_holds_the_next_documents_of_the_epochs_order(plan: str, packing: str) -> None:
    layout = packs_of(plan, packing)
    size = PLANS[plan][3]
    for epoch in range(3):
        order = document_order(layout.stream, 0, epoch).tolist()
        segments = layout.epoch(epoch)
        assert len(segments) == math.ceil(len(order) / size)
        for number, segment in enumerate(segments):
            assert set(segment.documents.tolist()) == set(order[number * size : (number + 1) * size])


# --- room for the pieces ---


@every_plan
@pytest.mark.parametrize("updates", [1, 2, 13])
def test_the_room_for_pieces_is_what_the_fullest_pack_needs_and_a_piece_for_padding(plan: str, updates: int) -> None:
    layout = packs_of(plan)
    rows = [np.bincount(layout.pieces_of_update(update).rows) for update in range(1, updates + 1)]
    most = max(int(counts.max()) for counts in rows)
    for micro_batches in range(1, layout.packs + 1):
        assert packs_of(plan).max_pieces(updates, micro_batches) == math.ceil(layout.packs / micro_batches) * (most + 1)


@every_plan
@every_packing
def test_no_micro_batch_of_the_run_needs_more_room_for_pieces(plan: str, packing: str) -> None:
    layout = packs_of(plan, packing)
    for micro_batches in {1, 2, layout.packs} & set(range(1, layout.packs + 1)):
        room = layout.max_pieces(10, micro_batches)
        for update in range(1, 11):
            data = make_update_data(layout.stream, layout, update, micro_batches, room)
            assert {len(batch.cu_seqlens) for batch in data.micro_batches} == {room + 1}


# --- little text ---


@pytest.mark.parametrize("lengths", [[2], [1, 1], [3], [2, 1], [5, 1, 1]], ids=str)
def test_a_text_smaller_than_a_pack_is_gone_through_again_and_again(lengths: list[int]) -> None:
    for packing in PACKINGS:
        layout = Packs(stream_of(lengths), 64, 8, packing, 4, 0)
        for update in (1, 2, 50):
            pieces = layout.pieces_of_update(update)
            for pack in range(8):
                places = inputs_of(pieces.part(*np.searchsorted(pieces.rows, [pack, pack + 1])))
                assert sorted(places) == list(range(sum(lengths)))
        assert layout.max_pieces(4, 2) == 4 * (len(lengths) + 1)


def test_a_text_of_two_tokens_is_enough() -> None:
    batch = BatchConfig(layout="packs", pack_length=64, packs=8)
    assert make_layout(stream_of([2]), batch, 64, 0).pieces_of_update(1).num_targets.tolist() == [1] * 8


@pytest.mark.parametrize("plan", list(BUDGETS))
def test_a_run_too_long_to_plan_ahead_takes_an_upper_limit_at_once(plan: str) -> None:
    budget = token_budget(plan)
    assert budget.max_pieces(10**12, 1) >= max(len(budget.pieces_of_update(u).lengths) for u in range(1, 40))
    for packing in PACKINGS:
        layout = Packs(budget.stream, budget.max_positions, 8, packing, 4, 0)
        assert layout.max_pieces(10**12, 4) >= layout.max_pieces(3, 4)


def test_rests_of_one_token_are_read_and_have_nothing_to_predict() -> None:
    layout = packs_of("rests of one token", packs=1)
    targets = [layout.pieces_of_update(update) for update in range(1, packs_of_epochs(layout, 1)[-1] + 1)]
    rests = [pieces for pieces in targets if pieces.lengths.max() == 1]
    assert sum(len(pieces.lengths) for pieces in rests) == 9
    assert {int(pieces.num_targets.sum()) for pieces in rests} == {0}
    assert sum(int(pieces.num_targets.sum()) for pieces in targets) == 9 * 15
