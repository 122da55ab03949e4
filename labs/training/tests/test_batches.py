"""Batches of pieces: what the model sees, what is a label, and the whole data of a config."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from streams import MANY, every_plan, inputs_of, same, stream_of, token_budget
from tiny import tiny

from training_lab.data.batches import IGNORED, Batch, make_batch, split_by_tokens, split_rows
from training_lab.data.dataset import Dataset, differences, prepare_dataset
from training_lab.data.layout import Pieces
from training_lab.data.synthetic import synthetic_document
from training_lab.errors import UserError


def pieces_with(lengths: Sequence[int]) -> Pieces:
    """Pieces of these lengths, one behind the other."""
    sizes = np.array(lengths, dtype=np.int64)
    return Pieces(np.cumsum(sizes) - sizes, sizes, sizes - 1, np.arange(len(sizes)))


def parts_of(pieces: Pieces, row_tokens: int | None, num_parts: int) -> list[Pieces]:
    return [pieces.part(first, last) for first, last in split_rows(pieces, row_tokens, num_parts)]


def joined(parts: Sequence[Pieces]) -> Pieces:
    return Pieces(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


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
    return make_batch(stream_of([5, 4]), Pieces(*(np.array(part) for part in ([0, 5], [5, 4], [4, 3], [0, 1]))))


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
    parts = parts_of(pieces, None, num_parts)
    assert 1 <= len(parts) <= num_parts
    assert all(len(part.lengths) > 0 for part in parts)
    assert same(joined(parts), pieces)
    share = sum(lengths) / num_parts
    assert all(part.lengths.sum() <= share + max(lengths) for part in parts)


@pytest.mark.parametrize(("num_pieces", "num_parts"), [(32, 1), (32, 4), (32, 32), (24, 8), (7, 7), (300, 3)])
def test_equal_pieces_are_split_into_equal_micro_batches(num_pieces: int, num_parts: int) -> None:
    for row_tokens in (None, 256):
        parts = parts_of(pieces_with([256] * num_pieces), row_tokens, num_parts)
        assert [len(part.lengths) for part in parts] == [num_pieces // num_parts] * num_parts


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 35])
@pytest.mark.parametrize("num_parts", range(1, 9))
def test_rows_stay_whole_and_their_numbers_differ_by_at_most_one(num_rows: int, num_parts: int) -> None:
    rows = np.repeat(np.arange(num_rows), np.arange(num_rows) % 3 + 1)
    pieces = pieces_with([20] * len(rows))._replace(rows=rows)
    parts = parts_of(pieces, 64, num_parts)
    assert len(parts) == min(num_rows, num_parts)
    assert same(joined(parts), pieces)
    counts = [len(set(part.rows.tolist())) for part in parts]
    assert sum(counts) == num_rows
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("lengths", UNEQUAL, ids=lambda lengths: ",".join(map(str, lengths)))
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 40, 1000, 10**6])
def test_split_by_tokens_fills_each_run_as_far_as_it_goes(lengths: list[int], max_tokens: int) -> None:
    pieces = pieces_with(lengths)
    parts = list(split_by_tokens(pieces, max_tokens))
    assert same(joined(parts), pieces)
    assert all(part.lengths.sum() <= max_tokens or len(part.lengths) == 1 for part in parts)
    for part, following in itertools.pairwise(parts):
        assert part.lengths.sum() + following.lengths[0] > max_tokens


# --- the whole data of a config ---


def dataset(*overrides: str) -> Dataset:
    return prepare_dataset(tiny(*overrides))


def test_the_same_config_gives_the_same_data() -> None:
    one, other = dataset(), dataset()
    assert one.manifest == other.manifest
    assert one.update_data(5).sha256 == other.update_data(5).sha256
    assert json.loads(json.dumps(one.manifest, allow_nan=False)) == one.manifest


def test_tokens_of_training_and_validation_together_are_the_text() -> None:
    data = dataset()
    read = sorted(
        bytes(stream.take(np.arange(first, last)).tolist()).decode()
        for stream in (data.train, data.validation.stream)
        for first, last in itertools.pairwise(stream.offsets.tolist())
    )
    assert read == sorted(synthetic_document(number).text for number in range(tiny().data.synthetic_documents))


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
    assert used == list(range(min(size, few.stream.size) - last))
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
    assert batch.labels_T.tolist() == validation.stream.take(np.arange(1, 1000)).tolist()
    assert validation.num_target_tokens == 999
    assert max(np.diff(batch.cu_seqlens)) == 64


ANY_BATCH = ("batch.layout=packs", "batch.packs=1", "batch.pack_length=8")


@pytest.mark.parametrize("pieces", ["documents", "windows"])
def test_a_validation_text_without_a_token_to_predict_is_never_measured_on(pieces: str) -> None:
    for name, text in (("short.txt", "a"), ("a.txt", "ab"), ("b.txt", "b" * 1000)):
        Path(name).write_text(text)
    files = ("data.source=files", 'data.paths=["*.txt"]', "data.val_fraction=0.5", "eval.tokens=2")
    measured, refused = [], []
    for salt in range(20):  # among them, salts that would hold back the short one alone
        try:
            data = dataset(*files, f"data.split_salt={json.dumps(str(salt))}", f"eval.pieces={pieces}", *ANY_BATCH)
        except UserError as error:
            refused.append(str(error))
        else:
            measured.append(data.validation.num_target_tokens)
            assert data.streams.too_short == 1
            assert data.train.num_documents == data.validation.stream.num_documents == 1
    assert set(measured) == {1}
    assert refused
    assert all("there are 2 and data.val_fraction is 0.5" in message for message in refused)


def test_the_documents_of_a_stretch_of_tokens_are_named() -> None:
    stream = stream_of([3, 1, 4])
    names = ["document 0", "document 1", "document 2"]
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
