"""Packs whose documents are not isolated: the same tokens and targets, seen as one piece."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny

from training_lab.data.batches import IGNORED, UpdateData
from training_lab.data.dataset import prepare_dataset
from training_lab.engine import train_update
from training_lab.precision import choose_hardware
from training_lab.trainer import make_trainer

PACKS = ("batch.layout=packs", "batch.packs=4", "model.max_positions=512", "model.dropout=0")


@pytest.fixture(autouse=True)
def place(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))


def update_of(*overrides: str, update: int = 1) -> UpdateData:
    return prepare_dataset(tiny(*PACKS, *overrides)).update_data(update)


def test_joined_documents_are_the_same_tokens_and_targets_in_one_piece() -> None:
    for update in range(1, 6):
        alone, joined = update_of(update=update), update_of("batch.isolation=false", update=update)
        (one,), (other,) = alone.micro_batches, joined.micro_batches
        assert torch.equal(one.tokens_T, other.tokens_T)
        assert torch.equal(one.labels_T, other.labels_T)
        assert alone.num_target_tokens == joined.num_target_tokens
        assert alone.sha256 != joined.sha256
        rows = np.bincount(joined.pieces.rows, weights=joined.pieces.lengths).astype(int)
        assert joined.attended.tolist() == rows.tolist()
        assert len(alone.attended) > len(joined.attended)
        ends = np.cumsum(rows)
        assert list(other.cu_seqlens[: len(ends) + 1]) == [0, *ends]
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            assert other.positions_T[begin:end].tolist() == list(range(end - begin))


def test_joined_or_not_the_micro_batches_together_are_the_update() -> None:
    whole = update_of("batch.isolation=false")
    for number in (2, 4):
        split = update_of("batch.isolation=false", f"batch.micro_batches={number}")
        assert split.sha256 == whole.sha256
        labels = torch.cat([batch.labels_T for batch in split.micro_batches])
        (batch,) = whole.micro_batches
        assert labels[labels != IGNORED].tolist() == batch.labels_T[batch.labels_T != IGNORED].tolist()


def test_split_trains_like_whole_and_isolation_makes_a_difference() -> None:
    def losses(*overrides: str) -> list[float]:
        config = tiny(*PACKS, *overrides)
        trainer = make_trainer(config, choose_hardware(config), prepare_dataset(config))
        return [train_update(trainer)["loss"] for _ in range(3)]

    joined = losses("batch.isolation=false")
    assert losses("batch.isolation=false", "batch.micro_batches=4") == pytest.approx(joined, rel=1e-5)
    assert losses()[0] != joined[0]


def test_where_every_row_is_one_document_isolation_changes_nothing() -> None:
    short = ("batch.pack_length=16",)
    alone, joined = update_of(*short), update_of(*short, "batch.isolation=false")
    assert len(alone.pieces.rows) == len(set(alone.pieces.rows.tolist()))
    assert alone.sha256 == joined.sha256
    assert alone.attended.tolist() == joined.attended.tolist()
