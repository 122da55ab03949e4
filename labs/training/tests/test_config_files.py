"""Config files: JSON and YAML give the same, every language is read, and what cannot be read is told with its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from configs import refusal, resolve, write

from training_lab.config_files import EXPERIMENTS
from training_lab.resolve import resolve_config

NAMES_OF_EXPERIMENTS = sorted(path.stem for path in EXPERIMENTS.iterdir())


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
    reason = "must be a file ending in .json, .yaml, .yml" if name == "folder.yml" else "no such config file"
    assert refusal(name) == f"{name}: {reason}"


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


KOREAN = ["기준 실험: 값 하나만 바꾼다", ["글/*.txt", "노트 모음"]]


@pytest.mark.parametrize(("name", "base"), [("config.yaml", "base"), ("설정.yaml", "base"), ("설정/실험.yaml", "기본")])
def test_korean_comments_values_and_file_names_are_read(name: str, base: str) -> None:
    write(str(Path(name).parent / f"{base}.json"), {"data": {"source": "files", "paths": KOREAN[1]}})
    write(name, f"# 한국어 주석\nextends: {base}\npurpose: '{KOREAN[0]}'  # 목적\n")
    config = resolve_config(name).config
    assert [config.purpose, list(config.data.paths)] == KOREAN


def test_korean_overrides_are_read() -> None:
    write("config.json", {"data": {"source": "files"}})
    overrides = [f"purpose={KOREAN[0]}", f"data.paths={json.dumps(KOREAN[1], ensure_ascii=False)}"]
    config = resolve_config("config.json", overrides).config
    assert [config.purpose, list(config.data.paths)] == KOREAN


@pytest.mark.parametrize("override", ["train={}", "data={}", 'train={"seed":9007199254740993.0}'])
def test_an_override_that_sets_nothing_or_loses_digits_is_refused(override: str) -> None:
    write("config.json", {})
    assert refusal("config.json", override).startswith("--set")
