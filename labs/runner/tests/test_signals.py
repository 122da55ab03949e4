"""Signals to the runner, a process of its own, in every phase: Ctrl-C once, twice, three times. Nobody is left with a
machine that is not named."""

from __future__ import annotations

import os
import signal

import pytest
from fakefaults import Reply
from lab import SECRET, Lab, log_lines
from processes import EXISTS_FROM, PHASES, STEADY, Process, arguments_of_all_processes, held


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
