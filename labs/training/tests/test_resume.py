"""A run that was stopped, interrupted or killed, and continued, equals one that never was: bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY, TRAINING, run, start, train_tiny

from training_lab.checkpoint import list_checkpoints
from training_lab.record import CHECKPOINTS, METRICS, SUMMARY, RunFolder, list_runs
from training_lab.tracking import Row, read_metrics

SLOW = ("--set", "train.updates=2000", "--set", "checkpoint.every=500", "--set", "eval.every=0")


def only_run(runs: str | Path = ".runs") -> RunFolder:
    (found,) = list_runs(Path(runs))
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same bits, through all their parts."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


UNEQUAL = {"seconds", "memory_bytes", "segment"}
"""What may differ from process to process."""


def final_state(folder: RunFolder) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder.file("checkpoint.pt"), weights_only=True)
    return state


def results(folder: RunFolder) -> list[Row]:
    """What readers see of updates and evaluations, less what may differ: time, and which process it was."""
    rows = [row for row in read_metrics(folder.file(METRICS)) if row["kind"] != "event"]
    return [{key: value for key, value in row.items() if key not in UNEQUAL} for row in rows]


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    runs = tmp_path_factory.mktemp("never-stopped")
    train_tiny("--runs", str(runs))
    return only_run(runs)


def assert_equals(folder: RunFolder, other: RunFolder) -> None:
    assert same(final_state(folder), final_state(other))
    assert results(folder) == results(other)
    summaries = [run.read_json(SUMMARY) for run in (folder, other)]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert summaries[0]["val_loss"] == summaries[1]["val_loss"]


def test_two_runs_of_one_config_are_bit_identical(never_stopped: RunFolder) -> None:
    train_tiny("--new")
    assert_equals(only_run(), never_stopped)


def test_stopped_at_edges_middle_evaluation_and_save_and_resumed_each_time_equals_never_stopped(
    never_stopped: RunFolder,
) -> None:
    # checkpoint.every is 3 and eval.every 4: 1 is the first update, 3 a save, 4 an evaluation, 11 the last but one
    for segment, update in enumerate((1, 3, 4, 7, 11), start=1):
        lines = train_tiny("--stop-after", str(update))
        assert lines[-1]["state"] == "stopped"
        assert lines[-1]["updates"] == update
        assert sum(line.get("event") == "resume" for line in lines) == (segment > 1)
    assert train_tiny()[-1]["state"] == "finished"
    assert_equals(only_run(), never_stopped)


def test_killed_at_twenty_random_moments_saves_included_equals_never_stopped(tmp_path: Path) -> None:
    longer = {"extends": str(TINY), "train": {"updates": 600}, "eval": {"every": 50}, "checkpoint": {"every": 5}}
    config = tmp_path / "longer.json"
    config.write_text(json.dumps(longer))
    environment = {**os.environ, "PYTHONPATH": str(TRAINING)}
    seed = str(random.SystemRandom().randrange(10**6))
    script = str(Path(__file__).parent / "kill_trainings.py")
    arguments = [sys.executable, script, str(config), "killed", "20", seed]
    done = subprocess.run(arguments, env=environment, capture_output=True, encoding="utf-8", timeout=800)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    in_saves = int(re.findall(r"(\d+) in a save", done.stdout)[0])
    assert in_saves > 0, done.stdout
    alone = run("train", "--config", str(config), "--runs", "alone")
    assert alone.returncode == 0, alone.stderr
    assert_equals(only_run("killed"), only_run("alone"))


@pytest.mark.parametrize(
    "changes", [("eval.every=1",), ("eval.every=0", "checkpoint.every=1", "checkpoint.keep_best=false")]
)
def test_how_often_is_evaluated_and_saved_changes_no_training_loss(
    changes: tuple[str, ...], never_stopped: RunFolder
) -> None:
    train_tiny(*(word for change in changes for word in ("--set", change)))
    updates, expected = ([r for r in results(f) if r["kind"] == "update"] for f in (only_run(), never_stopped))
    assert updates == expected
    assert same(final_state(only_run())["model"], final_state(never_stopped)["model"])


def test_how_it_is_shown_changes_nothing(never_stopped: RunFolder) -> None:
    assert run("train", "--config", str(TINY)).returncode == 0
    assert_equals(only_run(), never_stopped)


def wait_for_line(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(f"the process ended without saying {words!r}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_update_saves_and_says_how_to_go_on(number: signal.Signals, code: int) -> None:
    process = start("train", "--config", str(TINY), *SLOW)
    wait_for_line(process, "update    100")
    asked = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert time.monotonic() - asked < 10
    assert process.returncode == code
    assert number.name in err
    folder = only_run()
    assert folder.read_json(SUMMARY)["state"] == "interrupted"
    stopped_at = folder.read_json(SUMMARY)["updates"]
    assert list_checkpoints(folder.file(CHECKPOINTS))[0].update == stopped_at
    command = next(line for line in out.splitlines() if "train --config" in line).strip().split()
    assert command[:3] == ["python", "-m", "training_lab"]
    again = run(*command[3:], "--stop-after", str(stopped_at + 1))
    assert f"Continuing run {folder.run_id} from update {stopped_at + 1}" in again.stdout
    assert f"update {stopped_at + 1:>6}  loss" in again.stdout


def test_a_second_signal_ends_at_once_and_the_run_can_still_be_continued() -> None:
    process = start("train", "--config", str(TINY), *SLOW, "--set", "batch.tokens=20000", "--set", "checkpoint.every=2")
    wait_for_line(process, "saved checkpoints/update-000002")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "SIGINT" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode in (130, 0 - signal.SIGINT)
    done = run(
        "train",
        "--config",
        str(TINY),
        *SLOW,
        "--set",
        "batch.tokens=20000",
        "--set",
        "checkpoint.every=2",
        "--stop-after",
        "4",
    )
    assert done.returncode == 0
    assert "Continuing run" in done.stdout


def test_a_run_that_is_going_on_is_not_continued_by_another_process() -> None:
    process = start("train", "--config", str(TINY), *SLOW)
    wait_for_line(process, "update    100")
    second = run("train", "--config", str(TINY), *SLOW)
    assert second.returncode == 2
    assert "is being trained there now" in second.stderr
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 143


def test_a_finished_run_is_not_continued_and_new_starts_another() -> None:
    train_tiny()
    train_tiny()
    train_tiny("--stop-after", "3")
    train_tiny("--stop-after", "3", "--new")
    assert len(list_runs(Path(".runs"))) == 4


def test_a_damaged_checkpoint_is_named_and_an_older_one_gives_the_same_end(never_stopped: RunFolder) -> None:
    train_tiny("--stop-after", "7")
    newest = list_checkpoints(only_run().file(CHECKPOINTS))[0]
    state = bytearray((newest.path / "state.pt").read_bytes())
    state[-100] ^= 1
    (newest.path / "state.pt").write_bytes(state)
    lines = train_tiny()
    (message,) = lines[0]["damaged_checkpoints"]
    assert "update-000007: damaged" in message
    assert lines[0]["continues_after_update"] == 6
    assert_equals(only_run(), never_stopped)


def test_when_every_checkpoint_is_damaged_it_stops_with_1_and_starts_nothing_afresh() -> None:
    train_tiny("--stop-after", "7")
    for checkpoint in list_checkpoints(only_run().file(CHECKPOINTS)):
        (checkpoint.path / "state.pt").write_bytes(b"")
    done = run("train", "--config", str(TINY))
    assert done.returncode == 1
    assert "no checkpoint verifies" in done.stderr
    assert "Traceback" not in done.stderr
    assert only_run().read_json(SUMMARY)["updates"] == 7


def test_a_run_of_other_code_is_not_continued_silently() -> None:
    train_tiny("--stop-after", "3")
    source = only_run().read_json("source.json")
    source["files"]["training_lab/model.py"] = "0" * 64
    only_run().write_json("source.json", source)
    done = run("train", "--config", str(TINY))
    assert done.returncode == 2
    assert "trained by other code: training_lab/model.py changed" in done.stderr


def test_a_run_on_other_data_is_not_continued_and_the_file_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph number {i} with some words in it" for i in range(200)))
    data = ("--set", "data.source=files", "--set", 'data.paths=["text.txt"]', "--set", "data.documents=paragraph")
    train_tiny(*data, "--stop-after", "3")
    text.write_text(text.read_text().replace("number 7", "number seven"))
    done = run("train", "--config", str(TINY), *data)
    assert done.returncode == 2
    assert "its data have changed since: 1 source files changed (text.txt)" in done.stderr


def test_metrics_that_lost_rows_are_noticed_before_anything_is_trained() -> None:
    train_tiny("--stop-after", "7")
    path = only_run().file(METRICS)
    lines = path.read_text().splitlines(keepends=True)
    for kept, message in (
        (lines[:3], "rows are lost, among them update 2"),
        ([*lines[:3], "{\n", *lines[4:]], ":4: damaged"),
    ):
        path.write_text("".join(kept))
        done = run("train", "--config", str(TINY))
        assert done.returncode == 1
        assert message in done.stderr
        assert path.read_text() == "".join(kept)
        verified = run("verify", "latest")
        assert verified.returncode == 1
        assert "Traceback" not in verified.stderr


def test_a_reader_that_goes_away_does_not_stop_the_training(never_stopped: RunFolder) -> None:
    process = start("train", "--config", str(TINY))
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as err:
        assert err.read() == ""
    assert process.wait(60) == 0
    assert_equals(only_run(), never_stopped)


def test_a_folder_that_may_be_the_run_to_go_on_with_is_not_passed_over() -> None:
    train_tiny("--stop-after", "3")
    only_run().file("config.json").write_text("{")
    done = run("train", "--config", str(TINY))
    assert done.returncode == 1
    assert "it may be the run to go on with" in done.stderr
    assert len(list_runs(Path(".runs"))) == 1


def test_stopping_where_the_run_is_already_past_is_refused() -> None:
    train_tiny("--stop-after", "5")
    done = run("train", "--config", str(TINY), "--stop-after", "4")
    assert done.returncode == 2
    assert "the run is already at update 5" in done.stderr


def test_a_run_can_be_repeated_from_its_folder_alone(never_stopped: RunFolder) -> None:
    done = run("train", "--config", str(never_stopped.file("config.json")))
    assert done.returncode == 0, done.stderr
    assert_equals(only_run(), never_stopped)


def test_another_number_of_threads_is_said_when_a_run_goes_on_with_it() -> None:
    threads = ("--set", "train.num_threads=0")
    first = run(
        "train", "--config", str(TINY), *threads, "--stop-after", "3", preexec_fn=lambda: os.sched_setaffinity(0, {0})
    )
    assert first.returncode == 0, first.stderr
    second = run("train", "--config", str(TINY), *threads)
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this machine has one CPU: the number of threads cannot differ")
    assert "differs from the last in num_threads, usable_cpus" in second.stdout
    processes = only_run().read_json("environment.json")["processes"]
    assert [(process["segment"], process["num_threads"]) for process in processes] == [
        (1, 1),
        (2, len(os.sched_getaffinity(0))),
    ]
