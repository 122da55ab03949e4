"""Where a run is mirrored is decided from config, environment and what is installed, and said with the reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest
from fakewandb import KEY
from folders import make_run
from tiny import run, tiny

from training_lab.errors import UserError
from training_lab.mirrors.mode import WandbChoice, choose_wandb
from training_lab.mirrors.rows import GrowingRows, mirrored_values
from training_lab.mirrors.state import wandb_id
from training_lab.tracking import MetricsWriter

NETRC = f"machine api.wandb.ai\n  login user\n  password {KEY}\n"


def choose(
    wandb: str = "auto", environment: Mapping[str, str] | None = None, netrc: str = "", more: tuple[str, ...] = ()
) -> WandbChoice:
    """The choice on a machine with this environment and this file of keys."""
    home = Path("home")
    home.mkdir(exist_ok=True)
    (home / ".netrc").write_text(netrc)
    (home / ".netrc").chmod(0o600)
    return choose_wandb(tiny(f"tracking.wandb={wandb}", *more).tracking, environment or {}, home)


@pytest.mark.parametrize(
    ("wandb", "environment", "netrc", "mode", "reason"),
    [
        ("auto", {}, "", "offline", "there is no key (WANDB_API_KEY, or `wandb login`)"),
        ("auto", {"WANDB_API_KEY": KEY}, "", "online", "a key in WANDB_API_KEY"),
        ("auto", {}, NETRC, "online", "a key in .netrc for api.wandb.ai"),
        ("auto", {"WANDB_BASE_URL": "https://wandb.example.org"}, NETRC, "offline", "there is no key"),
        ("auto", {"WANDB_API_KEY": "short"}, "", "offline", "the key in WANDB_API_KEY is malformed"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "", "offline", "asked for by WANDB_MODE=offline"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "", "off", "switched off by WANDB_MODE=disabled"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "what"}, "", "online", "a key in WANDB_API_KEY"),
        ("offline", {"WANDB_API_KEY": KEY}, "", "offline", "asked for by tracking.wandb"),
        ("off", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "", "off", "switched off by tracking.wandb"),
        ("online", {}, NETRC, "online", "asked for by tracking.wandb, with the key in .netrc for api.wandb.ai"),
        ("auto", {}, "not a netrc file", "offline", "there is no key"),
    ],
)
def test_the_choice_and_its_reason(wandb: str, environment: dict[str, str], netrc: str, mode: str, reason: str) -> None:
    choice = choose(wandb, environment, netrc)
    assert choice.mode == mode
    assert choice.reason.startswith(reason)
    assert KEY not in str(choice)


@pytest.mark.parametrize("environment", [{}, {"WANDB_API_KEY": "short"}, {"WANDB_API_KEY": "  "}])
def test_online_without_a_good_key_is_refused_at_once(environment: dict[str, str]) -> None:
    with pytest.raises(
        UserError, match=r"^tracking\.wandb: online is not possible: .*; set one, or tracking\.wandb to off"
    ):
        choose("online", environment)
    with pytest.raises(UserError, match=r"^WANDB_MODE=online: online is not possible"):
        choose("auto", {**environment, "WANDB_MODE": "online"})


def test_without_wandb_auto_is_off_and_what_was_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose("auto", {"WANDB_API_KEY": KEY}).mode == "off"
    assert choose("off").mode == "off"
    for wanted in ("online", "offline"):
        with pytest.raises(UserError, match=r"needs wandb: pip install 'wandb>=0\.31,<0\.32'"):
            choose(wanted, {"WANDB_API_KEY": KEY})


def test_project_and_entity_come_from_the_config_then_the_environment_then_the_default() -> None:
    environment = {"WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team"}
    assert choose()[2:] == ("llm-training-lab", "")
    assert choose(environment=environment)[2:] == ("theirs", "team")
    own = ("tracking.project=mine", "tracking.entity=me")
    assert choose(environment=environment, more=own)[2:] == ("mine", "me")


@pytest.mark.parametrize("run_id", ["smoke-20261201-115638-711c", "한글 실험-1", "A_b.C", "x" * 200, "---"])
def test_an_id_is_one_that_wandb_takes(run_id: str) -> None:
    for suffix in ("", "-ab12"):
        made = wandb_id(run_id, suffix)
        assert 0 < len(made) <= 64
        assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert made[0] != "-"


def test_what_is_not_known_is_left_out_and_not_sent_as_a_number() -> None:
    row = {
        "kind": "update",
        "update": 3,
        "loss": 2.0,
        "lr": 0.1,
        "grad_norm": None,
        "target_tokens": 50,
        "seconds": 2.0,
    }
    values = mirrored_values(row)
    assert values["speed/target_tokens_per_s"] == 25
    assert "train/grad_norm" not in values
    assert mirrored_values({"kind": "evaluation", "update": 3, "val_loss": None}) == {"update": 3}


def test_a_growing_file_gives_every_row_that_counts_once() -> None:
    path = Path("metrics.jsonl")
    reader = GrowingRows(path)
    assert list(reader.take()) == []
    with MetricsWriter(path) as writer:
        for update in (1, 2, 3):
            writer.write({"kind": "update", "update": update})
        writer.write({"kind": "event", "event": "resume", "supersedes_from_line": 2})
        writer.write({"kind": "update", "update": 3})
        assert [row["update"] for row in reader.take()] == [1, 2, 3]
        assert list(reader.take()) == []
        writer.write({"kind": "evaluation", "update": 3, "val_loss": 1.0})
    with open(path, "ab") as file:
        file.write(b'{"kind": "update", "upd')
    assert [row["kind"] for row in reader.take()] == ["evaluation"]
    with open(path, "ab") as file:
        file.write(b'ate": 4}\n')
    assert [row["update"] for row in reader.take()] == [4]


def test_a_push_of_a_run_that_is_unknown_or_going_on_is_refused_in_a_line() -> None:
    folder = make_run("going")
    with folder.lock():
        for words, message in (
            (("push", "nothing", "--runs", "runs"), "error: nothing: no such run"),
            (("push", "going", "--runs", "runs"), "error: runs/going: is being trained now"),
            (("push", "going", "--runs", "runs", "--timeout", "0"), "error: --timeout 0: must be above 0"),
        ):
            done = run("wandb", *words)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1)
            assert done.stderr.startswith(message)
