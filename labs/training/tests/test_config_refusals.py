"""Every mistake in a config is told in one line, with the file, the key and what would be right."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from configs import config, number_keys, refusal, resolve, setting, value_at, write

from training_lab.config_files import EXPERIMENTS
from training_lab.resolve import resolve_config

NAMES_OF_EXPERIMENTS = sorted(path.stem for path in EXPERIMENTS.iterdir())


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
        ("data.source", '"stdlibs"', "must be one of stdlib, files, shakespeare, fineweb, synthetic; got the text"),
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


@pytest.mark.parametrize("text", ["1e3", "200", "1e11", "2.0"])
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
    "data.max_documents": ([0, 10**12], [-1]),
    "data.max_tokens": ([0, 10**15], [-1]),
    "data.synthetic_documents": ([2, 10**12], [-1, 0, 1]),
    "data.val_fraction": ([5e-324, 0.5, 0.9999999999999999], [-1, 0, 1, 1e300]),
    "data.order_seed": ([0, 2**63 - 1], [-1]),
    "loss.label_smoothing": ([0, 0.5, 0.9999999999999999], [-1, 1, 1e300]),
    "loss.z_loss": ([0, 1e308], [-1]),
    "model.num_layers": ([1, 10**4], [-1, 0, 10**4 + 1]),
    "model.d_model": ([4, 2**20], [-1, 0, 2**20 + 4]),
    "model.num_heads": ([1, 256], [-1, 0, 2**20 + 1]),
    "model.max_positions": ([256, 10**12], [-1, 0, 1]),
    "model.dropout": ([0, 0.5, 0.9999999999999999], [-1, -5e-324, 1, 1e300]),
    "batch.block_size": ([1, 256], [-1, 0, 257]),
    "batch.batch_size": ([1, 10**12], [-1, 0]),
    "batch.tokens": ([2, 10**15], [-1, 0, 1]),
    "batch.pack_length": ([2, 256], [-1, 0, 1]),
    "batch.packs": ([1, 10**12], [-1, 0]),
    "batch.packing_buffer": ([1, 10**12], [-1, 0]),
    "batch.micro_batches": ([1, 32], [-1, 0, 33, 10**12]),
    "optimizer.max_lr": ([5e-324, 1e308], [-1, 0]),
    "optimizer.min_lr": ([0, 3e-4], [-1, 3.0000001e-4, 1e308]),
    "optimizer.beta1": ([0, 0.9999999999999999], [-1, 1, 1e300]),
    "optimizer.beta2": ([0, 0.9999999999999999], [-1, 1, 1e300]),
    "optimizer.eps": ([5e-324, 1e308], [-1, 0]),
    "optimizer.weight_decay": ([0, 1e308], [-1]),
    "optimizer.grad_clip": ([0, 1e308], [-1]),
    "optimizer.lr_base_tokens": ([0, 10**12], [-1]),
    "optimizer.muon_lr": ([5e-324, 1e308], [-1, 0]),
    "optimizer.muon_momentum": ([0, 0.9999999999999999], [-1, 1, 1e300]),
    "optimizer.muon_momentum_warmup": ([0, 10**12], [-1]),
    "optimizer.muon_steps": ([1, 100], [-1, 0, 101, 10**12]),
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
    "checkpoint.keep_every": ([0, 100], [-1]),
    "checkpoint.copy_wait_s": ([0, 86400], [-1, 86401]),
    "measure.warmup_updates": ([0, 10**12], [-1]),
    "measure.timeline_from": ([0, 10**12], [-1]),
    "measure.timeline_updates": ([1, 20], [-1, 0, 21]),
    "measure.memory_update": ([0, 10**12], [-1]),
    "measure.peak_tflops": ([0], [-1]),
    "tracking.timeout_s": ([1e-9, 3600], [-1, 0, 3601]),
    "remote.gpu_count": ([1, 64], [-1, 0, 65]),
    "remote.master_port": ([1024, 65535], [-1, 0, 1023, 65536]),
    "remote.disk_gb": ([10, 10**6], [-1, 0, 9]),
    "remote.volume_gb": ([10, 10**6], [-1, 0, 9]),
    "remote.max_hours": ([1e-9, 720], [-1, 0, 721]),
    "remote.max_usd": ([1e-9, 1e6], [-1, 0, 1e7]),
    "remote.max_usd_per_hour": ([1e-9, 1e6], [-1, 0, 1e7]),
    "remote.max_upload_mb": ([1e-9, 1e6], [-1, 0, 1e7]),
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
    message = refusal(write("a.json", {"model": {"d_model": 2**20, "num_heads": 7}}))
    assert message.startswith("a.json: model.num_heads: must divide")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.max_positions=255"], "default: batch.block_size: must not exceed model.max_positions = 255, got 256"),
        (["batch.block_size=257"], "--set: batch.block_size: must not exceed"),
        (["batch.layout=packs", "batch.pack_length=257"], "--set: batch.pack_length: must not exceed model.max_pos"),
        (["batch.layout=packs", "batch.micro_batches=9"], "--set: batch.micro_batches: cannot exceed the 8 packs"),
        (["data.end_of_text=start"], "--set: data.end_of_text: the tokenizer 'byte' has no token for it"),
        (["data.source=fineweb", "data.fineweb_files=[]"], "--set: data.fineweb_files: the source 'fineweb' needs"),
        (["data.source=fineweb", "data.fineweb_revision=a b"], "--set: data.fineweb_revision: must be a commit"),
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


@pytest.mark.parametrize("update", [0, 19, 20, 21, 22, 23])
def test_an_update_is_not_watched_in_two_ways_at_once(update: int) -> None:
    content = {"measure": {"timeline_from": 21, "timeline_updates": 2, "memory_update": update}}
    if update in (20, 21, 22):
        assert "measure.memory_update: must not be among" in refusal(write("a.json", content))
    else:
        resolve(content)


# --- warnings ---


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ({}, []),
        ({"train": {"updates": 10}}, ["checkpoint.every", "eval.every", "measure.warmup_updates"]),
        ({"measure": {"warmup_updates": 200}}, ["measure.warmup_updates"]),
        ({"model": {"max_positions": 512}}, ["batch.block_size"]),
        ({"train": {"updates": 50}}, []),
        ({"train": {"updates": 49}, "eval": {"every": 0}, "checkpoint": {"every": 49}}, []),
        ({"measure": {"timeline_from": 198, "memory_update": 200}}, []),
        ({"measure": {"timeline_from": 200}}, ["measure.timeline_from"]),
        ({"measure": {"memory_update": 201}}, ["measure.memory_update"]),
        ({"checkpoint": {"every": 201}}, ["checkpoint.every"]),
        ({"eval": {"every": 201}}, ["eval.every"]),
        ({"data": {"paths": ["x"]}}, ["data.paths"]),
        ({"data": {"synthetic_documents": 512}}, ["data.synthetic_documents"]),
        ({"data": {"source": "synthetic", "synthetic_documents": 9}}, []),
        ({"batch": {"tokens": 8192}}, ["batch.tokens"]),
        ({"batch": {"layout": "token_budget", "tokens": 512, "micro_batches": 2}}, []),
        ({"batch": {"layout": "token_budget", "tokens": 512, "micro_batches": 3}}, ["batch.micro_batches"]),
        (
            {"batch": {"layout": "token_budget", "block_size": 8, "batch_size": 8}},
            ["batch.batch_size", "batch.block_size"],
        ),
        ({"schedule": {"decay_updates": 5}}, ["schedule.decay_updates"]),
        ({"schedule": {"name": "constant", "decay_updates": 5}}, ["schedule.decay_updates"]),
        ({"schedule": {"name": "constant"}, "optimizer": {"min_lr": 1e-5}}, ["optimizer.min_lr"]),
        ({"data": {"source": "synthetic", "documents": "paragraph"}}, ["data.documents"]),
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
