"""No secret reaches a file: not through a config, a row, an error, a diff."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from folders import make_run
from tiny import TINY, run

from experiment_runner.redaction import Secrets
from training_lab.errors import UserError
from training_lab.resolve import resolve_config
from training_lab.tracking import MetricsWriter

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


def test_files_of_a_run_are_written_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", VALUE)
    folder = make_run("run")
    folder.write_json("source.json", {"uncommitted_diff": f"+key = '{VALUE}'"})
    with MetricsWriter(Path("metrics.jsonl")) as writer:
        writer.write({"kind": "event", "event": "failure", "message": f"refused: {VALUE}"})
    assert folder.read_json("source.json") == {"uncommitted_diff": "+key = '[WANDB_API_KEY removed]'"}
    assert VALUE not in Path("metrics.jsonl").read_text()
    assert "[WANDB_API_KEY removed]" in Path("metrics.jsonl").read_text()


@pytest.mark.parametrize(
    "setting", [f"purpose=my key is {VALUE}", f"data.split_salt={VALUE}", f"tracking.entity={VALUE}"]
)
def test_a_config_that_holds_one_is_refused_without_repeating_it(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", VALUE)
    with pytest.raises(UserError, match=r"holds a secret \(WANDB_API_KEY\)") as caught:
        resolve_config(str(TINY), [setting])
    assert setting.partition("=")[0] in str(caught.value)
    assert VALUE not in str(caught.value)


def test_a_training_that_would_write_one_down_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("train", "--config", str(TINY), "--set", f"purpose={SHAPED[0]}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert SHAPED[0] not in done.stderr
    assert not Path(".runs").exists()
