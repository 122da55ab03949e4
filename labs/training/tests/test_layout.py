"""From a stream of tokens to the batches of each update, and to the fixed validation set.

Every layout is a plan: a pure function of the update's number that loses no token and crosses no border.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from streams import MANY, every_plan, inputs_of, same, stream_of, token_budget

from training_lab.config_data import BatchConfig
from training_lab.data.batches import make_batch
from training_lab.data.layout import Layout, Packs, TokenBudget, Windows, make_layout, plan_identity
from training_lab.data.stream import EndOfText, TokenStream
from training_lab.errors import UserError

# --- token budget ---


@every_plan
def test_every_token_of_every_epoch_is_placed_exactly_once(plan: str) -> None:
    layout = token_budget(plan)
    epoch_tokens = layout.stream.size
    num_updates = -(-3 * epoch_tokens // layout.budget)  # beyond the edges of three epochs
    places = [place for update in range(1, num_updates + 1) for place in inputs_of(layout.pieces_of_update(update))]
    for epoch in range(3):
        assert sorted(places[epoch * epoch_tokens : (epoch + 1) * epoch_tokens]) == list(range(epoch_tokens))


@every_plan
def test_within_an_epoch_each_document_is_read_from_its_beginning_to_its_end(plan: str) -> None:
    layout = token_budget(plan)
    epoch_tokens = layout.stream.size
    num_updates = -(-epoch_tokens // layout.budget)
    places = [p for update in range(1, num_updates + 1) for p in inputs_of(layout.pieces_of_update(update))]
    starts = layout.stream.offsets[:-1].tolist()
    for before, place in itertools.pairwise(places[:epoch_tokens]):
        assert place == before + 1 or (place in starts and before + 1 in layout.stream.offsets)


@every_plan
def test_every_update_has_exactly_its_budget_in_pieces_that_the_model_can_see(plan: str) -> None:
    layout = token_budget(plan)
    for update in [*range(1, 60), 10**6, 10**12]:
        pieces = layout.pieces_of_update(update)
        assert pieces.lengths.sum() == layout.budget
        assert pieces.lengths.min() >= 1
        assert pieces.lengths.max() <= layout.max_positions
        assert pieces.num_targets.tolist() == (pieces.lengths - 1).tolist()


@every_plan
def test_no_piece_holds_tokens_of_two_documents(plan: str) -> None:
    layout = token_budget(plan)
    for update in range(1, 60):
        pieces = layout.pieces_of_update(update)
        first = np.searchsorted(layout.stream.offsets, pieces.starts, "right")
        last = np.searchsorted(layout.stream.offsets, pieces.starts + pieces.lengths - 1, "right")
        assert first.tolist() == last.tolist()


@every_plan
def test_a_document_is_cut_only_where_an_update_ends_or_the_model_sees_no_further(plan: str) -> None:
    layout = token_budget(plan)
    ends = set(layout.stream.offsets.tolist())
    for update in range(1, 60):
        pieces = layout.pieces_of_update(update)
        for start, length in zip(pieces.starts[:-1].tolist(), pieces.lengths[:-1].tolist(), strict=True):
            assert length == layout.max_positions or start + length in ends


@every_plan
def test_any_update_in_any_order_is_the_same(plan: str) -> None:
    updates = [*range(1, 30), 1000, 999, 10**9]
    layout = token_budget(plan)
    in_order = {update: layout.pieces_of_update(update) for update in updates}
    for update in reversed(updates):
        assert same(layout.pieces_of_update(update), in_order[update])
        assert same(token_budget(plan).pieces_of_update(update), in_order[update])


def order_of(layout: TokenBudget, epoch: int) -> list[int]:
    """The order of the tokens in an epoch, for a budget of a whole epoch."""
    return inputs_of(layout.pieces_of_update(epoch + 1))


def test_every_epoch_and_every_seed_has_an_order_of_its_own() -> None:
    plan = "an update is an epoch"
    orders = [order_of(token_budget(plan, seed), epoch) for seed in range(5) for epoch in range(5)]
    assert len({tuple(order) for order in orders}) == 25
    assert order_of(token_budget(plan, 3), 2) == order_of(token_budget(plan, 3), 2)


def test_the_order_follows_from_the_documents_content_not_from_their_place() -> None:
    lengths = list(range(1, 20))
    here = stream_of(lengths)
    there = dataclasses.replace(
        here,
        starts=here.starts[::-1],
        lengths=here.lengths[::-1],
        content=here.content[::-1],
        sha256=here.sha256[::-1],
    )
    assert there.take(np.arange(19)).tolist() == list(range(here.size - 19, here.size))
    for update in range(1, 20):
        batches = [
            make_batch(stream, TokenBudget(stream, 64, 16, 5).pieces_of_update(update)) for stream in (here, there)
        ]
        assert batches[0].sha256() == batches[1].sha256()


def test_every_place_in_the_order_is_about_equally_likely_for_a_document() -> None:
    stream = stream_of([1] * 8)
    first = [TokenBudget(stream, 8, 2, seed).pieces_of_update(1).starts[0] for seed in range(1600)]
    counts = np.bincount(np.array(first), minlength=8)
    assert counts.min() > 140  # 200 expected, spread 13
    assert counts.max() < 260


# --- windows ---


def windows(num_tokens: int, block_size: int, batch_size: int, seed: int = 0) -> Windows:
    return Windows(stream_of([num_tokens]), block_size, batch_size, seed)


@pytest.mark.parametrize(("num_tokens", "block_size"), [(9, 8), (10, 8), (11, 8), (30, 1), (1000, 250), (2, 1)])
def test_every_window_lies_in_the_stream_with_the_token_after_it_and_every_place_is_reached(
    num_tokens: int, block_size: int
) -> None:
    layout = windows(num_tokens, block_size, 16)
    seen: set[int] = set()
    for update in range(1, 800):
        pieces = layout.pieces_of_update(update)
        assert pieces.lengths.tolist() == pieces.num_targets.tolist() == [block_size] * 16
        seen.update(pieces.starts.tolist())
    assert seen == set(range(num_tokens - block_size))


def test_windows_begin_everywhere_about_equally_often() -> None:
    layout = windows(108, 8, 1000)
    starts = np.concatenate([layout.pieces_of_update(update).starts for update in range(1, 101)])
    counts = np.bincount(starts, minlength=100)
    assert len(counts) == 100
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 45 < chi_square < 170  # 99 degrees of freedom: mean 99, spread 14


def test_the_label_of_a_window_is_always_the_next_token_to_the_very_last() -> None:
    layout = windows(100, 8, 4)
    for update in range(1, 50):
        batch = make_batch(layout.stream, layout.pieces_of_update(update))
        assert batch.labels_T.tolist() == (batch.tokens_T + 1).tolist()
        assert batch.num_target_tokens == 32


def test_any_update_of_windows_in_any_order_is_the_same() -> None:
    layout = windows(1000, 8, 4)
    updates = [*range(1, 30), 10**6, 10**15]
    in_order = {update: layout.pieces_of_update(update) for update in updates}
    for update in reversed(updates):
        assert same(layout.pieces_of_update(update), in_order[update])
        assert same(windows(1000, 8, 4).pieces_of_update(update), in_order[update])


def test_the_sequence_of_windows_does_not_depend_on_how_many_make_an_update() -> None:
    def starts(batch_size: int) -> list[int]:
        layout = windows(1000, 8, batch_size)
        return [s for update in range(1, 48 // batch_size + 1) for s in layout.pieces_of_update(update).starts.tolist()]

    assert starts(1) == starts(3) == starts(16) == starts(48)


def test_every_update_and_every_seed_has_windows_of_its_own() -> None:
    drawn = [
        tuple(windows(10_000, 8, 4, seed).pieces_of_update(update).starts.tolist())
        for seed in range(5)
        for update in range(1, 20)
    ]
    assert len(set(drawn)) == 5 * 19


# --- too little text ---


@pytest.mark.parametrize(
    ("batch", "needed", "key"),
    [
        (BatchConfig(layout="token_budget", tokens=100), 100, "batch.tokens"),
        (BatchConfig(layout="windows", batch_size=20, block_size=100), 2001, "batch.batch_size or batch.block_size"),
    ],
)
def test_a_text_smaller_than_one_update_is_refused_with_both_numbers(batch: BatchConfig, needed: int, key: str) -> None:
    layout = make_layout(stream_of([needed - 10, 10]), batch, 64, 0)
    assert layout.pieces_of_update(1).lengths.sum() == batch.update_tokens
    with pytest.raises(UserError) as caught:
        make_layout(stream_of([needed - 11, 10]), batch, 64, 0)
    message = str(caught.value)
    assert f"needs {needed:,} tokens, has {needed - 1:,};" in message
    assert message.endswith(f"lower {key}")
    assert len(message.splitlines()) == 1


# --- the name of a plan ---


def test_the_plans_name_changes_with_everything_that_decides_it() -> None:
    stream, other = stream_of([50, 50]), stream_of([49, 51])
    changed = dataclasses.replace(stream, sha256=stream.sha256[::-1])
    starting = dataclasses.replace(stream, end_of_text=EndOfText("start"))
    ended = dataclasses.replace(stream, end_of_text=EndOfText("end"))
    layouts: list[tuple[TokenStream, Layout]] = [
        (stream, TokenBudget(stream, 20, 8, 0)),
        (stream, TokenBudget(stream, 21, 8, 0)),
        (stream, TokenBudget(stream, 20, 9, 0)),
        (stream, TokenBudget(stream, 20, 8, 1)),
        (other, TokenBudget(other, 20, 8, 0)),
        (changed, TokenBudget(changed, 20, 8, 0)),
        (stream, Windows(stream, 20, 8, 0)),
        (stream, Windows(stream, 21, 8, 0)),
        (stream, Windows(stream, 20, 8, 1)),
        (other, Windows(other, 20, 8, 0)),
        (stream, Packs(stream, 20, 8, "best_fit", 5, 0)),
        (stream, Packs(stream, 21, 8, "best_fit", 5, 0)),
        (stream, Packs(stream, 20, 8, "best_fit", 6, 0)),
        (stream, Packs(stream, 20, 8, "best_fit", 5, 1)),
        (stream, Packs(stream, 20, 8, "bfd", 5, 0)),
        (stream, Packs(stream, 20, 8, "next_fit", 5, 0)),
        (stream, Packs(stream, 20, 8, "concat", 5, 0)),
        (other, Packs(other, 20, 8, "best_fit", 5, 0)),
        (changed, Packs(changed, 20, 8, "best_fit", 5, 0)),
        (ended, Packs(ended, 20, 8, "best_fit", 5, 0)),
        (starting, Packs(starting, 20, 8, "best_fit", 5, 0)),
    ]
    names = [plan_identity(*layout) for layout in layouts]
    assert len(set(names)) == len(names)
    assert plan_identity(stream, TokenBudget(stream_of([50, 50]), 20, 8, 0)) == names[0]


def test_the_plans_name_does_not_change_with_how_much_of_the_same_sequence_an_update_takes() -> None:
    stream = stream_of([50, 50])
    assert len({plan_identity(stream, Windows(stream, 20, size, 0)) for size in (1, 8, 9)}) == 1
    assert len({plan_identity(stream, Packs(stream, 20, size, "best_fit", 5, 0)) for size in (1, 8, 9)}) == 1


@pytest.mark.parametrize("packing", ["next_fit", "concat"])
def test_the_plans_name_does_not_change_with_a_buffer_that_the_packing_has_none_of(packing: str) -> None:
    stream = stream_of([50, 50])
    assert len({plan_identity(stream, Packs(stream, 20, 8, packing, size, 0)) for size in (1, 8, 9)}) == 1


GOLDEN = [
    *("1175e130e6ceebab", "e2c1af4fc054474e"),  # token budget, updates 1 and 7
    *("739cc82cba10f58f", "85828fd54c690130"),  # windows
    *("85e65ffc4cca6b86", "a5cdf30705e22e7a"),  # packs: best_fit
    *("d78960925b1f7857", "06fa95b00b0c3d7b"),  # next_fit
    *("ea398bcd491e7967", "27a408a28db01ba7"),  # bfd
    *("34c7eca0847d5f5c", "bbc24013b746f8ce"),  # concat
]


def test_the_first_updates_of_a_plan_never_change() -> None:
    stream = stream_of(MANY)
    layouts: list[Layout] = [
        TokenBudget(stream, 50, 16, 1337),
        Windows(stream, 16, 4, 1337),
        *(Packs(stream, 32, 3, packing, 4, 1337) for packing in ("best_fit", "next_fit", "bfd", "concat")),
    ]
    batches = [
        make_batch(stream, layout.pieces_of_update(update)).sha256()[:16] for layout in layouts for update in (1, 7)
    ]
    assert batches == GOLDEN, (
        "the order of the data is part of every recorded result: another order needs another name in the plan"
    )
