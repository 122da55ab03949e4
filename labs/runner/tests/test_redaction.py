"""Secrets are found by value and by shape, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest

from experiment_runner.redaction import Secrets

VALUE = "correct-horse-battery"
AWKWARD = 'quote"back\\slash-비밀번호'
SHAPED = ["hf_" + "a" * 34, "rpa_" + "B" * 40, "sk-" + "c" * 32, "ghp_" + "d" * 36, "github_pat_" + "e" * 50,
          "AKIA" + "F" * 16, "wandb_v1_" + "g" * 40]  # fmt: skip


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "MY_SECRET", "DB_PASSWORD", "TOKEN", "runpod_api_key"])
def test_the_value_of_a_secret_variable_is_found_and_replaced_by_its_name(name: str) -> None:
    secrets = Secrets.from_environment({name: VALUE, "PATH": "/usr/bin:/and/more"})
    assert secrets.find(f"x{VALUE}y and /usr/bin:/and/more") == [name]
    assert secrets.redact(f"a {VALUE} b {VALUE}") == f"a [{name} removed] b [{name} removed]"


@pytest.mark.parametrize("name", ["KEYBOARD", "TOKENIZER", "MONKEY", "TOKENS", "SECRETARY"])
def test_other_variables_are_left_alone(name: str) -> None:
    assert Secrets.from_environment({name: VALUE}).find(VALUE) == []


def test_a_short_value_is_left_alone_because_it_may_be_any_word() -> None:
    assert Secrets.from_environment({"A_TOKEN": "true", "B_KEY": " " * 40}).redact("true  ") == "true  "


@pytest.mark.parametrize("shaped", SHAPED)
def test_what_looks_like_a_key_is_found_without_knowing_it(shaped: str) -> None:
    secrets = Secrets.from_environment({})
    assert secrets.find(f"({shaped})") == ["something that looks like a key"]
    assert shaped not in secrets.redact(f"token={shaped}, next")


@pytest.mark.parametrize(
    "text", ["0" * 64, "deadbeef" * 5, "risk-assessment-of-the-whole-thing", "half_of_" + "x" * 40, "ask-" + "a" * 30]
)
def test_hashes_and_words_are_no_keys(text: str) -> None:
    assert Secrets.from_environment({}).redact(text) == text


def test_a_secret_is_found_in_json_however_it_is_written_there() -> None:
    secrets = Secrets({"X_KEY": AWKWARD})
    for ensure_ascii in (True, False):
        text = json.dumps({"a": [AWKWARD]}, ensure_ascii=ensure_ascii)
        assert json.loads(secrets.redact(text)) == {"a": ["[X_KEY removed]"]}


def test_of_two_secrets_of_which_one_holds_the_other_nothing_is_left() -> None:
    secrets = Secrets({"SHORT_KEY": VALUE, "LONG_KEY": VALUE + "-staple"})
    assert secrets.redact(f"{VALUE}-staple {VALUE}") == "[LONG_KEY removed] [SHORT_KEY removed]"
