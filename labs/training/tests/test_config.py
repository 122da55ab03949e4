"""Reading a config: what is accepted, what it becomes, where each value came from, and how every mistake is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import TRAINING, resolve_tiny

from training_lab.config import Config, fields_by_key, sections, values_of
from training_lab.errors import UserError
from training_lab.identity import sha256_of_bytes
from training_lab.resolve import EXPERIMENTS, Resolved, config_from_record, resolve_config

NAMES_OF_EXPERIMENTS = sorted(path.stem for path in EXPERIMENTS.iterdir())

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A system that says nothing about its character set, with both of Python's rescues off."""


def write(name: str, content: object) -> str:
    """Writes a config: a text or bytes as they are, anything else as JSON."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, (str, bytes)):
        content = json.dumps(content, ensure_ascii=False)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return name


def resolve(content: object, *overrides: str) -> Resolved:
    """What a config with this content, in a file of its own, becomes."""
    return resolve_config(write("config.json", content), overrides)


def config(*overrides: str) -> Config:
    """The defaults, changed by overrides."""
    return resolve({}, *overrides).config


def refusal(name: str, *overrides: str) -> str:
    """The one line with which a config is refused."""
    with pytest.raises(UserError) as caught:
        resolve_config(name, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, f"an error is one line, this is {message!r}"
    assert caught.value.exit_code == 2
    return message


def value_at(resolved: Resolved, key: str) -> Any:
    section, name = key.split(".")
    return values_of(resolved.config)[section][name]


def setting(key: str, value: object) -> dict[str, Any]:
    section, name = key.split(".")
    return {section: {name: value}}


def number_keys() -> dict[str, type]:
    """Every setting that is a number, with its type."""
    found = {}
    for section, cls in sections().items():
        hints = typing.get_type_hints(cls)
        found.update({f"{section}.{name}": kind for name, kind in hints.items() if kind in (int, float)})
    return found


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
    "data.documents": "paragraph",
    "data.synthetic_documents": 513,
    "data.tokenizer": "char",
    "data.val_fraction": 0.2,
    "data.split_salt": "x",
    "data.order_seed": 0,
    "model.num_layers": 7,
    "model.d_model": 260,
    "model.num_heads": 8,
    "model.max_positions": 257,
    "model.dropout": 0.1,
    "batch.layout": "token_budget",
    "batch.block_size": 255,
    "batch.batch_size": 33,
    "batch.tokens": 8193,
    "batch.micro_batches": 2,
    "optimizer.max_lr": 3.0000001e-4,
    "optimizer.min_lr": 0,
    "optimizer.beta1": 0.91,
    "optimizer.beta2": 0.96,
    "optimizer.eps": 1e-9,
    "optimizer.weight_decay": 0,
    "optimizer.grad_clip": 0,
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
}
WITHOUT_ANOTHER_VALUE = {"data.cache_dir", "optimizer.name"}
"""No part of the identity; has a single value."""


def test_the_table_of_other_values_has_every_setting() -> None:
    assert OTHER_VALUES.keys() | WITHOUT_ANOTHER_VALUE == fields_by_key().keys()


@pytest.mark.parametrize("key", list(OTHER_VALUES))
def test_any_other_value_is_another_identity(key: str) -> None:
    changed = resolve(setting(key, OTHER_VALUES[key]))
    assert value_at(changed, key) == OTHER_VALUES[key]
    assert changed.identity != resolve({}).identity


# --- the record of a run ---


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


# --- keys ---


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"train": {"sede": 1}}, "train.sede: unknown key; the nearest is train.seed"),
        ({"optimizer": {"beta3": 1}}, "optimizer.beta3: unknown key; the nearest is optimizer.beta"),
        ({"seed": 1}, "seed: no setting of that name there; did you mean train.seed?"),
        ({"optimizer": {"seed": 1}}, "optimizer.seed: no setting of that name there; did you mean train.seed?"),
        ({"train": {"every": 1}}, "train.every: no setting of that name there; did you mean eval.every or checkpoint"),
        ({"trian": {"seed": 1}}, "trian.seed: no setting of that name there; did you mean train.seed?"),
        ({"train": {"seed": {"x": 1}}}, "train.seed.x: unknown key; the nearest is train.seed"),
        ({"train": {"extends": "x"}}, "train.extends: unknown key; the nearest is extends"),
        ({"purpos": "x"}, "purpos: unknown key; the nearest is purpose"),
        ({"extend": "x"}, "extend: unknown key; the nearest is extends"),
        ({"purpose": {"why": "x"}}, "purpose.why: unknown key"),
        ({"훈련": {"씨앗": 1}}, "훈련.씨앗: unknown key"),
        ({"train": 3}, "train: must be an object of settings, got 3"),
        ({"train": None}, "train: must be an object of settings, got null"),
        ({"train": [{"seed": 1}]}, "train: must be an object of settings, got ["),
        ({"": 1}, ": unknown key"),
    ],
)
def test_an_unknown_or_misplaced_key_is_refused_with_its_path_and_the_nearest(content: object, expected: str) -> None:
    assert refusal(write("a.json", content)).startswith(f"a.json: {expected}")
    assert refusal(write("a.yaml", yaml.safe_dump(content, allow_unicode=True))).startswith(f"a.yaml: {expected}")


def test_a_key_that_is_no_text_is_refused() -> None:
    assert refusal(write("a.yaml", "3: 4\n")).startswith("a.yaml: 3: unknown key")


@pytest.mark.parametrize("content", [{"train.seed": 1}, {"train": {"a.b": 1}}])
def test_a_dotted_key_is_refused_with_the_file(content: dict[str, Any]) -> None:
    message = refusal(write("a.json", content))
    assert "a key holds no dot" in message
    assert message.startswith("a.json: ")


def test_a_key_with_a_line_break_is_refused_in_one_line() -> None:
    assert refusal(write("a.json", {"a\nb": 1})).startswith("a.json: ")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", '{"train": {"seed": 1, "seed": 1}}', "a.json: seed: written twice"),
        ("a.json", '{"train": {"seed": 1}, "train": {"updates": 5}}', "a.json: train: written twice"),
        ("a.json", '{"purpose": "x", "extends": "b", "extends": "b"}', "a.json: extends: written twice"),
        ("a.yaml", "train:\n  seed: 1\n  seed: 2\n", "a.yaml:3: seed: written twice"),
        ("a.yaml", "train: {seed: 1}\n\ntrain: {updates: 2}\n", "a.yaml:3: train: written twice"),
        ("a.yaml", "train: {seed: 1, 'seed': 1}", "a.yaml:1: seed: written twice"),
    ],
)
def test_a_key_that_is_written_twice_is_refused(name: str, content: str, expected: str) -> None:
    assert refusal(write(name, content)).startswith(expected)


def test_the_same_key_in_two_sections_is_no_duplicate() -> None:
    resolved = resolve_config(write("a.yaml", "eval: {every: 3}\ncheckpoint: {every: 4}\n"))
    assert (resolved.config.eval.every, resolved.config.checkpoint.every) == (3, 4)


# --- types ---


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("optimizer.max_lr", '"1e-4"', "must be a number, got the text"),
        ("optimizer.max_lr", '"fast"', "must be a number, got the text"),
        ("optimizer.max_lr", "true", "must be a number, got true"),
        ("optimizer.max_lr", "null", "must be a number, got null"),
        ("optimizer.max_lr", "[3e-4]", "must be a number, got [0.0003]"),
        ("optimizer.max_lr", "1e999", "must be a number, got Infinity"),
        ("train.updates", '"200"', "must be a whole number, got the text"),
        ("train.updates", "true", "must be a whole number, got true"),
        ("train.updates", "1.5", "must be a whole number, got 1.5"),
        ("train.updates", "1e-1", "must be a whole number, got 0.1"),
        ("train.updates", "null", "must be a whole number, got null"),
        ("train.updates", "[200]", "must be a whole number, got [200]"),
        ("train.updates", "1e999", "must be a whole number, got Infinity"),
        ("checkpoint.keep_best", '"yes"', "must be true or false, got the text"),
        ("checkpoint.keep_best", '"true"', "must be true or false, got the text"),
        ("checkpoint.keep_best", "1", "must be true or false, got 1"),
        ("checkpoint.keep_best", "0", "must be true or false, got 0"),
        ("checkpoint.keep_best", "null", "must be true or false, got null"),
        ("data.split_salt", "1", "must be a text, got 1"),
        ("data.split_salt", "null", "must be a text, got null"),
        ("data.split_salt", "false", "must be a text, got false"),
        ("data.paths", '"notes/*.txt"', "must be a list of texts"),
        ("data.paths", "[1]", "must be a list of texts"),
        ("data.paths", "[[]]", "must be a list of texts"),
        ("data.paths", "null", "must be a list of texts"),
        ("data.source", '"stdlibs"', "must be one of stdlib, files, shakespeare, synthetic; got the text"),
        ("data.source", "null", "must be one of"),
        ("data.source", '["stdlib"]', "must be one of"),
        ("data.source", "1", "must be one of"),
        ("train.device", '"gpu"', "must be one of auto, cpu, cuda, mps"),
        ("schedule.name", '"Cosine"', "must be one of"),
    ],
)
def test_a_value_of_another_type_is_refused_alike_in_json_and_yaml(key: str, written: str, expected: str) -> None:
    section, name = key.split(".")
    assert refusal(write("a.json", f'{{"{section}": {{"{name}": {written}}}}}')).startswith(
        f"a.json: {key}: {expected}"
    )
    in_yaml = written.replace("1e999", ".inf").replace("3e-4", "3.0e-4").replace("1e-1", "1.0e-1")
    assert refusal(write("a.yaml", f"{section}: {{{name}: {in_yaml}}}")).startswith(f"a.yaml: {key}: {expected}")


@pytest.mark.parametrize("purpose", ["1", "null", "[]", "true"])
def test_a_purpose_that_is_no_text_is_refused(purpose: str) -> None:
    assert refusal(write("a.json", f'{{"purpose": {purpose}}}')).startswith("a.json: purpose: must be a text")


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("key", ["optimizer.max_lr", "train.updates", "checkpoint.keep_best", "data.split_salt"])
def test_what_is_not_a_number_is_refused_in_json(constant: str, key: str) -> None:
    section, name = key.split(".")
    message = refusal(write("a.json", f'{{"{section}": {{"{name}": {constant}}}}}'))
    assert message == f"a.json: {constant} is not a number that a setting can have"


@pytest.mark.parametrize("constant", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("key", ["optimizer.max_lr", "train.updates", "checkpoint.keep_best", "data.split_salt"])
def test_what_is_not_a_number_is_refused_in_yaml(constant: str, key: str) -> None:
    section, name = key.split(".")
    message = refusal(write("a.yaml", f"{section}: {{{name}: {constant}}}"))
    assert message.startswith(f"a.yaml: {key}: must be ")


@pytest.mark.parametrize(("written", "value"), [("1e3", 1000), ("200.0", 200), ("2E+2", 200), ("1E1", 10)])
def test_a_whole_number_may_be_written_with_a_point_or_an_exponent(written: str, value: int) -> None:
    updates = resolve('{"train": {"updates": %s}}' % written).config.train.updates  # noqa: UP031 - braces of JSON
    assert updates == value
    assert type(updates) is int


def test_a_number_may_be_written_as_a_whole_one() -> None:
    max_lr = config("optimizer.max_lr=1").optimizer.max_lr
    assert max_lr == 1
    assert type(max_lr) is float


NUMBERS_AS_TEXT = ["1e-4", "1e-5", "3e-4", "2.5e-7", "1e5", "1e20", "1.5e300", "0.1", "5e-324", "1E-3", "12345678.9"]


@pytest.mark.parametrize("text", NUMBERS_AS_TEXT)
@pytest.mark.parametrize("quote", ["'", '"', ""])
def test_for_a_number_as_text_the_hint_is_the_same_number_and_json_and_yaml_read_it_as_one(
    text: str, quote: str
) -> None:
    content = f"optimizer: {{min_lr: 0, max_lr: {quote}{text}{quote}}}"
    if not isinstance(yaml.safe_load(f"{quote}{text}{quote}"), str):
        assert resolve_config(write("a.yaml", content)).config.optimizer.max_lr == float(text)
        return
    hint = re.search(r"; write (\S+), without quotes$", refusal(write("a.yaml", content)))
    assert hint is not None
    for read in (yaml.safe_load, json.loads):
        number = read(hint[1])
        assert isinstance(number, (int, float))
        assert number == float(text)
    resolved = resolve_config(write("a.yaml", f"optimizer: {{min_lr: 0, max_lr: {hint[1]}}}"))
    assert resolved.config.optimizer.max_lr == float(text)


@pytest.mark.parametrize("text", ["1e3", "200", "1e20", "2.0"])
def test_for_a_whole_number_as_text_the_hint_is_accepted_in_its_place(text: str) -> None:
    hint = re.search(r"; write (\S+), without quotes$", refusal(write("a.json", {"train": {"updates": text}})))
    assert hint is not None
    for name in ("b.json", "b.yaml"):
        updates = resolve_config(write(name, f'{{"train": {{"updates": {hint[1]}}}}}')).config.train.updates
        assert updates == int(float(text))


@pytest.mark.parametrize("text", ["1.5", "1e-4", "fast", "", "nan", "inf", "1e999"])
def test_nothing_is_hinted_at_that_would_be_refused_again(text: str) -> None:
    assert "without quotes" not in refusal(write("a.json", {"train": {"updates": text}}))


# --- ranges ---

RANGES: dict[str, tuple[list[object], list[object]]] = {
    # key: (accepted, refused)
    "data.synthetic_documents": ([2, 10**12], [-1, 0, 1]),
    "data.val_fraction": ([5e-324, 0.5, 0.9999999999999999], [-1, 0, 1, 1e300]),
    "data.order_seed": ([0, 2**63 - 1], [-1]),
    "model.num_layers": ([1, 10**6], [-1, 0]),
    "model.d_model": ([4, 2**40], [-1, 0]),
    "model.num_heads": ([1, 256], [-1, 0]),
    "model.max_positions": ([256, 10**12], [-1, 0, 1]),
    "model.dropout": ([0, 0.5, 0.9999999999999999], [-1, -5e-324, 1, 1e300]),
    "batch.block_size": ([1, 256], [-1, 0, 257]),
    "batch.batch_size": ([1, 10**12], [-1, 0]),
    "batch.tokens": ([2, 10**15], [-1, 0, 1]),
    "batch.micro_batches": ([1, 32], [-1, 0, 33, 10**12]),
    "optimizer.max_lr": ([5e-324, 1e308], [-1, 0]),
    "optimizer.min_lr": ([0, 3e-4], [-1, 3.0000001e-4, 1e308]),
    "optimizer.beta1": ([0, 0.9999999999999999], [-1, 1, 1e300]),
    "optimizer.beta2": ([0, 0.9999999999999999], [-1, 1, 1e300]),
    "optimizer.eps": ([5e-324, 1e308], [-1, 0]),
    "optimizer.weight_decay": ([0, 1e308], [-1]),
    "optimizer.grad_clip": ([0, 1e308], [-1]),
    "schedule.warmup_updates": ([0, 199], [-1, 200, 201, 10**12]),
    "schedule.decay_updates": ([0, 196], [-1]),
    "train.updates": ([1, 10**12], [-1, 0]),
    "train.seed": ([0, 2**63 - 1], [-1, 2**63]),
    "train.num_threads": ([0, 1024], [-1, 1025, 10**12]),
    "eval.every": ([0, 200], [-1]),
    "eval.tokens": ([2, 10**15], [-1, 0, 1]),
    "eval.batch_tokens": ([1, 10**15], [-1, 0]),
    "checkpoint.every": ([1, 200], [-1, 0]),
    "checkpoint.keep_last": ([1, 10**12], [-1, 0]),
    "measure.warmup_updates": ([0, 10**12], [-1]),
}


def test_the_table_of_ranges_has_every_number() -> None:
    assert RANGES.keys() == number_keys().keys()


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, (good, _) in RANGES.items() for value in good])
def test_a_value_at_the_edge_of_its_range_is_accepted(key: str, value: object) -> None:
    assert value_at(resolve(setting(key, value)), key) == value


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, (_, bad) in RANGES.items() for value in bad])
def test_a_value_beyond_its_range_is_refused(key: str, value: object) -> None:
    message = refusal(write("a.json", setting(key, value)))
    assert message.startswith(f"a.json: {key}: ")
    assert str(value) in message


@pytest.mark.parametrize("key", ["optimizer.max_lr", "optimizer.weight_decay", "train.updates", "train.seed"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_too_large_for_any_arithmetic_is_refused(key: str, digits: int) -> None:
    section, name = key.split(".")
    assert refusal(write("a.json", f'{{"{section}": {{"{name}": 1{"0" * digits}}}}}')).startswith("a.json: ")


# --- what must agree ---


@pytest.mark.parametrize(("d_model", "num_heads", "nearest"), [(256, 3, 2), (256, 5, 4), (100, 8, 10), (7, 3, 1)])
def test_heads_that_do_not_divide_the_width_are_refused_with_the_nearest_that_do(
    d_model: int, num_heads: int, nearest: int
) -> None:
    message = refusal(write("a.json", {"model": {"d_model": d_model, "num_heads": num_heads}}))
    assert message.startswith(f"a.json: model.num_heads: must divide model.d_model = {d_model}, got {num_heads}")
    offered = int(message.rpartition(" ")[2])
    assert d_model % offered == 0
    assert abs(offered - num_heads) == abs(nearest - num_heads)


@pytest.mark.timeout(5, method="signal")
def test_heads_that_do_not_divide_a_huge_width_are_refused_at_once() -> None:
    message = refusal(write("a.json", {"model": {"d_model": 10**15, "num_heads": 7}}))
    assert message.startswith("a.json: model.num_heads: must divide")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.max_positions=255"], "default: batch.block_size: must not exceed model.max_positions = 255, got 256"),
        (["batch.block_size=257"], "--set: batch.block_size: must not exceed"),
        (["optimizer.min_lr=1"], "--set: optimizer.min_lr: must not exceed optimizer.max_lr = 0.0003, got 1.0"),
        (["train.updates=1", "schedule.warmup_updates=1"], "--set: schedule.warmup_updates: must be smaller"),
        (["train.updates=20", "schedule.warmup_updates=20"], "--set: schedule.warmup_updates: must be smaller"),
        (["train.updates=20", "schedule.warmup_updates=21"], "--set: schedule.warmup_updates: must be smaller"),
        (["train.updates=20", "schedule.warmup_updates=500"], "--set: schedule.warmup_updates: must be smaller"),
        (["schedule.name=wsd", "schedule.warmup_updates=201"], "--set: schedule.warmup_updates: must be smaller"),
        (
            ["schedule.name=wsd", "schedule.warmup_updates=20", "schedule.decay_updates=181"],
            "--set: schedule.decay_updates: warm-up (20) and decay (181) together must fit into train.updates = 200",
        ),
        (["data.source=files"], "default: data.paths: the source 'files' needs at least one"),
        (["data.source=files", "data.paths=[]"], "--set: data.paths: the source 'files' needs at least one"),
        (["batch.batch_size=2", "batch.micro_batches=3"], "--set: batch.micro_batches: cannot exceed the 2 windows"),
    ],
)
def test_values_that_do_not_agree_are_refused_under_the_key_that_is_wrong(overrides: list[str], expected: str) -> None:
    assert refusal(write("a.json", {}), *overrides).startswith(expected)


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.layout=token_budget", "batch.block_size=100000"],
        ["batch.layout=token_budget", "batch.micro_batches=100"],
        ["optimizer.min_lr=3e-4"],
        ["train.updates=20", "schedule.warmup_updates=19"],
        ["train.updates=1", "schedule.warmup_updates=0"],
        ["schedule.name=wsd", "schedule.warmup_updates=20", "schedule.decay_updates=180"],
        ["schedule.name=cosine", "schedule.decay_updates=1000"],
    ],
)
def test_values_that_just_agree_are_accepted(overrides: list[str]) -> None:
    resolve({}, *overrides)


# --- warnings ---


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ({}, []),
        ({"train": {"updates": 10}}, ["checkpoint.every", "eval.every"]),
        ({"train": {"updates": 50}}, []),
        ({"train": {"updates": 49}, "eval": {"every": 0}, "checkpoint": {"every": 49}}, []),
        ({"checkpoint": {"every": 201}}, ["checkpoint.every"]),
        ({"eval": {"every": 201}}, ["eval.every"]),
        ({"data": {"paths": ["x"]}}, ["data.paths"]),
        ({"data": {"synthetic_documents": 512}}, ["data.synthetic_documents"]),
        ({"data": {"source": "synthetic", "synthetic_documents": 9}}, []),
        ({"batch": {"tokens": 8192}}, ["batch.tokens"]),
        (
            {"batch": {"layout": "token_budget", "block_size": 8, "batch_size": 8}},
            ["batch.batch_size", "batch.block_size"],
        ),
        ({"schedule": {"decay_updates": 5}}, ["schedule.decay_updates"]),
        ({"schedule": {"name": "constant", "decay_updates": 5}}, ["schedule.decay_updates"]),
        ({"schedule": {"name": "wsd", "decay_updates": 5}}, []),
    ],
)
def test_what_works_but_is_likely_not_meant_is_warned_about(content: object, keys: list[str]) -> None:
    warnings = resolve(content).warnings()
    assert sorted(warning.partition(":")[0] for warning in warnings) == keys
    assert all(len(warning.splitlines()) == 1 for warning in warnings)


def test_an_override_without_effect_is_warned_about_with_the_reason() -> None:
    (warning,) = resolve({}, "batch.tokens=5").warnings()
    assert warning == "batch.tokens: has no effect, because batch.layout is 'windows' and not 'token_budget'"


@pytest.mark.parametrize("name", ["default.json", "defaults.yaml", "derived.json", "default/a.json", "plain.json"])
def test_an_option_without_effect_is_warned_about_whatever_the_file_is_called(name: str) -> None:
    assert len(resolve_config(write(name, {"batch": {"tokens": 5}})).warnings()) == 1


# --- files that cannot be read ---


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", '{"train": {"seed": 1} "eval": {}}', "a.json:1:23: not valid JSON: "),
        ("a.json", '{\n  "train": {\n    "seed": 01\n  }\n}', "a.json:3:14: not valid JSON: "),
        ("a.json", "{'train': {}}", "a.json:1:2: not valid JSON: "),
        ("a.json", '{"purpose": "unended', "a.json:1:13: not valid JSON: "),
        ("a.json", "", "a.json:1:1: not valid JSON: "),
        ("a.json", '{"a": 1} x', "a.json:1:10: not valid JSON: "),
        ("a.json", '{"purpose": "a\nb"}', "a.json:1:15: not valid JSON: "),
        ("a.json", '// comment\n{"purpose": "a"}', "a.json:1:1: not valid JSON: "),
        ("a.yaml", "train: [1\nseed: 2\n", "a.yaml:2:5: not valid YAML: "),
        ("a.yaml", "train:\n\tseed: 2\n", "a.yaml:2:1: not valid YAML: "),
        ("a.yaml", "train: {}\n--- \nseed: 2\n", "a.yaml:2:1: not valid YAML: "),
        ("a.yaml", "purpose: !!python/object:os.system x\n", "a.yaml:1:10: not valid YAML: "),
        ("a.yaml", "train: *nothing\n", "a.yaml:1:8: not valid YAML: "),
        ("a.yml", "a: b: c\n", "a.yml:1:5: not valid YAML: "),
        ("a.yaml", "", "a.yaml: must hold an object of settings, got null"),
        ("a.yaml", "- a\n", 'a.yaml: must hold an object of settings, got ["a"]'),
        ("a.json", "[]", "a.json: must hold an object of settings, got []"),
        ("a.json", '"text"', 'a.json: must hold an object of settings, got the text "text"'),
        ("a.json", b'{"purpose": "\xff"}', "a.json: byte 13: not UTF-8"),
        ("a.yaml", "purpose: 값".encode("cp949"), "a.yaml: byte 9: not UTF-8"),
        ("a.json", '{"purpose": "값"}'.encode("utf-16"), "a.json: byte 0: not UTF-8"),
        ("a.json", '{"purpose": "값'.encode()[:-1], "a.json: byte 13: not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_it_goes_wrong(name: str, content: str | bytes, expected: str) -> None:
    assert refusal(write(name, content)).startswith(expected)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", 'purpose: "a\x01b"\n'),
        ("a.yaml", "? [a, b]\n: 1\n"),
        ("a.yaml", "? {a: 1}\n: 1\n"),
        ("a.yaml", "purpose: &a [*a]\n"),
        ("a.yaml", "data: &a {b: *a}\n"),
        ("a.yaml", "data: {paths: [{2024-01-01: 1}]}\n"),
        ("a.yaml", "purpose: 2024-13-45\n"),
        ("a.yaml", "purpose: 0b_\n"),
        ("a.yaml", "train: {seed: !!int x}\n"),
        ("a.yaml", "purpose: 2024-12-24\n"),
        ("a.yaml", "purpose: !!set {a, b}\n"),
        ("a.yaml", "purpose: !!binary aGFsbG8=\n"),
        ("a.json", "[" * 100_000),
        ("a.json", '{"data":' * 100_000),
        ("a.json", '{"data": {"split_salt": "\\ud800"}}'),
        ("a.json", '{"data": {"paths": ["\\udcff"]}}'),
        ("a.json", '{"purpose": "\\ud800"}'),
    ],
)
def test_a_strange_file_is_refused_in_one_line_that_names_it(name: str, content: str) -> None:
    assert refusal(write(name, content)).startswith(name)


@pytest.mark.parametrize("name", ["nowhere.json", "folder/nowhere.yaml", "folder.yml", "folder/x"])
def test_a_file_that_is_not_there_is_refused(name: str) -> None:
    Path("folder.yml").mkdir()
    assert refusal(name) == f"{name}: no such config file"


@pytest.mark.parametrize(
    ("name", "nearest"), [("smok", "smoke"), ("baselin", "baseline"), ("basline", "baseline"), ("zzzzz", None)]
)
def test_an_unknown_experiment_is_refused_with_the_nearest_and_all_that_there_are(
    name: str, nearest: str | None
) -> None:
    message = refusal(name)
    assert message.startswith(f"--config {name}: no such experiment")
    assert (f"; the nearest is {nearest};" in message) == (nearest is not None)
    assert all(known in message for known in NAMES_OF_EXPERIMENTS)


def test_a_config_in_yaml_without_pyyaml_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install pyyaml" in refusal(write("a.yaml", "train: {}"))
    assert resolve({"train": {"seed": 3}}).config.train.seed == 3


# --- JSON, YAML and languages ---


def test_json_and_yaml_give_the_same_config() -> None:
    content = {
        "purpose": "같은 실험",
        "data": {"source": "files", "paths": ["글/*.txt", "b c"], "split_salt": "소금"},
        "optimizer": {"max_lr": 1.5e-4, "weight_decay": 0},
        "schedule": {"name": "wsd", "warmup_updates": 3, "decay_updates": 7},
        "train": {"updates": 60, "seed": 2**62},
        "checkpoint": {"keep_best": False},
    }
    from_json = resolve_config(write("a.json", content))
    from_yaml = resolve_config(write("a.yaml", yaml.safe_dump(content, allow_unicode=True)))
    assert from_yaml.config == from_json.config
    assert from_yaml.identity == from_json.identity


def test_yaml_anchors_and_merges_are_no_duplicates() -> None:
    resolved = resolve_config(write("a.yaml", "eval: &every {every: 5}\ncheckpoint: {<<: *every, keep_last: 1}\n"))
    assert (resolved.config.eval.every, resolved.config.checkpoint.every) == (5, 5)
    assert resolved.config.checkpoint.keep_last == 1


RESOLVE_AND_PRINT = """
import json, sys
from training_lab.resolve import resolve_config
resolved = resolve_config(sys.argv[1], sys.argv[2:])
json.dumps(resolved.record(), ensure_ascii=False).encode("utf-8")
print(json.dumps([resolved.config.purpose, resolved.config.data.paths, resolved.identity]))
"""


def resolve_elsewhere(name: str, *overrides: str, variables: dict[str, str]) -> list[Any]:
    """Purpose, paths and identity of a config as another process reads it, with its record ready for a file."""
    words = [word.encode("utf-8") for word in (name, *overrides)]
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE_AND_PRINT, *words],
        env={**os.environ, **variables, "PYTHONPATH": str(TRAINING)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
    printed: list[Any] = json.loads(done.stdout)
    return printed


KOREAN = ["기준 실험: 값 하나만 바꾼다", ["글/*.txt", "노트 모음"]]


@pytest.mark.parametrize(("name", "base"), [("config.yaml", "base"), ("설정.yaml", "base"), ("설정/실험.yaml", "기본")])
@pytest.mark.parametrize("variables", [{}, C_LOCALE], ids=["as it is", "C locale"])
def test_korean_comments_values_and_file_names_are_read_in_every_locale(
    name: str, base: str, variables: dict[str, str]
) -> None:
    write(str(Path(name).parent / f"{base}.json"), {"data": {"source": "files", "paths": KOREAN[1]}})
    write(name, f"# 한국어 주석\nextends: {base}\npurpose: '{KOREAN[0]}'  # 목적\n")
    printed = resolve_elsewhere(name, variables=variables)
    assert printed == [*KOREAN, resolve_config(name).identity]


@pytest.mark.parametrize("variables", [{}, C_LOCALE], ids=["as it is", "C locale"])
def test_korean_overrides_are_read_in_every_locale(variables: dict[str, str]) -> None:
    write("config.json", {"data": {"source": "files"}})
    overrides = [f"purpose={KOREAN[0]}", f"data.paths={json.dumps(KOREAN[1], ensure_ascii=False)}"]
    printed = resolve_elsewhere("config.json", *overrides, variables=variables)
    assert printed == [*KOREAN, resolve_config("config.json", overrides).identity]
