"""`corrected`, `corrected-fast` and `profile` train on a CPU, end to end: the first at its whole size."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakehub import make_parquet
from tiny import run

from training_lab.config import Config
from training_lab.data.dataset import prepare_dataset
from training_lab.data.synthetic import synthetic_document
from training_lab.data.tokenizers import Gpt2Tokenizer
from training_lab.engine import compile_trainer, train_update
from training_lab.kernels import choose_kernels
from training_lab.precision import choose_hardware, plan_hardware
from training_lab.resolve import resolve_config
from training_lab.trainer import make_trainer

DOCUMENTS = 150

WHOLE = [
    "data.source=files", 'data.paths=["fineweb.parquet"]', "batch.packs=1", "batch.micro_batches=1",
    "batch.pack_length=1024", "train.updates=2", "schedule.warmup_updates=1", "eval.tokens=2048", "eval.every=0",
    "checkpoint.every=2", "measure.warmup_updates=0",
]  # fmt: skip
"""Two updates of a quarter of a pack, in place of a hundred of 35; the model and its optimizer stay as they are."""


def settings(overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def write_fineweb(path: Path) -> None:
    """A file of FineWeb's columns, of GPT-2's own words: some often, many seldom, in an order that nothing foretells.

    Before training a loss is the mean over its targets; over few words it would say more of those than of the model.
    """
    tokenizer, generator = Gpt2Tokenizer(), np.random.default_rng(5)
    tokens = (tokenizer.token_bytes(token).decode("latin-1") for token in range(tokenizer.vocab_size - 1))
    words = [token for token in tokens if len(token) > 3 and token[0] == " " and token.isascii()]
    words = [word for word in words if word[1:].isalpha() and word.islower()]
    frequencies = 1 / (np.arange(len(words)) + 20)
    lengths = generator.lognormal(5.5, 1.0, DOCUMENTS).astype(int).clip(5, 3000)
    texts = ["".join(generator.choice(words, size, p=frequencies / frequencies.sum())) + "." for size in lengths]
    table = pq.read_table(io.BytesIO(make_parquet(DOCUMENTS)))
    counts = [len(ids) for ids in tokenizer.encode(texts)]
    for name, column in (("text", pa.array(texts)), ("token_count", pa.array(counts, pa.int64()))):
        table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table, path)


class Trained(NamedTuple):
    """A finished run."""

    folder: Path

    def read(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / name).read_text("utf-8"))
        return content

    def rows(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]


def train(config: str, overrides: list[str], folder: Path) -> Trained:
    """Trains a config in a process of its own."""
    done = run("train", "--config", config, "--json", *settings(overrides), cwd=folder)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / ".runs").iterdir()
    return Trained(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """`corrected` at its whole size, after two updates. Its 1.5 GB are not left behind."""
    folder = tmp_path_factory.mktemp("corrected")
    write_fineweb(folder / "fineweb.parquet")
    yield train("corrected", WHOLE, folder)
    shutil.rmtree(folder)


def test_corrected_has_the_126_716_160_parameters_of_the_seed_documents(trained: Trained) -> None:
    config = trained.read("config.json")
    assert config["model"]["parameters"] == 126_716_160
    assert sum(group["values"] for group in config["model"]["optimizer_groups"]) == 126_716_160


def test_corrected_starts_at_the_loss_that_its_initialisation_foretells_and_learns(trained: Trained) -> None:
    before, after = trained.rows("evaluation")
    first, second = trained.rows("update")
    assert (before["update"], after["update"]) == (0, 2)
    assert before["target_tokens"] == after["target_tokens"] > 1900
    assert before["val_loss"] == pytest.approx(10.98, abs=0.03)
    assert first["loss"] == pytest.approx(10.98, abs=0.03)
    assert second["loss"] < first["loss"] - 0.1
    assert after["val_loss"] < before["val_loss"] - 0.1
    summary = trained.read("summary.json")
    assert summary["initial_loss"]["is_plausible"]
    assert (summary["val_loss"]["last"], summary["val_loss"]["best_update"]) == (after["val_loss"], 2)


def test_an_update_learns_from_a_pack_less_one_token_for_each_piece(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.folder.parent.parent)
    dataset = prepare_dataset(resolve_config("corrected", WHOLE).config)
    counts = dataset.cache.manifest["token_count_column"]
    assert (counts["checked"], counts["mismatches"]) == (DOCUMENTS, 0)
    for row in trained.rows("update"):
        lengths = dataset.update_data(row["update"]).pieces.lengths
        assert 960 < row["input_tokens"] == lengths.sum() <= 1024
        assert row["target_tokens"] == row["input_tokens"] - len(lengths)
    summary = trained.read("summary.json")
    targets = sum(row["target_tokens"] for row in trained.rows("update"))
    assert summary["target_tokens"] == summary["throughput"]["measured_target_tokens"] == targets


def test_the_kernels_of_corrected_are_recorded_with_their_reasons(trained: Trained) -> None:
    (process,) = trained.read("environment.json")["processes"]
    assert (process["device"], process["compute"]) == ("cpu", "fp32")
    assert (process["attention"], process["loss"], process["compile"]) == ("sdpa", "chunked", False)
    assert "flash: it runs on CUDA only" in process["attention_reason"]
    assert "flex: FlexAttention has no backward pass there" in process["attention_reason"]
    assert process["loss_reason"] == "no liger: Liger's kernels run on CUDA only"
    assert process["compile_reason"] == "switched off by kernels.compile"
    assert process["compile_state"] == "off"


def test_the_folder_of_corrected_is_whole_and_verifies(trained: Trained) -> None:
    files = {"config.json", "source.json", "source.zip", "environment.json", "data-manifest.json", "data-stats.json",
             "metrics.jsonl", "summary.json", "manifest.json"}  # fmt: skip
    assert files <= {path.name for path in trained.folder.iterdir()}
    summary = trained.read("summary.json")
    assert (summary["state"], summary["updates"], summary["checkpoints"]) == ("finished", 2, [2])
    verified = run("verify", trained.folder.name, cwd=trained.folder.parent.parent)
    assert verified.returncode == 0, verified.stdout + verified.stderr


SMALL = [
    "data.source=files", 'data.paths=["paragraphs.txt"]', "data.documents=paragraph", "data.tokenizer=byte",
    "data.end_of_text=none", "model.num_layers=2", "model.d_model=64", "model.num_heads=2", "eval.tokens=512",
]  # fmt: skip


class Learned(NamedTuple):
    """What two updates came to."""

    losses: list[float]
    batches: list[str]
    micro_batches: int


def small(name: str, *overrides: str) -> Config:
    """A config with its packs of 4,096, 35 an update, and a model and text that a CPU trains on in seconds.

    Most documents are short, so that a pack holds many and attention costs little; a few are nearly as long as a pack.
    """
    texts = [synthetic_document(number).text for number in range(1000)]
    short = "\n\n".join(text if number % 100 == 0 else text[:500] for number, text in enumerate(texts))
    Path("paragraphs.txt").write_bytes(short.encode("ascii"))
    return resolve_config(name, [*SMALL, *overrides]).config


def learn(config: Config) -> Learned:
    trainer = make_trainer(config, choose_hardware(config), prepare_dataset(config))
    assert compile_trainer(trainer, pytest.fail) == {"compile_state": "off"}
    rows = [train_update(trainer) for _ in range(2)]
    parts = len(trainer.dataset.update_data(1).micro_batches)
    return Learned([row["loss"] for row in rows], [row["batch_sha256"] for row in rows], parts)


@pytest.fixture(scope="module")
def corrected(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("small"))
        return learn(small("corrected"))


def test_corrected_fast_learns_the_same_and_is_not_compiled_on_a_cpu(corrected: Learned) -> None:
    config = small("corrected-fast")
    kernels = choose_kernels(config, choose_hardware(config))
    assert (config.kernels.compile, kernels.compile) == ("auto", False)
    assert kernels.compile_reason == "on a CPU it costs half a minute and gains nothing that could be measured"
    fast = learn(config)
    assert (fast.batches, fast.micro_batches) == (corrected.batches, corrected.micro_batches)
    assert fast.losses == pytest.approx(corrected.losses, abs=1e-5)
    assert fast.losses[1] < fast.losses[0]


@pytest.mark.parametrize("micro_batches", [35, 7])
def test_into_how_many_micro_batches_an_update_is_split_changes_nothing(micro_batches: int, corrected: Learned) -> None:
    split = learn(small("corrected", f"batch.micro_batches={micro_batches}"))
    assert (corrected.micro_batches, split.micro_batches) == (1, micro_batches)
    assert split.batches == corrected.batches
    assert split.losses == pytest.approx(corrected.losses, rel=1e-6)


def test_profile_records_its_updates_and_measures_only_those_in_between(tmp_path: Path) -> None:
    shorter = ["data.max_documents=2000", "batch.tokens=1024", "train.updates=8", "eval.every=0", "eval.tokens=1024",
               "checkpoint.every=8", "measure.warmup_updates=3", "measure.timeline_from=5",
               "measure.timeline_updates=1", "measure.memory_update=8"]  # fmt: skip
    profile = train("profile", shorter, tmp_path)
    summary = profile.read("summary.json")
    throughput = summary["throughput"]
    assert [one["update"] for one in throughput["excluded"]] == [1, 2, 3, 4, 5, 8]
    assert throughput["measured_updates"] == 2
    targets = [row["target_tokens"] for row in profile.rows("update")]
    assert throughput["measured_target_tokens"] == sum(targets[5:7])
    assert (summary["timeline"]["updates"], profile.read("memory-events.json")["update"]) == ([5], 8)
    assert summary["utilisation"]["matmul_share"]["causal"] > 0
    assert throughput["target_tokens_per_s"] > 0
    losses = [row["loss"] for row in profile.rows("update")]
    assert losses[-1] < losses[0]
    (process,) = profile.read("environment.json")["processes"]
    assert (process["attention"], process["loss"], process["compile"]) == ("sdpa", "chunked", False)


def test_profile_is_smoke_with_more_updates() -> None:
    smoke, profile = resolve_config("smoke").config, resolve_config("profile").config
    assert (smoke.train.updates, profile.train.updates, profile.measure.warmup_updates) == (6, 24, 10)
    assert (profile.data, profile.model, profile.batch) == (smoke.data, smoke.model, smoke.batch)
    assert (profile.optimizer, profile.loss, profile.precision) == (smoke.optimizer, smoke.loss, smoke.precision)
    assert smoke.kernels.attention == profile.kernels.attention == "auto_flex"
    assert (profile.measure.timeline_from, profile.measure.memory_update) == (15, 24)


def test_corrected_is_watched_where_the_seed_documents_say() -> None:
    measure = resolve_config("corrected").config.measure
    watched = (measure.warmup_updates, measure.timeline_from, measure.timeline_updates, measure.memory_update)
    assert watched == (10, 21, 2, 100)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smoke", ("flex", "liger", True)),
        ("profile", ("flex", "liger", True)),
        ("corrected", ("flash", "liger", False)),
        ("corrected-fast", ("flash", "chunked", True)),
    ],
)
def test_on_a_cuda_gpu_each_config_takes_its_path(name: str, expected: tuple[str, str, bool]) -> None:
    config = resolve_config(name).config
    kernels = choose_kernels(config, plan_hardware(config, "NVIDIA H100 80GB HBM3"))
    assert (kernels.attention, kernels.loss, kernels.compile) == expected
    assert all((kernels.attention_reason, kernels.loss_reason, kernels.compile_reason))
