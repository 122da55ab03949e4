"""`train --resume`, and runs that begin with another's weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny import TINY, run, start, train_tiny

from training_lab.checkpoint import list_checkpoints
from training_lab.record import CHECKPOINTS, CONFIG, METRICS, RunFolder, list_runs
from training_lab.tracking import read_metrics, rows_of_kind


def only_run(runs: str = ".runs") -> RunFolder:
    (folder,) = list_runs(Path(runs))
    return folder


def losses(folder: RunFolder) -> list[float]:
    return [row["loss"] for row in rows_of_kind(read_metrics(folder.file(METRICS)), "update")]


def test_a_lost_machine_goes_on_from_the_copy_with_the_same_bits() -> None:
    train_tiny("--runs", "whole")
    train_tiny("--set", f"checkpoint.copy_to=file://{Path('store').resolve()}", "--stop-after", "7")
    name = only_run().run_id
    shutil.rmtree(".runs")
    done = run("train", "--resume", f"file://{Path('store').resolve()}/{name}", "--json")
    assert done.returncode == 0, done.stderr
    assert losses(only_run()) == losses(only_run("whole"))
    last = [json.loads((folder.file("summary.json")).read_text())["weights_sha256"]
            for folder in (only_run(), only_run("whole"))]  # fmt: skip
    assert last[0] == last[1]
    copies = only_run().read_json("copies.json")["checkpoints"]
    assert {one["state"] for one in copies.values()} == {"verified"}
    assert set(map(int, copies)) == {one.update for one in list_checkpoints(only_run().file(CHECKPOINTS))}


def test_more_updates_go_on_and_are_recorded_with_what_was_before() -> None:
    train_tiny("--set", "schedule.name=constant")
    done = run("train", "--resume", "latest", "--set", "train.updates=16", "--set", "eval.every=2", "--json")
    assert done.returncode == 0, done.stderr
    config = only_run().read_json(CONFIG)
    assert config["values"]["train"]["updates"] == 16
    changed = {"train.updates": [12, 16], "eval.every": [4, 2]}
    assert config["changes"] == [{"after_update": 12, "settings": changed}]
    longer = run("train", "--config", str(TINY), "--set", "schedule.name=constant", "--set", "train.updates=16",
                 "--runs", "planned", "--json")  # fmt: skip
    assert longer.returncode == 0, longer.stderr
    assert losses(only_run()) == losses(only_run("planned"))
    assert run("verify", "latest").returncode == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.max_lr=1"], "cannot go on with optimizer.max_lr: 0.01 → 1.0: that would be another experiment"),
        (["batch.tokens=256", "eval.every=1"], "cannot go on with batch.tokens: 512 → 256"),
        (["checkpoint.restore=weights"], "cannot go on with checkpoint.restore: all → weights"),
        (["train.updates=5"], "has 6 updates; to go on with it, give more with --set train.updates=12"),
    ],
)
def test_what_would_be_another_experiment_is_refused_and_nothing_is_changed(overrides: list[str], message: str) -> None:
    train_tiny("--stop-after", "6")
    before = only_run().file(CONFIG).read_bytes()
    words = [word for one in overrides for word in ("--set", one)]
    done = run("train", "--resume", "latest", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert only_run().file(CONFIG).read_bytes() == before
    assert losses(only_run()) == losses(only_run())[:6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --config with what to train, or --resume with a run"),
        (["--config", "smoke", "--resume", "latest"], "give --config with what to train, or --resume with a run"),
        (["--resume", "latest", "--new"], "leave out --new and --run-id"),
        (["--resume", "nothing"], "no such run"),
    ],
)
def test_a_command_that_is_not_clear_is_refused(words: list[str], message: str) -> None:
    done = run("train", *words)
    assert (done.returncode, message in done.stderr, len(done.stderr.splitlines())) == (2, True, 1), done.stderr


def test_a_run_may_begin_with_anothers_weights_and_everything_else_is_new() -> None:
    train_tiny()
    first = only_run()
    newest = list_checkpoints(first.file(CHECKPOINTS))[0].describe()["weights_sha256"]
    rows = train_tiny("--new", "--set", f"train.init_from={first.run_id}", "--set", "train.seed=2")
    second = next(folder for folder in list_runs(Path(".runs")) if folder.run_id != first.run_id)
    assert second.read_json(CONFIG)["model"]["initial_weights_sha256"] == newest
    evaluation = next(row for row in rows if row.get("kind") == "evaluation")
    recorded = rows_of_kind(read_metrics(first.file(METRICS)), "evaluation")[-1]
    assert (evaluation["update"], evaluation["val_loss"]) == (0, recorded["val_loss"])
    update = next(row for row in rows if row.get("kind") == "update")
    assert (update["update"], update["lr"]) == (1, 0.005), "the schedule begins anew"
    other = run("train", "--config", str(TINY), "--new", "--set", f"train.init_from={first.run_id}",
                "--set", "model.d_model=32")  # fmt: skip
    assert other.returncode == 2
    assert "the checkpoint is of another model: " in other.stderr or "vocabulary" in other.stderr


def test_another_runs_checkpoint_is_neither_used_nor_removed() -> None:
    train_tiny("--stop-after", "6")
    first = only_run()
    train_tiny("--new", "--stop-after", "3", "--set", "train.seed=9", "--runs", "others")
    foreign = first.file(CHECKPOINTS) / "update-000009"
    shutil.copytree(only_run("others").file(CHECKPOINTS) / "update-000003", foreign)
    assert next(one.update for one in list_checkpoints(first.file(CHECKPOINTS))) == 6
    done = run("train", "--config", str(TINY), "--json", "--stop-after", "8")
    assert done.returncode == 0, done.stderr
    assert foreign.is_dir()
    assert "update-000009" not in done.stdout


def test_a_run_that_was_killed_cannot_be_given_fewer_updates_than_it_has_saved() -> None:
    process = start("train", "--config", str(TINY), "--json", "--set", "train.updates=100000")
    assert process.stdout is not None
    while '"event": "checkpoint", "update": 6' not in process.stdout.readline():
        pass
    process.kill()
    process.communicate()
    newest = list_checkpoints(only_run().file(CHECKPOINTS))[0].update
    done = run("train", "--resume", "latest", "--set", "train.updates=5")
    assert done.returncode == 2
    assert f"has {newest} updates; to go on with it, give more" in done.stderr


def test_first_weights_come_from_a_run_with_a_name_and_are_replayed_from_it() -> None:
    refused = run("train", "--config", str(TINY), "--set", "train.init_from=latest")
    assert refused.returncode == 2
    assert "train.init_from: must name a run" in refused.stderr
    train_tiny()
    first = only_run()
    train_tiny("--new", "--set", f"train.init_from={first.run_id}")
    replayed = run("verify", "latest", "--replay", "2", "--from", "0")
    assert replayed.returncode == 0, replayed.stdout


def test_a_run_that_is_begun_again_begins_with_the_same_weights() -> None:
    train_tiny("--stop-after", "6")
    first = only_run()
    arguments = ("--set", f"train.init_from={first.run_id}", "--set", "checkpoint.keep_best=false")
    train_tiny("--new", *arguments, "--stop-after", "1")
    second = next(folder for folder in list_runs(Path(".runs")) if folder.run_id != first.run_id)
    shutil.rmtree(second.file(CHECKPOINTS))
    done = run("train", "--resume", first.run_id, "--json")
    assert done.returncode == 0, done.stderr
    again = run("train", "--config", str(TINY), "--run-id", second.run_id, *arguments)
    assert again.returncode == 2
    assert "began with other weights" in again.stderr
