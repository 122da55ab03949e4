"""Signals to the runner, a process of its own, in every phase: Ctrl-C once, twice, three times, and being killed; and
then the commands that go on. Not a byte is lost, nothing is made twice, and no machine is left that is not named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakerunpod import Reply
from lab import SECRET, Lab, log_lines, says

RUNNER = Path(__file__).parent.parent
HOLDING = Path(__file__).parent / "holding.py"
PHASES = ("planned", "creating", "booting", "ready", "uploading", "running", "finished", "collecting", "collected",
          "deleting")  # fmt: skip
EXISTS_FROM = PHASES.index("booting")
STEADY = """
import signal, sys, time
def polite(*_):
    open(f"{results}/last-words.txt", "w").write("saved\\n")
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, polite)
for number in range(30):
    print("line", number, flush=True)
    time.sleep(0.05)
open(f"{results}/answer.txt", "w").write("42\\n")
open(f"{results}/metrics.jsonl", "w").write("0\\n" * 5)
"""
WHOLE_LOG = ["hello", *(f"line {number}" for number in range(30))]


class Process:
    """A runner at work."""

    def __init__(self, lab: Lab, *command: str) -> None:
        (lab.folder / "job.json").write_text(json.dumps(lab.job))
        (lab.folder / "held").unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(RUNNER)}
        self.lab = lab
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=lab.folder, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 40
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def signal(self, number: int, times: int = 1) -> None:
        for _ in range(times):
            self.process.send_signal(number)
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Its exit code and all that it said."""
        out, err = self.process.communicate(timeout=60)
        assert "Traceback" not in err, err
        assert SECRET not in out + err
        return self.process.returncode, out + err


def held(lab: Lab, phase: str, moment: str, *command: str) -> Process:
    """A `run` that waits in a phase."""
    process = Process(lab, str(HOLDING), phase, moment, *(command or ("run", "job.json")))
    process.wait_for((lab.folder / "held").exists)
    return process


def arguments_of_all_processes() -> bytes:
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes()
        except OSError:
            continue
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_one_ctrl_c_stops_the_machine_and_leaves_what_exists_here(phase: str, lab: Lab) -> None:
    lab.work(STEADY)
    process = held(lab, phase, "before")
    assert not any(key.encode() in arguments_of_all_processes() for key in (SECRET, lab.fake.key))
    process.signal(signal.SIGINT)
    code, said = process.end()
    assert lab.fake.billing_now() == []
    if phase == "deleting":
        assert code == 0, "the deletion is the shortest way out"
        assert lab.verdicts == ("succeeded", "verified", "deleted_verified")
        return
    assert code == 130, said
    if PHASES.index(phase) < EXISTS_FROM:
        assert lab.fake.creates == 0
        assert lab.verdicts == ("none", "none", "none")
        return
    assert lab.verdicts[2] == "stopped"
    assert "stopped machine keeps its disk" in said
    if phase in ("finished", "collecting", "collected"):
        assert lab.verdicts[:2] == ("succeeded", "verified")


def test_one_ctrl_c_in_the_job_lets_it_save_and_brings_that_home(lab: Lab) -> None:
    lab.work(STEADY.replace("0.05", "1"))
    process = Process(lab, "-m", "experiment_runner", "run", "job.json")
    process.wait_for(lambda: any("line 1\n" in path.read_text() for path in lab.folder.glob(".runpod/*/log.txt")))
    process.signal(signal.SIGINT)
    code, said = process.end()
    assert code == 130, said
    assert lab.verdicts == ("cancelled", "verified", "stopped")
    assert (lab.home / "last-words.txt").read_text() == "saved\n"
    assert log_lines(lab.home / "remote-log.txt")[-1] == "saved"
    assert lab.fake.billing_now() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_polite_signals_do_the_same(number: int, lab: Lab) -> None:
    lab.work(STEADY)
    process = held(lab, "running", "before")
    process.signal(number)
    assert process.end()[0] == 130
    assert lab.verdicts[1:] == ("verified", "stopped")


@pytest.mark.parametrize("phase", PHASES[EXISTS_FROM:-1])
def test_two_only_stop_the_machine(phase: str, lab: Lab) -> None:
    lab.work(STEADY)
    process = held(lab, phase, "before")
    os.kill(process.process.pid, signal.SIGSTOP)  # both arrive before it looks
    process.signal(signal.SIGINT)
    os.kill(process.process.pid, signal.SIGTERM)
    os.kill(process.process.pid, signal.SIGCONT)
    code, said = process.end()
    assert code == 130, said
    assert lab.verdicts[2] == "stopped"
    assert lab.fake.billing_now() == []
    if phase in ("running", "finished"):
        assert not lab.home.exists(), "nothing was fetched"


@pytest.mark.parametrize("phase", PHASES)
def test_three_leave_at_once_and_say_what_is_left(phase: str, lab: Lab) -> None:
    lab.work(STEADY)
    process = held(lab, phase, "before")
    os.kill(process.process.pid, signal.SIGSTOP)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process.process.pid, number)
    os.kill(process.process.pid, signal.SIGCONT)
    code, said = process.end()
    if PHASES.index(phase) < EXISTS_FROM:
        assert code == 130, said
        assert lab.fake.creates == 0
        return
    assert code == 30, said
    for part in (lab.fake.pod.id, "2.99 USD an hour", f"https://console.runpod.io/pods?id={lab.fake.pod.id}"):
        assert part in said
    outcome = lab.again("monitor")
    assert outcome.code == 0, outcome
    assert lab.verdicts == ("succeeded", "verified", "deleted_verified")


def test_the_id_is_on_disk_before_even_the_third_ctrl_c_counts(lab: Lab) -> None:
    lab.fake.script("create", Reply(perform=True, delay_s=1.5))
    process = Process(lab, "-m", "experiment_runner", "run", "job.json")
    process.wait_for(lambda: lab.fake.creates == 1)
    process.signal(signal.SIGINT, 3)
    code, said = process.end()
    assert code == 30, said
    assert lab.state["resource"]["id"] == lab.fake.pod.id
    assert "One moment: the machine's id is being written down." in said
    assert lab.again("terminate").code == 40
    assert lab.fake.billing_now() == []


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_runner_that_is_killed_is_gone_on_from(phase: str, moment: str, lab: Lab) -> None:
    lab.work(STEADY)
    process = held(lab, phase, moment)
    process.signal(signal.SIGKILL)
    process.end()
    outcome = lab.again("monitor")
    assert outcome.code == 0, outcome
    assert lab.verdicts == ("succeeded", "verified", "deleted_verified")
    assert log_lines(lab.home / "remote-log.txt") == WHOLE_LOG
    assert lab.fake.creates == 1
    assert lab.fake.billing_now() == []


def test_one_that_is_killed_between_question_and_answer_of_the_creation(lab: Lab) -> None:
    lab.fake.script("create", Reply(perform=True, delay_s=3))
    process = Process(lab, "-m", "experiment_runner", "run", "job.json")
    process.wait_for(lambda: lab.fake.creates == 1)
    process.signal(signal.SIGKILL)
    process.end()
    assert lab.verdicts == ("none", "none", "maybe")
    outcome = lab.again("monitor")
    assert outcome.code == 0, outcome
    assert says(outcome, "the creation was interrupted; looking whether exp-small")
    lab.check_whole()


def test_one_that_is_killed_again_and_again_still_has_every_line_once(lab: Lab) -> None:
    lab.work(STEADY.replace("0.05", "0.1"))
    command = ["run", "job.json"]
    for number in (3, 8, 13, 18, 23):
        process = Process(lab, "-m", "experiment_runner", *command)
        text = f"line {number}\n"
        process.wait_for(lambda text=text: any(text in p.read_text() for p in lab.folder.glob(".runpod/*/log.txt")))  # type: ignore[misc]
        process.signal(signal.SIGKILL)
        process.end()
        command = ["monitor", str(lab.state_path)]
    assert lab.again("monitor").code == 0
    assert log_lines(lab.home / "remote-log.txt") == WHOLE_LOG


@pytest.mark.parametrize("phase", PHASES[EXISTS_FROM:])
def test_terminate_ends_it_from_any_phase(phase: str, lab: Lab) -> None:
    lab.work(STEADY)
    process = held(lab, phase, "before")
    process.signal(signal.SIGKILL)
    process.end()
    outcome = lab.again("terminate", "--yes")
    assert lab.verdicts[2] == "deleted_verified", outcome
    assert outcome.code == {"collected": 0, "deleting": 0}.get(phase, 40 if lab.verdicts[0] == "none" else 20)
    assert lab.fake.billing_now() == []


@pytest.mark.parametrize("phase", ["running", "finished", "collecting", "collected"])
def test_collect_then_terminate_as_the_seed_says(phase: str, lab: Lab) -> None:
    lab.work(STEADY)
    process = held(lab, phase, "before")
    process.signal(signal.SIGKILL)
    process.end()
    time.sleep(2 if phase == "running" else 0)  # the job goes on without anybody, and ends
    collected = lab.again("collect", "--output", "recovered")
    assert collected.code == 30, "the machine still costs money"
    assert (lab.folder / "recovered/answer.txt").read_text() == "42\n"
    assert log_lines(lab.folder / "recovered/remote-log.txt") == WHOLE_LOG
    assert lab.again("terminate").code == 0
    assert lab.fake.billing_now() == []


def test_collect_while_the_job_runs_takes_what_exists_and_leaves_it_alone(lab: Lab) -> None:
    lab.work("open(f'{results}/answer.txt', 'w').write('42\\n')\nimport time\nprint('line', flush=True)\ntime.sleep(4)")
    process = Process(lab, "-m", "experiment_runner", "run", "job.json", "--detach")
    code, _ = process.end()
    assert code == 30, "it goes on, and costs money"
    assert lab.state["phase"] == "running"
    time.sleep(0.5)
    assert lab.again("collect").code == 30
    assert lab.verdicts == ("running", "partial", "running")
    assert (lab.home / "answer.txt").exists()
    assert lab.again("monitor").code == 0


def test_stop_then_start_then_collect_then_terminate(lab: Lab) -> None:
    lab.work(STEADY.replace("0.05", "1"))
    Process(lab, "-m", "experiment_runner", "run", "job.json", "--detach").end()
    assert lab.again("stop").code == 10
    assert lab.verdicts == ("cancelled", "verified", "stopped")
    assert says(lab.again("collect"), "the machine is stopped: start it first")
    assert lab.again("start").code == 30
    assert lab.again("collect", "--output", "recovered").code == 30
    assert (lab.folder / "recovered/last-words.txt").exists()
    assert lab.again("terminate").code == 10
    assert lab.verdicts == ("cancelled", "verified", "deleted_verified")
