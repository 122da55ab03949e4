"""Reading a config: what it becomes, where each value came from, and what its identity is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import config, refusal, resolve, value_at, write

from training_lab.config import fields_by_key
from training_lab.config_files import EXPERIMENTS
from training_lab.identity import sha256_of_bytes
from training_lab.resolve import resolve_config

NAMES_OF_EXPERIMENTS = sorted(path.stem for path in EXPERIMENTS.iterdir())


# --- the shipped experiments ---


@pytest.mark.parametrize("name", NAMES_OF_EXPERIMENTS)
def test_every_shipped_experiment_resolves_with_a_purpose_and_without_a_warning(name: str) -> None:
    resolved = resolve_config(name)
    assert resolved.name == name
    assert resolved.config.purpose.strip()
    assert resolved.warnings() == []


def test_the_baseline_has_exactly_the_numbers_of_the_reference() -> None:
    baseline = resolve_config("baseline").config
    assert (baseline.model.num_layers, baseline.model.d_model, baseline.model.num_heads) == (6, 256, 4)
    assert (baseline.batch.layout, baseline.batch.block_size, baseline.batch.batch_size) == ("windows", 256, 32)
    assert (baseline.optimizer.max_lr, baseline.optimizer.min_lr, baseline.optimizer.grad_clip) == (3e-4, 3e-5, 1.0)
    assert (baseline.schedule.name, baseline.schedule.warmup_updates) == ("cosine", 20)
    assert (baseline.train.updates, baseline.train.seed) == (200, 1337)
    assert baseline.batch.update_tokens == 8192


def test_smoke_is_four_layers_six_updates_and_a_token_budget() -> None:
    smoke = resolve_config("smoke").config
    assert (smoke.model.num_layers, smoke.model.d_model, smoke.model.num_heads) == (4, 256, 4)
    assert (smoke.batch.layout, smoke.train.updates) == ("token_budget", 6)
    assert smoke.batch.update_tokens == smoke.batch.tokens


# --- files, chains and overrides ---


def test_in_a_chain_of_files_the_nearest_value_wins_key_by_key() -> None:
    write("a.json", {"extends": "b", "train": {"seed": 1}})
    write("b.yaml", "extends: c.json\ntrain: {seed: 2, updates: 70}\n")
    write("c.json", {"train": {"seed": 3, "updates": 80, "device": "cpu"}, "optimizer": {"max_lr": 1}})
    resolved = resolve_config("a.json")
    train = resolved.config.train
    assert (train.seed, train.updates, train.device, resolved.config.optimizer.max_lr) == (1, 70, "cpu", 1.0)
    assert [file.label for file in resolved.files] == ["a.json", "b.yaml", "c.json"]
    assert [file.sha256 for file in resolved.files] == [
        sha256_of_bytes(Path(name).read_bytes()) for name in ("a.json", "b.yaml", "c.json")
    ]


def test_every_value_says_where_it_came_from() -> None:
    write("near.json", {"extends": "far", "train": {"updates": 70}})
    write("far.json", {"train": {"updates": 80, "seed": 5}})
    resolved = resolve_config("near.json", ["optimizer.beta1=0.8"])
    origins = resolved.origins
    assert list(origins) == list(fields_by_key())
    assert origins["train.updates"] == "near.json"
    assert origins["train.seed"] == "far.json"
    assert origins["optimizer.beta1"] == "--set"
    assert origins["optimizer.beta2"] == "default"
    assert origins["data.order_seed"] == "derived: train.seed"
    assert resolved.config.data.order_seed == 5


@pytest.mark.parametrize("base", ["base", "base.json", "./base.json", "../configs/base"])
def test_a_base_is_looked_for_beside_the_file_and_not_in_the_current_folder(base: str) -> None:
    write("base.json", {"train": {"seed": 1}})
    write("configs/base.json", {"train": {"seed": 2}})
    name = write("configs/near.json", {"extends": base})
    resolved = resolve_config(name)
    assert resolved.config.train.seed == 2
    assert resolved.files[1].label == "configs/base.json"


def test_a_base_beside_the_file_is_nearer_than_an_experiment_of_that_name() -> None:
    write("smoke.json", {"train": {"seed": 99}})
    assert resolve_config(write("near.json", {"extends": "smoke"})).config.train.seed == 99


def test_a_base_can_be_an_experiment() -> None:
    resolved = resolve({"extends": "baseline", "train": {"seed": 1}})
    expected = resolve_config("baseline", ["train.seed=1"])
    assert resolved.identity == expected.identity
    assert resolved.files[1].label == "experiments/baseline.json"
    assert resolved.origins["model.num_layers"] == "experiments/baseline.json"


@pytest.mark.parametrize("chain", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_circle_of_bases_is_refused(chain: list[str]) -> None:
    for name, base in zip(chain, [*chain[1:], chain[0]], strict=True):
        write(f"{name}.json", {"extends": base})
    message = refusal("a.json")
    assert message.startswith("a.json: extends: ")
    assert "circle" in message


def test_a_circle_among_the_bases_is_refused_and_named() -> None:
    write("near.json", {"extends": "a"})
    write("a.json", {"extends": "b"})
    write("b.json", {"extends": "a"})
    message = refusal("near.json")
    assert "circle" in message
    assert "a.json" in message


def test_a_circle_through_another_name_of_the_same_file_is_refused() -> None:
    write("a.json", {"extends": "link"})
    Path("link.json").symlink_to("a.json")
    assert "circle" in refusal("a.json")


@pytest.mark.parametrize("base", ["nowhere", "nowhere.json", "", "../nowhere/base", "a\0b"])
def test_a_base_that_is_nowhere_is_refused(base: str) -> None:
    assert refusal(write("near.json", {"extends": base})).startswith(f"near.json: extends: {base!r}: ")


@pytest.mark.parametrize("base", [1, True, ["baseline"], {"name": "baseline"}])
def test_a_base_that_is_not_a_name_is_refused(base: object) -> None:
    assert refusal(write("near.json", {"extends": base})).startswith("near.json: extends")


def test_an_error_in_a_base_names_the_base() -> None:
    write("base.json", {"train": {"updates": -1}})
    assert refusal(write("near.json", {"extends": "base"})).startswith("base.json: train.updates: ")


def test_overrides_win_over_files_and_later_ones_over_earlier() -> None:
    resolved = resolve({"train": {"seed": 1, "updates": 50}}, "train.seed=2", "train.seed=3")
    assert (resolved.config.train.seed, resolved.config.train.updates) == (3, 50)
    assert resolved.arguments == ("--config", "config.json", "--set", "train.seed=2", "--set", "train.seed=3")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optimizer.max_lr=1e-3", "optimizer.max_lr", 1e-3),
        ("train.device=cpu", "train.device", "cpu"),
        ('train.device="cpu"', "train.device", "cpu"),
        ("checkpoint.keep_best=false", "checkpoint.keep_best", False),
        ("data.split_salt=a=b c", "data.split_salt", "a=b c"),
        ("data.split_salt=", "data.split_salt", ""),
        ('data.split_salt="12"', "data.split_salt", "12"),
        ('data.paths=["가/*.txt", "b"]', "data.paths", ["가/*.txt", "b"]),
        ('train={"updates": 5}', "train.updates", 5),
    ],
)
def test_an_override_is_json_or_else_text(override: str, key: str, value: object) -> None:
    resolved = resolve({}, override)
    assert value_at(resolved, key) == value
    assert resolved.origins[key] == "--set"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.seed", "--set train.seed: "),
        ("=1", "--set =1: "),
        ("train.sede=1", "--set: train.sede: unknown key; the nearest is train.seed"),
        ("train=1", "--set: train: must be an object"),
        ("train.seed=-1", "--set: train.seed: must be at least 0"),
        ("train.seed=1.5", "--set: train.seed: must be a whole number"),
        ("train.seed=", "--set: train.seed: must be a whole number"),
        ("train.seed=NaN", "--set train.seed: NaN"),
        ("optimizer.max_lr=Infinity", "--set optimizer.max_lr: Infinity"),
        ("optimizer.max_lr=-Infinity", "--set optimizer.max_lr: -Infinity"),
        ("optimizer.max_lr=1e999", "--set: optimizer.max_lr: must be a number"),
        ("data.paths=notes", "--set: data.paths: must be a list of texts"),
        ('train={"seed": 1, "seed": 2}', "--set train: seed: written twice"),
        ("train..seed=1", "--set: train..seed: "),
        (".=1", "--set: .: unknown key"),
    ],
)
def test_a_wrong_override_is_refused_by_name(override: str, expected: str) -> None:
    assert refusal(write("config.json", {}), override).startswith(expected)


def test_extends_as_an_override_is_not_called_its_own_nearest_key() -> None:
    message = refusal(write("config.json", {}), "extends=baseline")
    assert message.startswith("--set")
    assert "the nearest is extends" not in message


# --- what follows from other values ---


@pytest.mark.parametrize(
    ("updates", "warmup"), [(1, 0), (2, 1), (3, 1), (50, 1), (99, 2), (200, 4), (1000, 20), (100_000, 2000)]
)
def test_warm_up_left_out_is_two_percent_of_the_updates_and_at_least_one(updates: int, warmup: int) -> None:
    assert config(f"train.updates={updates}").schedule.warmup_updates == warmup


@pytest.mark.parametrize(("max_lr", "min_lr"), [("3e-4", 3e-4 / 10), ("1", 0.1)])
def test_the_last_learning_rate_left_out_is_a_tenth_of_the_highest(max_lr: str, min_lr: float) -> None:
    assert config(f"optimizer.max_lr={max_lr}").optimizer.min_lr == min_lr


def test_the_seed_of_the_order_left_out_is_the_runs_seed() -> None:
    assert config("train.seed=7").data.order_seed == 7
    assert config("train.seed=7", "data.order_seed=8").data.order_seed == 8


@pytest.mark.parametrize(("layout", "pieces"), [("windows", "windows"), ("token_budget", "documents")])
def test_the_validation_text_is_cut_as_the_layout_reads(layout: str, pieces: str) -> None:
    assert config(f"batch.layout={layout}").eval.pieces == pieces


@pytest.mark.parametrize(
    ("source", "unit"), [("stdlib", "file"), ("shakespeare", "paragraph"), ("synthetic", "file"), ("files", "file")]
)
def test_what_a_document_is_follows_from_the_source(source: str, unit: str) -> None:
    assert config(f"data.source={source}", 'data.paths=["x"]').data.documents == unit


@pytest.mark.parametrize(("updates", "decay"), [(1, 0), (2, 0), (10, 2), (200, 40)])
def test_the_final_fall_left_out_is_a_fifth_of_the_updates(updates: int, decay: int) -> None:
    assert config("schedule.name=wsd", f"train.updates={updates}").schedule.decay_updates == decay


def test_the_final_fall_left_out_fits_behind_a_long_warm_up() -> None:
    schedule = config("schedule.name=wsd", "train.updates=100", "schedule.warmup_updates=90").schedule
    assert (schedule.warmup_updates, schedule.decay_updates) == (90, 10)
