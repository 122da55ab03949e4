"""From a stream of tokens to the batches of each update, and to the fixed validation set.

Every layout is a plan: a pure function of the update's number that loses no token and crosses no border.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny

from training_lab.config import BatchConfig
from training_lab.data.batches import IGNORED, Batch, make_batch, split_by_tokens, split_pieces
from training_lab.data.corpus import TokenStream
from training_lab.data.dataset import Dataset, differences, prepare_dataset
from training_lab.data.documents import read_documents
from training_lab.data.layout import Layout, Pieces, TokenBudget, Windows, make_layout, plan_identity
from training_lab.errors import UserError
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


def pieces_with(lengths: Sequence[int]) -> Pieces:
    """Pieces of these lengths, one behind the other."""
    sizes = np.array(lengths, dtype=np.int64)
    return Pieces(np.cumsum(sizes) - sizes, sizes, sizes - 1)


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


# --- token budget ---


@every_plan
def test_every_token_of_every_epoch_is_placed_exactly_once(plan: str) -> None:
    layout = token_budget(plan)
    epoch_tokens = len(layout.stream.tokens)
    num_updates = -(-3 * epoch_tokens // layout.budget)  # beyond the edges of three epochs
    places = [place for update in range(1, num_updates + 1) for place in inputs_of(layout.pieces_of_update(update))]
    for epoch in range(3):
        assert sorted(places[epoch * epoch_tokens : (epoch + 1) * epoch_tokens]) == list(range(epoch_tokens))


@every_plan
def test_within_an_epoch_each_document_is_read_from_its_beginning_to_its_end(plan: str) -> None:
    layout = token_budget(plan)
    epoch_tokens = len(layout.stream.tokens)
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
    reverse = list(reversed(range(len(lengths))))
    tokens = [here.tokens[here.offsets[n] : here.offsets[n + 1]] for n in reverse]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in tokens])]).astype(np.int64)
    there = TokenStream(np.concatenate(tokens), offsets, here.hashes[reverse], [here.names[n] for n in reverse])
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
    changed = dataclasses.replace(stream, tokens=stream.tokens[::-1])
    layouts: list[tuple[TokenStream, Layout]] = [
        (stream, TokenBudget(stream, 20, 8, 0)),
        (stream, TokenBudget(stream, 21, 8, 0)),
        (stream, TokenBudget(stream, 20, 9, 0)),
        (stream, TokenBudget(stream, 20, 8, 1)),
        (other, TokenBudget(other, 20, 8, 0)),
        (changed, TokenBudget(changed, 20, 8, 0)),
        (stream, Windows(stream, 20, 8, 0)),
        (stream, Windows(stream, 21, 8, 0)),
        (stream, Windows(stream, 20, 9, 0)),
        (stream, Windows(stream, 20, 8, 1)),
        (other, Windows(other, 20, 8, 0)),
    ]
    names = [plan_identity(*layout) for layout in layouts]
    assert len(set(names)) == len(names)
    assert plan_identity(stream, TokenBudget(stream_of([50, 50]), 20, 8, 0)) == names[0]


def test_the_first_updates_of_a_plan_never_change() -> None:
    stream = stream_of(MANY)
    batches = [
        make_batch(stream, layout.pieces_of_update(update)).sha256()[:16]
        for layout in (TokenBudget(stream, 50, 16, 1337), Windows(stream, 16, 4, 1337))
        for update in (1, 7)
    ]
    golden = ["1b1a914f7a96568f", "586850d12f6d09d5", "739cc82cba10f58f", "85828fd54c690130"]
    assert batches == golden, (
        "the order of the data is part of every recorded result: another order needs another name in the plan"
    )


# --- batches ---


@every_plan
def test_labels_are_the_next_tokens_of_the_piece_and_never_cross_its_end(plan: str) -> None:
    layout = token_budget(plan)
    for update in range(1, 20):
        batch = make_batch(layout.stream, layout.pieces_of_update(update))
        assert batch.cu_seqlens[-1] == len(batch.tokens_T) == layout.budget
        for first, last in itertools.pairwise(batch.cu_seqlens):
            assert batch.labels_T[last - 1] == IGNORED
            assert batch.labels_T[first : last - 1].tolist() == batch.tokens_T[first + 1 : last].tolist()


@every_plan
def test_positions_restart_with_each_piece_and_the_borders_are_those_of_the_pieces(plan: str) -> None:
    layout = token_budget(plan)
    for update in range(1, 20):
        pieces = layout.pieces_of_update(update)
        batch = make_batch(layout.stream, pieces)
        assert batch.cu_seqlens[0] == 0
        assert np.diff(batch.cu_seqlens).tolist() == pieces.lengths.tolist()
        assert batch.tokens_T.tolist() == inputs_of(pieces)
        for first, last in itertools.pairwise(batch.cu_seqlens):
            assert batch.positions_T[first:last].tolist() == list(range(last - first))


@every_plan
def test_a_batch_says_how_many_labels_it_has(plan: str) -> None:
    layout = token_budget(plan)
    for update in range(1, 20):
        batch = make_batch(layout.stream, layout.pieces_of_update(update))
        assert batch.num_target_tokens == int((batch.labels_T != IGNORED).sum())
        assert batch.num_target_tokens == layout.budget - (len(batch.cu_seqlens) - 1)
        assert {tensor.dtype for tensor in (batch.tokens_T, batch.labels_T, batch.positions_T)} == {torch.int64}


def small_batch() -> Batch:
    return make_batch(stream_of([5, 4]), Pieces(*(np.array(part) for part in ([0, 5], [5, 4], [4, 3]))))


def test_the_hash_of_a_batch_changes_with_everything_that_the_model_sees() -> None:
    batch = small_batch()
    changed = [batch]
    for name in ("tokens_T", "labels_T", "positions_T"):
        for place in (0, 4, 8):
            tensor = getattr(batch, name).clone()
            tensor[place] += 1
            changed.append(dataclasses.replace(batch, **{name: tensor}))
    changed += [dataclasses.replace(batch, cu_seqlens=borders) for borders in ((0, 4, 9), (0, 9), (0, 5, 8, 9))]
    hashes = [one.sha256() for one in changed]
    assert len(set(hashes)) == len(hashes)
    assert small_batch().sha256() == batch.sha256() == batch.to(torch.device("cpu")).sha256()


def test_the_hash_of_a_batch_never_changes() -> None:
    assert small_batch().sha256() == "99ff0b0a5855128d2ecf09d386d0b78aff4c43664a3c7ecb9aecd491b192ba47", (
        "`verify` compares this hash with those that old runs recorded: another one fails every run made before"
    )


UNEQUAL = [[1], [5], [1, 1], [1000, 1], [1, 1000], [1] * 8, [1000, *[1] * 20], [*[1] * 20, 1000], [1, 1000] * 5, MANY]


@pytest.mark.parametrize("lengths", UNEQUAL, ids=lambda lengths: ",".join(map(str, lengths)))
@pytest.mark.parametrize("num_parts", range(1, 9))
def test_split_into_micro_batches_nothing_is_lost_and_none_is_empty(lengths: list[int], num_parts: int) -> None:
    pieces = pieces_with(lengths)
    parts = list(split_pieces(pieces, num_parts))
    assert 1 <= len(parts) <= num_parts
    assert all(len(part.lengths) > 0 for part in parts)
    assert same(Pieces(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))), pieces)
    share = sum(lengths) / num_parts
    assert all(part.lengths.sum() <= share + max(lengths) for part in parts)


@pytest.mark.parametrize(("num_pieces", "num_parts"), [(32, 1), (32, 4), (32, 32), (24, 8), (7, 7), (300, 3)])
def test_equal_pieces_are_split_into_equal_micro_batches(num_pieces: int, num_parts: int) -> None:
    parts = list(split_pieces(pieces_with([256] * num_pieces), num_parts))
    assert [len(part.lengths) for part in parts] == [num_pieces // num_parts] * num_parts


@pytest.mark.parametrize("lengths", UNEQUAL, ids=lambda lengths: ",".join(map(str, lengths)))
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 40, 1000, 10**6])
def test_split_by_tokens_fills_each_run_as_far_as_it_goes(lengths: list[int], max_tokens: int) -> None:
    pieces = pieces_with(lengths)
    parts = list(split_by_tokens(pieces, max_tokens))
    assert same(Pieces(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))), pieces)
    assert all(part.lengths.sum() <= max_tokens or len(part.lengths) == 1 for part in parts)
    for part, following in itertools.pairwise(parts):
        assert part.lengths.sum() + following.lengths[0] > max_tokens


# --- the whole data of a config ---


def dataset(*overrides: str) -> Dataset:
    return prepare_dataset(tiny(*overrides))


def test_the_same_config_gives_the_same_data() -> None:
    one, other = dataset(), dataset()
    assert one.manifest == other.manifest
    assert one.batch_of_update(5).sha256() == other.batch_of_update(5).sha256()
    assert json.loads(json.dumps(one.manifest, allow_nan=False)) == one.manifest


def test_tokens_of_training_and_validation_together_are_the_text() -> None:
    data = dataset()
    read = sorted(
        bytes(stream.tokens[first:last].tolist()).decode()
        for stream in (data.train, data.validation.stream)
        for first, last in itertools.pairwise(stream.offsets.tolist())
    )
    assert read == sorted(document.text for document in read_documents(tiny().data).documents)


@pytest.mark.parametrize(
    "override",
    [
        "eval.tokens=511",
        "eval.pieces=windows",
        "model.max_positions=63",
        "data.tokenizer=char",
        "data.tokenizer=gpt2",
        "data.split_salt=other",
        "data.synthetic_documents=640",
    ],
)
def test_the_validation_sets_name_changes_with_what_is_measured_on(override: str) -> None:
    assert dataset(override).validation.identity != dataset().validation.identity


@pytest.mark.parametrize(
    "override",
    [
        "batch.tokens=1000",
        "batch.micro_batches=3",
        "train.seed=77",
        "data.order_seed=77",
        "train.updates=77",
        "model.num_layers=3",
        "eval.batch_tokens=77",
        "optimizer.max_lr=0.5",
    ],
)
def test_the_validation_sets_name_is_that_of_its_content_alone(override: str) -> None:
    assert dataset(override).validation.identity == dataset().validation.identity


def test_the_validation_set_is_the_same_for_both_layouts_if_it_is_cut_alike() -> None:
    overrides = ("batch.layout=windows", "batch.block_size=32", "batch.batch_size=4", "eval.pieces=documents")
    assert dataset(*overrides).validation.identity == dataset().validation.identity


@pytest.mark.parametrize(
    ("override", "is_same"),
    [
        ("data.order_seed=77", False),
        ("train.seed=77", False),
        ("batch.tokens=511", False),
        ("eval.tokens=300", False),
        ("data.split_salt=x", False),
        ("train.updates=13", True),
        ("model.num_layers=3", True),
        ("batch.micro_batches=2", True),
    ],
)
def test_the_datas_name_changes_exactly_with_what_is_read(override: str, is_same: bool) -> None:
    assert (dataset(override).manifest["identity"] == dataset().manifest["identity"]) == is_same


@pytest.mark.parametrize("pieces", ["documents", "windows"])
@pytest.mark.parametrize("size", [2, 3, 64, 65, 66, 300, 1000, 10**6])
def test_a_smaller_validation_set_is_the_beginning_of_a_larger_one(pieces: str, size: int) -> None:
    few = dataset(f"eval.pieces={pieces}", f"eval.tokens={size}").validation
    many = dataset(f"eval.pieces={pieces}", "eval.tokens=10000000").validation
    used = inputs_of(few.pieces)
    last = 0 if pieces == "documents" else 1  # the last token of joined text is a label only
    assert used == list(range(min(size, len(few.stream.tokens)) - last))
    assert inputs_of(many.pieces)[: len(used)] == used
    assert few.num_target_tokens <= many.num_target_tokens
    assert few.pieces.lengths.min() >= 1


def test_validation_documents_are_cut_only_after_the_longest_that_the_model_sees() -> None:
    validation = dataset("eval.tokens=10000000").validation
    batch = make_batch(validation.stream, validation.pieces)
    ends = set(validation.stream.offsets.tolist())
    for start, length in zip(validation.pieces.starts.tolist(), validation.pieces.lengths.tolist(), strict=True):
        assert length == 64 or start + length in ends
    assert validation.num_target_tokens == len(batch.tokens_T) - len(validation.pieces.lengths)


def test_in_validation_windows_every_token_but_the_first_is_predicted_once() -> None:
    validation = dataset("eval.pieces=windows", "eval.tokens=1000").validation
    batch = make_batch(validation.stream, validation.pieces)
    assert batch.labels_T.tolist() == validation.stream.tokens[1:1000].tolist()
    assert validation.num_target_tokens == 999
    assert max(np.diff(batch.cu_seqlens)) == 64


def test_a_validation_text_without_a_token_to_predict_is_refused() -> None:
    Path("short.txt").write_text("a")
    Path("long.txt").write_text("b" * 1000)
    files = ("data.source=files", 'data.paths=["short.txt", "long.txt"]', "data.val_fraction=0.5")
    refusals = []
    for salt in range(20):  # among them, salts that hold back exactly the short one
        try:
            dataset(*files, f"data.split_salt={json.dumps(str(salt))}")
        except UserError as error:
            refusals.append(str(error))
    assert "data: the validation text has no token to predict: 1 tokens; give more documents" in refusals


def test_the_documents_of_a_stretch_of_tokens_are_named() -> None:
    stream = stream_of([3, 1, 4])
    names = stream.names
    assert stream.documents_between(0, 3) == names[:1]
    assert stream.documents_between(2, 4) == names[:2]
    assert stream.documents_between(3, 4) == names[1:2]
    assert stream.documents_between(2, 5) == names
    assert stream.documents_between(7, 8) == names[2:]


def test_what_differs_between_two_data_is_named() -> None:
    for name, text in (("a.txt", "a" * 400), ("b.txt", "b" * 400), ("c.txt", "c" * 400), ("d.txt", "d" * 400)):
        Path(name).write_text(text)
    files = ("data.source=files", 'data.paths=["."]', "data.val_fraction=0.5")
    before = dataset(*files).manifest
    assert differences(before, dataset(*files).manifest) == []
    Path("a.txt").write_text("A" * 400)
    Path("b.txt").rename("e.txt")
    found = differences(before, dataset(*files).manifest)
    assert found[:3] == [
        "1 source files changed (a.txt)",
        "1 source files gone (b.txt)",
        "1 source files new (e.txt)",
    ]
    assert differences(dataset().manifest, dataset("data.order_seed=5").manifest) == ["plan differs"]
    assert differences(dataset().manifest, dataset("eval.tokens=300").manifest) == ["validation differs"]
