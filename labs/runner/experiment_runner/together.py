"""Drives the runs of several machines side by side, each in a thread of its own, until all are through.

One that fails ends the others: they would wait for it for as long as their time lasts. Signals go to all. Everything
is in one process: a launcher that is killed leaves nobody at work here, and the next command starts from the states, as
it does for one machine.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from experiment_runner.commands import Here, drive
from experiment_runner.console import Console
from experiment_runner.errors import RunnerError
from experiment_runner.group import Entry
from experiment_runner.interrupts import LOOK_S, Interrupts
from experiment_runner.job import Job
from experiment_runner.providers.base import Provider
from experiment_runner.record import is_billing
from experiment_runner.state import StateFile

FAILED = ("failed", "timeout", "cancelled", "unknown")
"""Verdicts on a job with which the others have nothing to wait for."""
WORDS = {
    1: "Stopping all: each job is ended, what exists is fetched, the machines are stopped. Again: only stop them.",
    2: "The machines are only stopped now. Again: leave at once, and leave them as they are.",
}


class NodeConsole(Console):
    """What one machine has to say: whole lines, each with its name in front."""

    writing = threading.Lock()

    def __init__(self, label: str, as_json: bool) -> None:
        super().__init__(as_json)
        self.label, self.is_terminal, self.begun = label, False, ""

    def write(self, value: dict[str, Any], text: str) -> None:
        """Keeps the beginning of a line until its end comes."""
        if self.as_json:
            shown = json.dumps({**value, "node": self.label}, ensure_ascii=False) + "\n"
        else:
            *lines, self.begun = (self.begun + text).split("\n")
            shown = "".join(f"[{self.label}] {line}".rstrip() + "\n" for line in lines)
        with self.writing:
            self.put(shown)

    def error(self, text: str) -> None:
        """In the same stream as the rest, so that it stays with what led to it."""
        self.write({"event": "error", "message": text}, f"error: {text}\n")


class Member:
    """One machine's run, and the thread that takes it further."""

    def __init__(self, entry: Entry, file: StateFile, job: Job, provider: Provider, here: Here) -> None:
        self.entry, self.file, self.job, self.provider = entry, file, job, provider
        self.here = here._replace(console=NodeConsole(entry.label, here.console.as_json))
        self.interrupts = Interrupts(self.here.console.say)
        self.thread = threading.Thread(target=self.work)
        self.code = 0
        self.is_through = False
        """Whether it was driven to where it should go, however that ended."""
        self.is_ended_for_another = False

    def begin(self, *steps: Callable[[], int]) -> None:
        """Does these one after the other, besides whatever else goes on."""
        self.thread = threading.Thread(target=self.work, args=steps)
        self.thread.start()

    def work(self, *steps: Callable[[], int]) -> None:
        """What the thread does."""
        for step in steps:
            try:
                self.code = step()
                self.is_through = True
            except RunnerError as error:  # such as: another command is at work on it
                self.code = error.exit_code
                self.here.console.error(str(error))
            except Exception as error:  # a fault of ours must not look like success
                traceback.print_exc()
                self.code = 20
                self.here.console.error(f"a fault of the runner: {type(error).__name__}: {error}")

    def drive(self, act: str = "", until: tuple[str, ...] = ()) -> int:
        """Takes the run further."""
        return drive(self.file, self.job, self.provider, self.here, until, act, self.interrupts)

    def clear_away(self) -> list[Callable[[], int]]:
        """What is left to do for one that ended because another failed: the same as after a failure of its own."""
        self.interrupts = Interrupts(self.here.console.say)
        return [self.stop_if_on, self.delete_if_fetched]

    def stop_if_on(self) -> int:
        """Its job ends, if that was not so already."""
        is_at_rest = self.file.state.has_ended or self.file.state.phase in ("stopped", "delete_unverified")
        return self.code if is_at_rest else self.drive("stop")

    def delete_if_fetched(self) -> int:
        """Its folder goes, if nothing is lost with it and the job does not say otherwise."""
        state = self.file.state
        loses = state.verdicts["results"] != "verified" and state.verdicts["job"] != "none"
        if state.has_ended or loses or self.job.on_failure != "delete":
            return self.code
        return self.drive("terminate")

    @property
    def has_failed(self) -> bool:
        """Whether its job will not succeed any more."""
        state = self.file.state
        never_began = self.is_through and not self.thread.is_alive() and self.code != 0
        return (
            state.verdicts["job"] in FAILED
            or state.phase in ("refused", "lost")
            or (never_began and state.verdicts["job"] == "none")
        )

    @property
    def cause(self) -> str:
        """Why, in words."""
        state = self.file.state
        return state.message or f"the job {state.verdicts['job']}, the machine {state.verdicts['resource']}"


class Everybody(Interrupts):
    """Passes each signal on to every machine's run. Nothing is raised here: the threads look at their own."""

    def __init__(self, members: list[Member], say: Callable[[str], None]) -> None:
        super().__init__(say)
        self.members = members

    def receive(self, number: int, frame: FrameType | None) -> None:
        """What the system calls."""
        self.count += 1
        for member in self.members:
            member.interrupts.count += 1


def go_together(members: list[Member], overview: Path, console: Console, act: str, until: tuple[str, ...] = ()) -> int:
    """Takes all further at the same time; returns 0 only if all is well, else the code of what went wrong first."""
    signals = Everybody(members, console.say)
    with signals:
        for member in members:
            member.begin(lambda member=member: member.drive(act, until))  # type: ignore[misc]
        first = watch(members, signals, ends_others=not act)
        if first is not None and not signals.count:
            ended = [member for member in members if member.is_ended_for_another]
            for member in ended:
                member.begin(*member.clear_away())
            watch(members, signals, ends_others=False)
    show(members, first, overview, console)
    return code_of(members, first, is_interrupted=signals.count > 0)


def watch(members: list[Member], signals: Everybody, ends_others: bool) -> Member | None:
    """Waits until nobody is at work. Returns the one that failed first, if the others end with it."""
    first: Member | None = None
    told = signals.count
    is_at_work = True
    while is_at_work:
        time.sleep(LOOK_S)
        is_at_work = any(member.thread.is_alive() for member in members)
        if signals.count > told:
            told = signals.count
            signals.say(WORDS.get(told, "Leaving at once."))
        if ends_others and first is None and not signals.count:
            first = next((member for member in members if member.has_failed), None)
            if first is not None:
                end_others(first, members, signals.say)
    return first


def end_others(first: Member, members: list[Member], say: Callable[[str], None]) -> None:
    """Interrupts those whose job has not come to an end by itself."""
    others = [one for one in members if one.file.state.verdicts["job"] not in ("succeeded", *FAILED)]
    ended = [one for one in others if not one.file.state.has_ended and one is not first]
    for member in ended:
        member.is_ended_for_another = True
        member.interrupts.count = max(member.interrupts.count, 1)
    if ended:
        say(f"node {first.entry.label} failed: the others are ended ({', '.join(one.entry.label for one in ended)})")


def code_of(members: list[Member], first: Member | None, is_interrupted: bool) -> int:
    """What all of it comes to: a machine that may cost money before an interruption before the first failure."""
    codes = [member.code for member in members]
    for code, holds in ((30, True), (130, is_interrupted)):
        if holds and code in codes:
            return code
    return (first.code if first is not None else 0) or next((code for code in codes if code), 0)


def show(members: list[Member], first: Member | None, overview: Path, console: Console) -> None:
    """The end in words: each machine's verdicts, what went wrong first, and the command that goes on."""
    lines = [""]
    for member in members:
        verdicts = member.file.state.verdicts
        machine = verdicts["resource"].replace("_", " ")
        words = f"job {verdicts['job']}, results {verdicts['results']}, machine {machine}"
        lines.append(f"node {member.entry.label}: {words}; state {member.file.path}")
    if first is not None:
        lines.append(f"failed first: node {first.entry.label}: {first.cause}; its log is {first.file.log}")
    lines += [f"group     {overview}", *left_over(members, overview)]
    values = {"group": str(overview), "first": first.entry.rank if first is not None else None}
    listed = [
        {"rank": one.entry.rank, "name": one.entry.name, "code": one.code, "state": str(one.file.path),
         "verdicts": one.file.state.verdicts}
        for one in members
    ]  # fmt: skip
    console.summary({**values, "nodes": listed}, lines)


def left_over(members: list[Member], overview: Path) -> list[str]:
    """What is still there, and the commands for it."""
    lines = []
    for member in members:
        state = member.file.state
        if not state.has_ended:
            cost = ", AND IT MAY COST MONEY" if is_billing(state) else ""
            lines.append(f"still there: node {member.entry.label}, {state.phase}{cost}")
    commands = ("monitor", "collect", "stop", "start", "terminate") if lines else ()
    return [*lines, *(f"  {command} {overview}" for command in commands)]
