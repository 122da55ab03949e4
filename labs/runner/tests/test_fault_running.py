"""What goes wrong while a job runs: connections, machines, steps, limits. The log and the results are exact afterwards,
or the record says what is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import LOG, Lab, log_lines, says, when_the_log_has

STEADY = """
import sys, time
with open(f"{results}/metrics.jsonl", "w") as file:
    for number in range(60):
        file.write(f"{number}\\n")
        file.flush()
        print("line", number, flush=True)
        time.sleep(0.05)
open(f"{results}/answer.txt", "w").write("42\\n")
"""
STEADY_LOG = ["hello", *(f"line {number}" for number in range(60))]
FOR_EVER = "import time\nopen(f'{results}/answer.txt', 'w').write('42\\n')\nprint('line', flush=True)\ntime.sleep(600)"
LIVE = """
import time
file = open(f"{results}/metrics.jsonl", "w")
for number in range(40):
    file.write(f"{number}\\n")
    file.flush()
    print("line", number, flush=True)
    time.sleep(0.1)
time.sleep(600)
"""


@pytest.mark.parametrize("num_cuts", [1, 3])
def test_a_log_over_a_broken_connection_has_every_line_once(num_cuts: int, lab: Lab) -> None:
    lab.work(STEADY)
    cuts = [when_the_log_has(lab, f"line {12 * (n + 1)}\n", lambda: lab.fake.pod.proxy.cut()) for n in range(num_cuts)]
    outcome = lab.run()
    for cut in cuts:
        cut.join()
    assert outcome.code == 0, outcome
    assert log_lines(lab.home / "remote-log.txt") == STEADY_LOG
    assert (lab.home / "metrics.jsonl").read_text() == "".join(f"{number}\n" for number in range(60))
    assert lab.fake.pod.proxy.num_cuts >= min(2, num_cuts), "two cuts may hit the same connection"
    assert says(outcome, "connection lost")


def test_a_connection_that_falls_silent_is_noticed_and_made_again(lab: Lab) -> None:
    lab.work(STEADY)
    lab.job["limits"].update(silence=1, reconnect=20)

    def fall_silent() -> None:
        lab.fake.pod.proxy.blackhole(True)
        time.sleep(2.5)
        lab.fake.pod.proxy.blackhole(False)

    thread = when_the_log_has(lab, "line 10\n", fall_silent)
    outcome = lab.run()
    thread.join()
    assert outcome.code == 0, outcome
    assert log_lines(lab.home / "remote-log.txt") == STEADY_LOG


def test_a_connection_that_breaks_while_files_are_sent_is_made_again(lab: Lab) -> None:
    lab.job["files"]["inline"]["large.txt"] = "x" * 3_000_000

    def arm() -> None:
        while not lab.fake.pods:
            time.sleep(0.01)
        lab.fake.pod.proxy.cut_after(500_000, direction="up", times=2)

    thread = threading.Thread(target=arm)
    thread.start()
    outcome = lab.run()
    thread.join()
    assert outcome.code == 0, outcome
    lab.check_whole()
    assert lab.fake.pod.proxy.num_cuts == 2


def test_a_machine_that_cannot_be_reached_any_more_is_stopped(lab: Lab) -> None:
    lab.work(FOR_EVER)
    lab.job["limits"].update(silence=1, reconnect=2)

    def isolate() -> None:
        lab.fake.pod.proxy.refuse(True)
        lab.fake.pod.proxy.cut()

    thread = when_the_log_has(lab, "line", isolate)
    outcome = lab.run()
    thread.join()
    assert outcome.code == 20
    assert lab.verdicts == ("unknown", "failed", "stopped")
    assert says(outcome, "no connection for")
    assert says(outcome, "stopped machine keeps its disk")


FAILS: dict[str, tuple[str, dict[str, object], int, str, str]] = {
    "a step that fails": ("print('oh no'); raise SystemExit(3)", {}, 10, "the step work ended with 3", "failed"),
    "a step that is killed": ("os.kill(os.getpid(), 9)", {}, 10, "the step work ended with -9", "failed"),
    "a full disk": ("import errno; raise OSError(errno.ENOSPC, 'No space left on device')", {}, 10,
                    "the step work ended with 1", "failed"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILS)
def test_a_job_that_fails_brings_its_log_home_and_its_machine_is_deleted(name: str, lab: Lab) -> None:
    script, limits, code, error, verdict = FAILS[name]
    lab.work(f"print('begun', flush=True)\nopen(f'{{results}}/part.txt', 'w').write('part')\n{script}")
    lab.job["limits"].update(limits)
    outcome = lab.run()
    assert outcome.code == code
    assert says(outcome, error)
    assert lab.verdicts == (verdict, "verified", "deleted_verified")
    assert (lab.home / "part.txt").read_text() == "part"
    assert "begun" in (lab.home / "remote-log.txt").read_text()


def test_a_job_that_failed_can_be_kept(lab: Lab) -> None:
    lab.work("raise SystemExit(3)")
    lab.job["on_failure"] = "stop"
    assert lab.run().code == 10
    assert lab.verdicts == ("failed", "verified", "stopped")
    assert lab.fake.billing_now() == []


LIMITS: dict[str, tuple[str, Callable[[Lab], object], str]] = {
    "a step's time": (FOR_EVER, lambda lab: lab.job["steps"][1].update(timeout=1), "took longer than 1 s"),
    "the run's time": (FOR_EVER, lambda lab: lab.job["limits"].update(max_hours=12 / 3600), "time or money is over"),
    "the run's money": (FOR_EVER, lambda lab: lab.job["limits"].update(max_usd=12, max_usd_per_hour=6e3), "money is"),
    "a log that stands still": (FOR_EVER, lambda lab: lab.job["limits"].update(stall=1), "log has not grown for 1 s"),
    "a job that ignores the polite signal": (
        f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FOR_EVER}",
        lambda lab: lab.job["steps"][1].update(timeout=1), "took longer than 1 s",
    ),
    "a child that holds the output": (
        f"import subprocess\nsubprocess.Popen(['sleep', '600'])\n{FOR_EVER}",
        lambda lab: lab.job["steps"][1].update(timeout=1), "took longer than 1 s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_ends_the_job_and_stops_the_machine(name: str, lab: Lab) -> None:
    script, change, reason = LIMITS[name]
    lab.work(script)
    change(lab)
    if name == "the run's money":
        lab.fake.price_override = 3600.0  # a dollar a second
    outcome = lab.run()
    assert outcome.code == 10, outcome
    assert says(outcome, reason)
    assert lab.verdicts == ("timeout", "verified", "stopped")
    assert (lab.home / "answer.txt").read_text() == "42\n", "what exists came home"
    assert lab.fake.billing_now() == []
    assert "sleep" not in " ".join(map(str, lab.fake.pod.processes()))


def test_a_child_that_outlives_its_step_does_not_hold_the_job(lab: Lab) -> None:
    lab.work("import subprocess\nsubprocess.Popen(['sleep', '600'])\nopen(f'{results}/answer.txt', 'w').write('42\\n')")
    began = time.monotonic()
    assert lab.run().code == 0
    assert time.monotonic() - began < 20
    assert lab.verdicts == ("succeeded", "verified", "deleted_verified")


def test_a_secret_that_is_printed_in_two_pieces_is_still_removed(lab: Lab) -> None:
    lab.work(
        "import sys, time\nopen(f'{results}/answer.txt', 'w').write('42\\n')\nsecret = os.environ['MY_TOKEN']\n"
        "for piece in ('<', secret[:9], secret[9:], '>', secret[:4], '!\\n'):\n"
        "    print(piece, end='', flush=True)\n    time.sleep(0.1)"
    )
    assert lab.run().code == 0
    assert "<[secret removed]>a-se!" in (lab.home / "remote-log.txt").read_text()


def test_a_supervisor_that_is_killed_is_a_job_that_failed(lab: Lab) -> None:
    lab.work(FOR_EVER)

    def end_supervisor() -> None:
        (status,) = Path(lab.folder / "volume").glob("exp-*/control/status.json")
        os.kill(int(json.loads(status.read_text())["process"].split()[0]), signal.SIGKILL)

    thread = when_the_log_has(lab, "line", end_supervisor)
    outcome = lab.run()
    thread.join()
    assert outcome.code == 10, outcome
    assert says(outcome, "the machine was restarted, or the supervisor killed")
    assert lab.verdicts == ("failed", "verified", "deleted_verified")


def test_a_container_that_restarts_is_a_job_that_failed_and_not_one_that_begins_again(lab: Lab) -> None:
    lab.work(FOR_EVER)
    lab.job["limits"]["reconnect"] = 20
    thread = when_the_log_has(lab, "line", lambda: lab.fake.pod.restart_container())
    outcome = lab.run()
    thread.join()
    assert outcome.code == 10, outcome
    assert lab.verdicts == ("failed", "verified", "deleted_verified")
    assert log_lines(lab.home / "remote-log.txt") == ["hello", "line"]


def test_a_machine_that_somebody_stops_is_left_stopped(lab: Lab) -> None:
    lab.work(FOR_EVER)
    thread = when_the_log_has(lab, "line", lambda: lab.fake.stop(lab.fake.pod.id))
    outcome = lab.run()
    thread.join()
    assert outcome.code == 20, outcome
    assert lab.verdicts == ("unknown", "failed", "stopped")
    assert says(outcome, "EXITED, and not by this runner")
    lab.fake.start(lab.fake.pod.id)
    collected = lab.again("collect")
    assert collected.code == 30, "the machine runs and costs money until somebody ends it"
    assert (lab.home / "answer.txt").read_text() == "42\n"
    assert lab.again("terminate").code == 10
    assert lab.verdicts == ("failed", "verified", "deleted_verified")


def test_a_machine_that_somebody_deletes_leaves_what_was_fetched_while_it_ran(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiment_runner.following.LIVE_EVERY_S", 0.2)
    lab.work(LIVE)
    thread = when_the_log_has(lab, "line 30\n", lambda: lab.fake.delete(lab.fake.pod.id))
    outcome = lab.run()
    thread.join()
    assert outcome.code == 20, outcome
    assert lab.verdicts == ("unknown", "partial", "gone_externally")
    lines = (lab.home / "metrics.jsonl").read_text().splitlines()
    assert lines[:20] == [str(number) for number in range(20)]
    assert "line 30" in (lab.home / "remote-log.txt").read_text()
    assert says(outcome, "is gone, and not by this runner")


def test_live_results_are_here_before_the_job_has_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiment_runner.following.LIVE_EVERY_S", 0.2)
    lab.work(STEADY)
    seen: list[int] = []

    def look() -> None:
        for path in (lab.folder / ".runs").glob(".*.incoming/metrics.jsonl"):
            seen.append(path.stat().st_size)

    thread = when_the_log_has(lab, "line 40\n", look)
    assert lab.run().code == 0
    thread.join()
    assert [size > 0 for size in seen] == [True]
    assert not list((lab.folder / ".runs").glob(".*")), "nothing is left beside the results"


def test_a_second_command_on_a_run_at_work_is_refused(lab: Lab) -> None:
    lab.work(STEADY)
    said: list[str] = []

    def meddle() -> None:
        done = subprocess.run(
            [sys.executable, "-m", "experiment_runner", "stop", str(lab.state_path)], capture_output=True,
            encoding="utf-8", check=False, env={"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "/usr/bin"},
        )  # fmt: skip
        said.append(f"{done.returncode} {done.stderr}")

    thread = when_the_log_has(lab, "line 5\n", meddle)
    assert lab.run().code == 0
    thread.join()
    assert said[0].startswith("1 error: ")
    assert "another command is at work on this run" in said[0]


def test_the_small_jobs_log_is_whole(lab: Lab) -> None:
    assert lab.run().code == 0
    text = (lab.home / "remote-log.txt").read_text()
    assert text.startswith("=== look: cat extra.txt")
    assert log_lines(lab.home / "remote-log.txt") == ["hello", *LOG]
