"""Studies: declared before, made without gaps, continued after anything, and written down with all of their runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_folders import Recipe, write_run
from tiny import TINY, run, start

from training_lab import record
from training_lab.config_files import EXPERIMENTS
from training_lab.errors import LabError, UserError
from training_lab.progress import NoProgress
from training_lab.record import RunFolder, list_runs
from training_lab.resolve import resolve_config
from training_lab.studying import making
from training_lab.studying.declaration import STUDIES, read_study
from training_lab.studying.making import Budget, Where, make_runs, remote_command
from training_lab.studying.noise import plan_run
from training_lab.studying.notes import declaration
from training_lab.studying.planned import Here, Planned, find_place, interleaved
from training_lab.studying.study import declare, plan_runs

RUNS = Path(".runs")
TEXT: dict[str, Any] = {
    "question": "Is a higher learning rate better?",
    "expected": "Yes.",
    "base": "tiny.json",
    "base_name": "low",
    "changes": {"high": {"optimizer": {"max_lr": 3e-2}}},
    "seeds": [1, 2],
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(TINY, "tiny.json")


def write(**changes: Any) -> Path:
    path = Path("question.json")
    path.write_text(json.dumps({key: value for key, value in {**TEXT, **changes}.items() if value is not None}))
    return path


def study(*arguments: str, expect: int | None = None) -> subprocess.CompletedProcess[str]:
    done = run("study", "question.json", *arguments)
    if expect is not None:
        assert done.returncode == expect, done.stdout + done.stderr
    return done


def said() -> dict[str, Any]:
    value: dict[str, Any] = json.loads((RUNS / "studies/question/study.json").read_text())
    return value


# --- a study as a person runs it ---


def test_a_study_runs_what_is_missing_compares_and_writes_it_down() -> None:
    write()
    done = study()
    assert done.returncode in (0, 1), done.stdout + done.stderr
    folder = RUNS / "studies/question"
    ids = [f"question-{arm}-s{seed}" for arm, seed in (("low", 1), ("high", 1), ("high", 2), ("low", 2))]
    assert [one["run"] for one in said()["runs"]] == ids, "interleaved"
    assert {one.run_id for one in list_runs(RUNS)} == set(ids)
    assert said()["is_complete"]
    notes = (folder / "notes.md").read_text("utf-8")
    for text in (
        TEXT["question"],
        "Yes.",
        "## Verdict",
        "low → high",
        "one change, optimizer.max_lr: 0.01 → 0.03",
        *ids,
    ):
        assert text in notes
    assert "in pairs of the same seed" in notes
    assert "<title>Study: question – comparison</title>" in (folder / "compare.html").read_text("utf-8")
    assert json.loads((folder / "compare.json").read_text())["pairs"][0]["is_comparable"]
    assert (folder / "val-loss.svg").read_text().startswith("<svg")
    assert "var(--" not in (folder / "val-loss-difference.svg").read_text()

    (folder / "notes.md").write_text(notes.replace("*(one line of yours)*", "It overshoots."), "utf-8")
    before = {one.run_id: one.file(record.MANIFEST).read_bytes() for one in list_runs(RUNS)}
    again = study()
    assert again.stdout.count("was there") == 4
    assert {one.run_id: one.file(record.MANIFEST).read_bytes() for one in list_runs(RUNS)} == before
    assert "It overshoots." in (folder / "notes.md").read_text("utf-8")

    listed = run("runs")
    assert "question" in listed.stdout.splitlines()[1]
    assert "4/4" in listed.stdout
    assert len(json.loads(run("runs", "--study", "question", "--json").stdout)) == 4


def test_a_study_that_is_stopped_goes_on_where_it_was() -> None:
    write(seeds=[1])
    config = json.loads(Path("tiny.json").read_text())
    config["train"]["updates"] = 400
    config["checkpoint"]["every"] = 400
    Path("tiny.json").write_text(json.dumps(config))
    process = start("study", "question.json", start_new_session=True)
    first = RUNS / "question-low-s1"
    while not first.joinpath(record.METRICS).exists() or b'"update"' not in first.joinpath(record.METRICS).read_bytes():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "the same command goes on" in errors
    assert RunFolder(first).state() == "interrupted"
    done = study()
    assert done.returncode in (0, 1), done.stdout + done.stderr
    events = [json.loads(line) for line in first.joinpath(record.METRICS).read_text().splitlines()]
    assert sum(row.get("event") == "resume" for row in events) == 1


def test_a_stop_at_an_update_is_part_of_the_arm() -> None:
    changes = {"resumed": {}, "forgetful": {"checkpoint": {"restore": "weights"}}}
    write(seeds=[1], changes=changes, stop_after={"resumed": 6, "forgetful": 6})
    done = study()
    assert done.returncode in (0, 1), done.stdout + done.stderr
    runs = {arm: RunFolder(RUNS / f"question-{arm}-s1") for arm in ("low", "resumed", "forgetful")}
    assert len(runs["low"].read_json(record.ENVIRONMENT)["processes"]) == 1
    assert len(runs["resumed"].read_json(record.ENVIRONMENT)["processes"]) == 2
    assert "the same bits in all 12 updates and in the last weights" in done.stdout
    compared = run("compare", "question-low-s1", "question-forgetful-s1", "--json")
    assert json.loads(compared.stdout)["pairs"][0]["changes"][0]["key"] == "checkpoint.restore"
    rows = [
        [json.loads(line) for line in runs[arm].file(record.METRICS).read_text().splitlines()]
        for arm in ("low", "forgetful")
    ]
    losses = [{row["update"]: row["loss"] for row in found if row["kind"] == "update"} for found in rows]
    same = [update for update in losses[0] if losses[0][update] == losses[1][update]]
    assert same == [1, 2, 3, 4, 5, 6, 7], "the state is missing first in the step of update 7"


def test_a_run_that_fails_is_kept_and_ends_nothing() -> None:
    text = {"data": {"source": "files", "paths": ["not-there"]}}
    write(seeds=[1, 2], changes={"broken": text})
    done = study(expect=4)
    assert "2 of 4 runs have no outcome yet" in done.stdout
    states = {(one["arm"], one["state"]) for one in said()["runs"]}
    assert states == {("low", "finished"), ("broken", "missing")}
    assert "not-there" in next(one["message"] for one in said()["runs"] if one["arm"] == "broken")
    assert "not-there" in (RUNS / "studies/question/notes.md").read_text("utf-8")


def test_what_was_declared_cannot_be_changed_but_for_more_seeds() -> None:
    folder = RUNS / "studies/question"
    first = declare(read_study(write(seeds=[1])), folder)
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps(first))
    for changes, message in (
        ({"question": "Another?"}, "with another question; give the new study a name of its own"),
        ({"endpoint": "seconds"}, "with another endpoint"),
        ({"changes": {}}, "with another arms"),
    ):
        with pytest.raises(UserError, match=f"was declared on {re.escape(first['declared_utc'])} {message}"):
            declare(read_study(write(seeds=[1], **changes)), folder)
    assert declare(read_study(write(seeds=[1])), folder) == first
    more = read_study(write(seeds=[1, 5]))
    declared = declare(more, folder)
    assert declared["seeds_added"][0]["seeds"] == [5]
    assert "seeds added on" in declaration(more, declared)
    (folder / "study.json").write_text("{")
    with pytest.raises(LabError, match="move the study's folder away"):
        declare(more, folder)


def test_a_budget_begins_no_run_that_it_has_no_room_for() -> None:
    write(budget={"hours": 1e-6})
    done = study(expect=4)
    assert "budget.hours = 1e-06: " in done.stdout
    assert sum(one["state"] == "missing" for one in said()["runs"]) >= 3


def test_a_plan_makes_nothing() -> None:
    write()
    done = study("--plan", expect=0)
    assert done.stdout.count("missing") == 4
    assert not RUNS.exists()


# --- what a study's file may say ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": None}, "question: missing"),
        ({"question": " "}, None),
        ({"qestion": "x"}, "qestion: unknown key; the nearest is question"),
        ({"seeds": []}, "seeds: missing"),
        ({"seeds": [1, 1]}, "seeds: one is named twice"),
        ({"seeds": [1.5]}, "seeds: must be whole numbers, got 1.5"),
        ({"seeds": list(range(101))}, "more than 200 runs"),
        ({"changes": {"High": {}}}, "a change's name is made of"),
        ({"changes": {"low": {}}}, "'low' is the base's own name"),
        ({"changes": []}, "changes: must be an object"),
        ({"endpoint": "speed"}, "endpoint: must be one of tokens, seconds"),
        ({"delta": -1}, "delta: must be above 0"),
        ({"where": "moon"}, "where: must be one of local, ssh, runpod"),
        ({"where": "runpod"}, "budget.usd: a study on rented machines needs a budget"),
        ({"budget": {"hours": True}}, "budget.hours: must be a number above 0"),
        ({"stop_after": {"high": 0}}, "stop_after: high: must be the number of an update"),
        ({"stop_after": {"middle": 3}}, "stop_after: middle: no such arm; there are low, high"),
    ],
)
def test_what_is_wrong_with_a_study_is_said_before_anything_runs(changes: dict[str, Any], message: str | None) -> None:
    path = write(**changes)
    if message is None:
        read_study(path)
        return
    with pytest.raises(UserError) as caught:
        read_study(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith("question.json: ")
    assert not RUNS.exists()


def test_a_change_that_is_no_config_is_refused() -> None:
    write(changes={"high": {"optimizer": {"max_lr": "fast"}}})
    assert "question-high.json: optimizer.max_lr: must be" in study(expect=2).stderr
    write(stop_after={"low": 12})
    assert "12 is not before the last update" in study(expect=2).stderr
    assert "no such study" in run("study", "nothing").stderr


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.json")), ids=lambda path: path.stem)
def test_the_studies_that_ship_are_whole(path: Path, tmp_path: Path) -> None:
    shipped = read_study(path)
    plan = plan_runs(shipped, tmp_path)
    assert len(plan) == len(shipped.arms) * len(shipped.seeds)
    identities = {planned.resolved.identity for planned in plan}
    assert len(identities) == len(plan) or shipped.name == "resume"
    base = shipped.base if isinstance(shipped.base, str) else shipped.base["extends"]
    assert (EXPERIMENTS / f"{base}.json").is_file()


# --- order, reuse, remote machines ---


def test_arms_alternate_and_change_their_order() -> None:
    pairs = list(interleaved(["a", "b", "c"], [1, 2]))
    assert pairs == [("a", 1), ("b", 1), ("c", 1), ("c", 2), ("b", 2), ("a", 2)]


def test_a_finished_run_of_the_same_config_code_and_machine_stands_for_one_that_is_wanted() -> None:
    earlier = write_run(Recipe("earlier"))
    resolved = Recipe("earlier").resolved
    planned = Planned("low", 1, "question-low-s1", Path("tiny.json"), (), resolved)
    source = earlier.read_json(record.SOURCE)["sha256"]
    facts = earlier.read_json(record.ENVIRONMENT)["processes"][-1]
    here = Here(source, {"processor": facts["processor"], "python": facts["python"]})

    def found(wanted: Planned = planned, now: Here = here) -> str:
        return find_place(wanted, RUNS, now, others=list_runs(RUNS)).run_id

    assert found() == "earlier"
    assert found(planned._replace(stop_after=3)) == "question-low-s1"
    assert found(planned._replace(is_repeat=True)) == "question-low-s1"
    assert found(planned._replace(resolved=resolve_config("tiny.json"))) == "question-low-s1"
    assert found(now=here._replace(source="0" * 64)) == "question-low-s1"
    assert found(now=here._replace(machine={"processor": "another"})) == "question-low-s1"
    process = earlier.read_json(record.ENVIRONMENT)["processes"][0]
    earlier.write_json(record.ENVIRONMENT, {"processes": [process, process]})
    assert found() == "question-low-s1", "one that was stopped is another thing"
    earlier.path.rename(RUNS / "question-low-s1")
    assert found() == "question-low-s1"
    assert found(now=here._replace(source="0" * 64)) == "question-low-s1-2", "what is there is not touched"
    write_run(Recipe("question-low-s1-2", state="interrupted", updates=30))
    assert found(now=here._replace(source="0" * 64)) == "question-low-s1-3"


def test_a_rented_machine_gets_what_is_left_of_the_money() -> None:
    where = Where(RUNS, "runpod", {"max_usd": 5.0, "cloud": "SECURE"}, usd=6.0)
    budget = Budget(where)
    planned = Planned("low", 1, "question-low-s1", Path("tiny.json"), ("train.seed=1",), resolve_config("tiny.json"))
    command = remote_command(planned, RunFolder(RUNS / "question-low-s1"), where, budget)
    assert "remote.max_usd=5.0" in command
    assert 'remote.provider="runpod"' in command
    assert command[-3:] == ["--output", ".runs/question-low-s1", "--json"]
    budget.spent_usd = 4.0
    assert "remote.max_usd=2.0" in remote_command(planned, RunFolder(RUNS / "x"), where, budget)
    budget.spent_usd = 6.0
    assert "budget.usd = 6" in budget.exhausted()


def test_a_machine_that_may_still_cost_money_ends_the_study_and_a_failed_one_begins_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = [
        Planned("low", seed, f"question-low-s{seed}", Path("tiny.json"), (), resolve_config("tiny.json"))
        for seed in (1, 2, 3)
    ]
    codes = [30]
    calls: list[list[str]] = []

    def ended(command: list[str], *_: object) -> tuple[int, str]:
        calls.append(command)
        return codes[-1], "ended so"

    monkeypatch.setattr(making, "run_command", ended)
    with pytest.raises(LabError, match="may still cost money"):
        make_runs(plan, Where(RUNS, "runpod", usd=5.0), NoProgress(), print)
    assert len(calls) == 1
    codes.append(10)
    made = make_runs(plan, Where(RUNS, "runpod", usd=5.0), NoProgress(), print)
    assert len(calls) == 2
    assert ["the next machine would cost money" in one.message for one in made] == [False, True, True]
    assert not any(one.is_outcome for one in made)


def test_a_study_elsewhere_comes_home_through_the_runner() -> None:
    write(seeds=[1], where="ssh", remote={"provider": "local", "python": sys.executable})
    done = study()
    assert done.returncode in (0, 1), done.stdout + done.stderr
    for folder in list_runs(RUNS):
        assert folder.state() == "finished"
        assert folder.read_json("remote.json")["verdicts"]["results"] == "verified"
    again = study()
    assert again.stdout.count("was there") == 2


# --- noise ---


def test_noise_is_the_same_bits_for_one_seed_and_a_floor_for_others() -> None:
    done = run("noise", "--config", "tiny.json", "--seeds", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same seed twice   the same bits in all 12 updates and in the last weights" in done.stdout
    assert "n = 3" in done.stdout
    assert len(list((RUNS / "noise").iterdir())) == 1
    assert len(list_runs(RUNS)) == 4
    run("train", "--config", "tiny.json", "--set", "optimizer.max_lr=2e-2", "--run-id", "other")
    compared = run("compare", "noise-tiny-s1", "other")
    assert "noise floor from .runs/noise/" in compared.stdout
    assert run("noise", "--config", "tiny.json", "--seeds", "1").returncode == 2
    base = resolve_config("tiny.json")
    seeds = [plan_run("tiny.json", [], base, 1, vary).resolved.config for vary in ("both", "init", "order")]
    assert [(one.train.seed, one.data.order_seed) for one in seeds] == [(2, 2), (2, 1), (1, 2)]
