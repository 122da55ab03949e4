"""Equal configs have equal identities, others other ones; and the record of a run gives its config back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from configs import resolve, setting, value_at, write
from tiny import resolve_tiny

from training_lab.config import fields_by_key
from training_lab.config_files import EXPERIMENTS
from training_lab.errors import UserError
from training_lab.resolve import config_from_record, resolve_config

NAMES_OF_EXPERIMENTS = sorted(path.stem for path in EXPERIMENTS.iterdir())


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
    "batch.isolation": False,
    "checkpoint.restore": "weights",
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
    "optimizer.lr_base_tokens": 1024,
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
    "train.init_from": "another-run",
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
    "train.parallel": "fsdp",
    "checkpoint.background": False,
    "checkpoint.keep_every": 100,
    "checkpoint.copy_to": "s3://bucket/runs",
    "checkpoint.copy_wait_s": 5,
    "tracking.wandb": "off",
    "tracking.project": "other",
    "tracking.entity": "someone",
    "tracking.tensorboard": True,
    "tracking.csv": True,
    "tracking.report": False,
    "tracking.timeout_s": 5,
    "remote.provider": "local",
    "remote.host": "gpu-box",
    "remote.master": "10.0.0.1",
    "remote.master_port": 29501,
    "remote.gpus": ["NVIDIA H200"],
    "remote.gpu_count": 2,
    "remote.cloud": "COMMUNITY",
    "remote.image": "other@sha256:0",
    "remote.min_cuda": "12.9",
    "remote.disk_gb": 50,
    "remote.volume_gb": 70,
    "remote.network_volume": "vol",
    "remote.volume_path": "/elsewhere",
    "remote.data_centers": ["US-KS-2"],
    "remote.python": "python3.13",
    "remote.install": "nothing",
    "remote.max_hours": 1,
    "remote.max_usd": 1,
    "remote.max_usd_per_hour": 1,
    "remote.max_upload_mb": 1,
}
WITHOUT_ANOTHER_VALUE = {
    "data.end_of_text", "optimizer.lr_scaling", "measure.peak_tflops", "measure.peak_source", "remote.hosts",
}  # fmt: skip
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
