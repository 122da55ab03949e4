"""Reading a config: what it becomes, where each value came from, and what its identity is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configs import config, refusal, resolve, setting, value_at, write
from tiny import resolve_tiny

from training_lab.config import fields_by_key
from training_lab.config_files import EXPERIMENTS
from training_lab.errors import UserError
from training_lab.identity import sha256_of_bytes
from training_lab.resolve import config_from_record, resolve_config

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


# --- identity ---

SAME_CONFIG: list[tuple[str, object]] = [
    ("a.json", {"train": {"seed": 5, "updates": 100}, "optimizer": {"max_lr": 3e-4}}),
    ("a.json", {"optimizer": {"max_lr": 3e-4}, "train": {"updates": 100, "seed": 5}}),
    ("a.json", '{"train": {"seed": 5.0, "updates": 1e2}, "optimizer": {"max_lr": 0.00030}}'),
    ("a.json", '\ufeff\n\t{"train":{"seed":5,"updates":100}}'),
    ("a.json", {"train": {"seed": 5, "updates": 100}, "purpose": "other words"}),
    ("a.json", {"train": {"seed": 5, "updates": 100}, "data": {"cache_dir": "elsewhere"}}),
    ("a.json", {"train": {"seed": 5, "updates": 100}, "schedule": {"warmup_updates": 2}, "data": {"order_seed": 5}}),
    ("a.json", {"train": {"seed": 5, "updates": 100}, "model": {}, "optimizer": {"weight_decay": 0.1}}),
    ("a.yaml", "optimizer: {max_lr: 3.0e-4}\ntrain:\n  seed: 5\n  updates: 1_00\n"),
    ("other-name.yml", "{'train': {seed: 0x5, updates: 100}}"),
    ("a.json", {"extends": "base", "train": {"seed": 5}}),
]


@pytest.mark.parametrize(("name", "content"), SAME_CONFIG)
def test_equal_values_have_the_same_identity_however_they_are_written(name: str, content: object) -> None:
    write("base.json", {"train": {"seed": 1, "updates": 100}})
    assert resolve_config(write(name, content)).identity == resolve({}, "train.seed=5", "train.updates=100").identity


@pytest.mark.parametrize("key", ["optimizer.weight_decay", "optimizer.grad_clip", "model.dropout", "optimizer.beta1"])
def test_zero_and_minus_zero_are_the_same_config(key: str) -> None:
    zero, minus_zero = resolve({}, f"{key}=0"), resolve({}, f"{key}=-0.0")
    assert zero.config == minus_zero.config
    assert zero.identity == minus_zero.identity


OTHER_VALUES: dict[str, object] = {
    "data.source": "synthetic",
    "data.paths": ["x"],
    "data.fineweb_files": ["x"],
    "data.fineweb_revision": "main",
    "data.text_field": "x",
    "data.documents": "paragraph",
    "data.invalid_text": "refuse",
    "data.max_documents": 1,
    "data.max_tokens": 1,
    "data.synthetic_documents": 513,
    "data.tokenizer": "char",
    "data.val_fraction": 0.2,
    "data.split_salt": "x",
    "data.duplicates": "drop",
    "data.order_seed": 0,
    "kernels.attention": "sdpa",
    "kernels.loss": "reference",
    "kernels.compile": "off",
    "loss.label_smoothing": 0.1,
    "loss.z_loss": 1e-4,
    "model.num_layers": 7,
    "model.d_model": 260,
    "model.num_heads": 8,
    "model.max_positions": 257,
    "model.dropout": 0.1,
    "batch.layout": "token_budget",
    "batch.block_size": 255,
    "batch.batch_size": 33,
    "batch.tokens": 8193,
    "batch.pack_length": 255,
    "batch.packs": 9,
    "batch.packing": "concat",
    "batch.packing_buffer": 255,
    "batch.micro_batches": 2,
    "optimizer.max_lr": 3.0000001e-4,
    "optimizer.min_lr": 0,
    "optimizer.beta1": 0.91,
    "optimizer.beta2": 0.96,
    "optimizer.eps": 1e-9,
    "optimizer.weight_decay": 0,
    "optimizer.grad_clip": 0,
    "optimizer.name": "muon",
    "optimizer.muon_lr": 0.01,
    "optimizer.muon_scale": "rms",
    "optimizer.muon_momentum": 0.9,
    "optimizer.muon_momentum_warmup": 5,
    "optimizer.muon_steps": 6,
    "schedule.name": "constant",
    "schedule.warmup_updates": 5,
    "schedule.decay_updates": 41,
    "precision.compute": "fp32",
    "train.updates": 201,
    "train.seed": 1338,
    "train.device": "cpu",
    "train.num_threads": 1,
    "eval.every": 51,
    "eval.tokens": 65537,
    "eval.pieces": "documents",
    "eval.batch_tokens": 8193,
    "checkpoint.every": 51,
    "checkpoint.keep_last": 3,
    "checkpoint.keep_best": False,
    "measure.warmup_updates": 11,
    "measure.timeline_from": 12,
    "measure.timeline_updates": 3,
    "measure.memory_update": 13,
    "measure.matmul_probe": True,
}
NO_PART_OF_IDENTITY = {
    "data.cache_dir": "elsewhere",
    "tracking.wandb": "off",
    "tracking.project": "other",
    "tracking.entity": "someone",
    "tracking.tensorboard": True,
    "tracking.csv": True,
    "tracking.report": False,
    "tracking.timeout_s": 5,
}
WITHOUT_ANOTHER_VALUE = {"data.end_of_text", "measure.peak_tflops", "measure.peak_source"}
"""Each has another value only together with another setting's."""


def test_the_table_of_other_values_has_every_setting() -> None:
    assert OTHER_VALUES.keys() | NO_PART_OF_IDENTITY.keys() | WITHOUT_ANOTHER_VALUE == fields_by_key().keys()


@pytest.mark.parametrize("key", list(OTHER_VALUES))
def test_any_other_value_is_another_identity(key: str) -> None:
    changed = resolve(setting(key, OTHER_VALUES[key]))
    assert value_at(changed, key) == OTHER_VALUES[key]
    assert changed.identity != resolve({}).identity


@pytest.mark.parametrize("key", list(NO_PART_OF_IDENTITY))
def test_places_and_mirrors_are_no_part_of_the_identity(key: str) -> None:
    changed = resolve(setting(key, NO_PART_OF_IDENTITY[key]))
    assert value_at(changed, key) == NO_PART_OF_IDENTITY[key]
    assert changed.identity == resolve({}).identity


def test_a_peak_of_ones_own_belongs_to_the_identity_and_needs_its_source() -> None:
    resolve({"measure": {"peak_tflops": 3.5, "peak_source": "data sheet"}})
    for measure in ({"peak_tflops": 3.5}, {"peak_tflops": 3.5, "peak_source": " "}):
        with pytest.raises(UserError, match=r"config\.json: measure\.peak_tflops: needs measure\.peak_source"):
            resolve({"measure": measure})
    with pytest.raises(UserError, match=r"config\.json: measure\.peak_source: has no meaning without"):
        resolve({"measure": {"peak_source": "data sheet"}})


def test_where_the_token_between_documents_is_belongs_to_the_identity() -> None:
    places = [resolve({"data": {"tokenizer": "gpt2", "end_of_text": place}}) for place in ("none", "start", "end")]
    assert len({resolved.identity for resolved in places}) == 3
    assert resolve({"data": {"tokenizer": "gpt2"}}).identity == places[1].identity


# --- the record of a run ---


def test_the_record_of_a_version_that_knew_fewer_settings_is_refused_with_their_names() -> None:
    stored = json.loads(json.dumps(resolve({}).record()))
    del stored["values"]["data"]["max_tokens"]
    with pytest.raises(UserError, match=r"^run/config\.json: of another version of the lab, .* data\.max_tokens$"):
        config_from_record(stored, "run/config.json")


@pytest.mark.parametrize("name", NAMES_OF_EXPERIMENTS)
def test_a_record_gives_the_same_config_back(name: str) -> None:
    resolved = resolve_config(
        name, ["optimizer.max_lr=0.1", 'data.paths=["한글", "b"]', "data.split_salt=소금\u2028", "purpose=실험"]
    )
    stored = json.loads(json.dumps(resolved.record(), ensure_ascii=False, allow_nan=False))
    again = config_from_record(stored, "config.json")
    assert again == resolved
    assert again.identity == resolved.identity
    assert again.record() == resolved.record()


@pytest.mark.parametrize("key", [key for key in OTHER_VALUES if key not in ("data.source", "batch.layout")])
def test_a_record_with_a_value_changed_afterwards_is_refused(key: str) -> None:
    stored = json.loads(json.dumps(resolve({}).record()))
    section, name = key.split(".")
    stored["values"][section][name] = OTHER_VALUES[key]
    with pytest.raises(UserError, match=r"^run/config\.json: .*changed"):
        config_from_record(stored, "run/config.json")


def changed_record(**changes: object) -> dict[str, Any]:
    return {**resolve_tiny().record(), **changes}


RECORD_DAMAGES: dict[str, dict[str, Any]] = {
    "values are a list": {"values": []},
    "values are nothing": {"values": None},
    "a section is a number": {"values": {"train": 3}},
    "a value has another type": {"values": {"train": {"seed": "1"}}},
    "a value is out of range": {"values": {"train": {"seed": -1}}},
    "files are a number": {"files": 3},
    "a file has another form": {"files": [{"label": "a", "sha256": "b", "size": 3}]},
    "a file is a text": {"files": ["a"]},
    "origins are a number": {"origins": 3},
    "origins are a list": {"origins": [["a"]]},
    "arguments are a number": {"arguments": 3},
    "the identity is another": {"identity": "0" * 64},
    "the identity is nothing": {"identity": None},
}


@pytest.mark.parametrize("damage", list(RECORD_DAMAGES))
def test_a_damaged_record_is_refused_in_one_line_that_names_it(damage: str) -> None:
    with pytest.raises(UserError, match=r"^run/config\.json: .*\Z"):
        config_from_record(changed_record(**RECORD_DAMAGES[damage]), "run/config.json")


@pytest.mark.parametrize("key", ["name", "identity", "arguments", "files", "values", "origins"])
def test_a_record_without_one_of_its_parts_is_refused(key: str) -> None:
    stored = changed_record()
    del stored[key]
    with pytest.raises(UserError, match=r"^run/config\.json: .*\Z"):
        config_from_record(stored, "run/config.json")


def test_the_config_of_a_run_can_be_given_as_a_config_again() -> None:
    original = resolve({"optimizer": {"max_lr": 2e-3}}, "train.seed=5")
    again = resolve_config(write("run/config.json", original.record()))
    assert again.identity == original.identity
    assert again.name == original.name
    changed = resolve_config("run/config.json", ["train.seed=6"])
    assert changed.config.optimizer.max_lr == 2e-3
    assert changed.config.train.seed == 6
