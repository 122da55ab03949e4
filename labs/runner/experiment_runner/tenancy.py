"""The machine of one run: got, reached, stopped, removed. What is meant is on disk before, what came of it after."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from experiment_runner.console import Console
from experiment_runner.errors import RunnerError
from experiment_runner.interrupts import Interrupts
from experiment_runner.job import Job
from experiment_runner.providers.base import GONE, Ambiguous, Machine, NotCreated, NotReady, Provider
from experiment_runner.session import CommandFailed, ConnectionLost
from experiment_runner.state import StateFile, utc_now
from experiment_runner.target import Target

T = TypeVar("T")
SETTLE_POLLS = 6
"""So many looks until a machine that was just made must be in the listing."""
DELETE_POLLS = 24
DELETE_TRIES = 3
VERIFIED_TIMES = 2


class Tenancy:
    """A run's machine at its provider."""

    def __init__(self, file: StateFile, job: Job, provider: Provider, console: Console, interrupts: Interrupts) -> None:
        self.file, self.state, self.job, self.provider = file, file.state, job, provider
        self.console, self.interrupts = console, interrupts
        self.connection: Target | None = None

    @property
    def id(self) -> str:
        """Empty before there is one."""
        return str(self.state.resource.get("id", ""))

    @property
    def pause_s(self) -> float:
        """Between two looks; a host of one's own minds fewer seconds than a provider's API."""
        return self.job.limits.poll if self.provider.is_paid else min(self.job.limits.poll, 0.2)

    def create(self) -> None:
        """Makes the machine. The third Ctrl-C waits too, until its id is on disk.

        Raises NotCreated if there is none, Ambiguous if nobody can tell.
        """
        if self.state.verdicts["resource"] == "maybe":
            self.adopt("the creation was interrupted")
            return
        self.state.verdicts["resource"] = "maybe"
        self.file.save()
        self.interrupts.is_held = True
        try:
            self.take(self.provider.create(self.state.run, self.file.folder))
        except NotCreated:
            self.state.verdicts["resource"] = "none"
            raise
        except Ambiguous as error:
            self.interrupts.is_held = False
            self.adopt(str(error))
        finally:
            self.interrupts.is_held = False

    def adopt(self, why: str) -> None:
        """Nobody knows whether a machine was made: looks for it by its name, and never makes a second one."""
        self.console.say(f"{why}; looking whether {self.state.run} exists")
        for _ in range(SETTLE_POLLS):
            found = self.provider.find(self.state.run)
            if found:
                self.take(found[0])
                return
            self.interrupts.sleep(self.job.limits.poll)
        raise Ambiguous(
            f"{why}; no machine with the name {self.state.run} has appeared. Look again with `ls`: if it is there, "
            "`terminate` removes it"
        )

    def take(self, machine: Machine) -> None:
        """A machine is there: its id comes first of all."""
        facts = {"id": machine.id, "name": machine.name, "usd_per_hour": machine.usd_per_hour, **machine.facts}
        self.state.resource = {**facts, "is_paid": self.provider.is_paid}
        self.state.verdicts["resource"] = "running"
        self.file.move("booting", id=machine.id, usd_per_hour=machine.usd_per_hour)

    def look(self) -> Machine:
        """The machine now; what is new about it goes into the state."""
        machine = self.provider.look(self.id)
        known = self.state.resource
        known.update({name: value for name, value in machine.facts.items() if value is not None})
        if machine.usd_per_hour:
            known["usd_per_hour"] = machine.usd_per_hour
        known["status"] = machine.said
        return machine

    def is_gone(self, machine: Machine) -> bool:
        """Whether the machine is surely gone: neither found nor listed, at a second look too."""
        if machine.status != GONE or self.provider.is_gone(self.id) is None:
            return False
        self.interrupts.sleep(self.job.limits.poll)
        return self.provider.is_gone(self.id) is not None

    def reach(self, machine: Machine) -> None:
        """Connects; raises NotReady or ConnectionLost while that is not possible."""
        session, work, facts = self.provider.connect(machine, self.file.folder, self.job.limits.silence)
        session = session._replace(look=self.interrupts.look)
        try:
            session.run("true", timeout_s=max(5.0, self.job.limits.silence))
        except CommandFailed as error:
            raise NotReady(str(error)) from error
        self.state.resource.update(facts)
        self.connection = Target(session, work)

    def target(self) -> Target:
        """The connection, made again where there is none."""
        deadline = time.monotonic() + self.job.limits.reconnect
        while self.connection is None:
            try:
                self.reach(self.look())
            except (NotReady, ConnectionLost) as error:
                if time.monotonic() > deadline:
                    raise ConnectionLost(f"the machine cannot be reached: {error}") from error
                self.interrupts.sleep(self.job.limits.poll)
        return self.connection

    def patiently(self, action: Callable[[Target], T]) -> T:
        """Does something that may be done twice, over a connection that may break."""
        deadline = time.monotonic() + self.job.limits.reconnect
        while True:
            try:
                return action(self.target())
            except ConnectionLost as error:
                if time.monotonic() > deadline:
                    raise
                self.console.say(f"connection lost ({error}); trying again")
                self.connection = None
                self.interrupts.sleep(self.job.limits.poll)

    def stop(self) -> None:
        """Stops the machine with its disk kept. Raises an error if it goes on running."""
        if self.state.phase != "stopping":
            self.file.move("stopping")
        try:
            self.provider.stop(self.id)
        except RunnerError as error:
            self.file.event("not stopped", error=str(error))
            raise
        self.connection = None
        self.state.verdicts["resource"] = "stopped"
        self.file.move("stopped")
        self.console.say(f"machine {self.id} is stopped; its disk is kept, and may cost something")

    def delete(self) -> None:
        """Deletes the machine, and does not believe that before it was looked for."""
        for attempt in range(DELETE_TRIES):
            try:
                self.provider.delete(self.id)
                break
            except RunnerError as error:
                self.state.message = str(error)
                self.console.warn(f"deleting: {error}")
                if attempt + 1 < DELETE_TRIES:
                    time.sleep(self.job.limits.poll)
        self.verify_deletion()

    def verify_deletion(self) -> None:
        """Gone is what neither a lookup nor a complete listing shows, twice in a row."""
        times = 0
        for _ in range(DELETE_POLLS):
            try:
                proof = self.provider.is_gone(self.id)
            except RunnerError as error:  # a failed listing proves nothing
                proof, self.state.message = None, str(error)
            times = times + 1 if proof else 0
            if proof and times >= VERIFIED_TIMES:
                self.state.deleted = {**proof, "times": times, "utc": utc_now()}
                self.state.verdicts["resource"] = "deleted_verified"
                self.file.move("done", **self.state.deleted)
                self.forget_key()
                self.console.say(f"machine {self.id} is deleted, and that was verified")
                return
            time.sleep(self.pause_s)
        self.state.verdicts["resource"] = "delete_unverified"
        self.file.move("delete_unverified")

    def forget_key(self) -> None:
        """The key of a machine that is gone opens nothing any more."""
        for name in ("id_ed25519", "id_ed25519.pub"):
            (self.file.folder / name).unlink(missing_ok=True)
