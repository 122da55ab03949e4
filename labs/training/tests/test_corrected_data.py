"""The `corrected` data settings: 35 packs of 4,096 an update, from FineWeb or a Parquet file with its columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fakehub import make_parquet
from tiny import run, train_tiny

from training_lab.config import Config
from training_lab.data.batches import IGNORED
from training_lab.data.dataset import Dataset, prepare_dataset
from training_lab.resolve import resolve_config

NUM_PACKS, PACK_LENGTH = 35, 4096


def corrected(*overrides: str) -> Config:
    own = ["data.source=files", 'data.paths=["fineweb.parquet"]', *overrides]
    return resolve_config("corrected", own).config


@pytest.fixture
def dataset() -> Dataset:
    Path("fineweb.parquet").write_bytes(make_parquet(2000))
    return prepare_dataset(corrected("batch.micro_batches=7"))


def test_an_update_is_35_packs_of_4096_slots_in_micro_batches_of_one_shape(dataset: Dataset) -> None:
    for update in (1, 2, 100):
        data = dataset.update_data(update)
        assert data.pieces.rows[-1] + 1 == NUM_PACKS
        assert len(data.micro_batches) == 7
        for batch in data.micro_batches:
            assert len(batch.tokens_T) == 5 * PACK_LENGTH
            assert len(batch.cu_seqlens) == dataset.max_pieces + 1
            assert max(np.diff(batch.cu_seqlens)) <= PACK_LENGTH
        labels = sum(int((batch.labels_T != IGNORED).sum()) for batch in data.micro_batches)
        assert labels == data.num_target_tokens == int((data.pieces.lengths - 1).sum())


def test_a_parquet_file_with_fineweb_columns_is_read_as_fineweb_is_and_its_token_counts_agree(dataset: Dataset) -> None:
    checked = dataset.cache.manifest["token_count_column"]
    assert (checked["checked"], checked["mismatches"]) == (dataset.cache.manifest["documents"], 0)
    assert dataset.train.end_of_text.place == "start"
    begins = dataset.train.take(dataset.train.offsets[:-1])
    assert set(begins.tolist()) == {50256}


def test_the_fineweb_of_corrected_is_the_pinned_file_and_asks_nobody() -> None:
    config = resolve_config("corrected").config
    assert (config.data.source, config.data.tokenizer) == ("fineweb", "gpt2")
    assert (config.batch.packs, config.batch.pack_length, config.train.updates) == (NUM_PACKS, PACK_LENGTH, 100)


SMALL = [
    "data.tokenizer=gpt2", "data.synthetic_documents=24", "batch.layout=packs", "batch.packs=40",
    "batch.micro_batches=6", "model.max_positions=48", "train.updates=8", "checkpoint.every=2", "eval.every=4",
    "schedule.warmup_updates=1",
]  # fmt: skip


def test_a_run_over_several_epochs_of_packs_stopped_twice_equals_one_that_never_stopped() -> None:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    whole = train_tiny(*settings, "--runs", "whole")
    for stop in ("3", "5"):
        train_tiny(*settings, "--runs", "parts", "--stop-after", stop)
    parts = train_tiny(*settings, "--runs", "parts")
    assert parts[0]["continues_after_update"] == 5
    assert parts[-1]["weights_sha256"] == whole[-1]["weights_sha256"]
    hashes = {row["update"]: row["batch_sha256"] for row in whole if row["kind"] == "update"}
    rest = {row["update"]: row["batch_sha256"] for row in parts if row["kind"] == "update"}
    assert rest == {update: hashes[update] for update in (6, 7, 8)}
    folder = next(Path("parts").iterdir())
    verified = run("verify", folder.name, "--runs", "parts", "--replay", "2", "--json")
    assert verified.returncode == 0, verified.stdout
    manifest = json.loads((folder / "data-manifest.json").read_text("utf-8"))
    assert manifest["plan"]["layout"] == "packs-v1"
    stats = json.loads((folder / "data-stats.json").read_text("utf-8"))
    assert 40 < stats["packing"]["packs"] < 5 * 40, "an epoch ends before the second stop"
