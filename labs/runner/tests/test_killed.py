"""A runner that is killed in any phase: the commands that go on find everything, make nothing twice, lose no byte."""

from __future__ import annotations

import signal
import time

import pytest
from fakefaults import Reply
from lab import Lab, log_lines, says
from processes import EXISTS_FROM, PHASES, STEADY, WHOLE_LOG, Process, held


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
