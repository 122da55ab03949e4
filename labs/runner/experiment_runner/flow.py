"""The state machine: from a plan to a machine that is gone again, with the results here.

planned → creating → booting → ready → uploading → running → finished → collecting → collected → deleting → done

Each method `_<phase>` does what its phase is for and moves on. The state is on disk before and after each action, so
that a command which starts in any phase, after whatever happened, looks at what there is and goes on from there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from experiment_runner.bundle import Bundle, gather
from experiment_runner.console import Console
from experiment_runner.errors import RunnerError
from experiment_runner.following import follow
from experiment_runner.interrupts import Interrupted, Interrupts
from experiment_runner.job import Job
from experiment_runner.providers.base import (
    BOOTING,
    FAILED,
    GONE,
    RUNNING,
    STOPPED,
    Ambiguous,
    Machine,
    NotCreated,
    NotReady,
    Provider,
)  # fmt: skip
from experiment_runner.record import estimated_cost, write_record
from experiment_runner.session import CommandFailed, ConnectionLost
from experiment_runner.state import State, StateFile, utc_now
from experiment_runner.target import Target
from experiment_runner.transfer import TransferFailed, pull, salvage, size_of

T = TypeVar("T")
RESTING = ("stopped", "delete_unverified")
"""Where a run waits for a person."""
BEFORE_THE_JOB = ("planned", "creating", "booting", "ready")
SETTLE_POLLS = 6
"""So many looks until a machine that was just made must be in the listing, and one that was deleted out of it."""
DELETE_POLLS = 24
DELETE_TRIES = 3
VERIFIED_TIMES = 2
BOOT_LOG_EVERY = 4
END_GRACE_S = 20.0
DEADLINE_GRACE_S = 60.0
"""The target ends a job at its deadline; the runner, that long after it."""
JOB_ENDS = ("succeeded", "failed", "timeout", "cancelled")


class Flow:
    """One run, driven from wherever it is."""

    def __init__(
        self, file: StateFile, job: Job, provider: Provider, keys: Mapping[str, str], console: Console,
        interrupts: Interrupts,
    ) -> None:  # fmt: skip
        self.file, self.job, self.provider, self.console, self.interrupts = file, job, provider, console, interrupts
        self.secrets = {name: keys[name] for name in job.secret_names if keys.get(name)}
        self.target: Target | None = None
        self.bundle: Bundle | None = None

    @property
    def state(self) -> State:
        return self.file.state

    @property
    def machine_id(self) -> str:
        return str(self.state.resource.get("id", ""))

    # What drives it.

    def run(self, until: Collection[str] = ()) -> None:
        """Goes on to the end: until the machine is gone, stopped, or waits for a person; or to one of these phases."""
        with self.acting():
            self.go_on(until)

    def go_on(self, until: Collection[str] = ()) -> None:
        """Phase after phase."""
        while not self.state.has_ended and self.state.phase not in (*RESTING, *until):
            getattr(self, f"_{self.state.phase}")()

    def collect(self) -> None:
        """Fetches what there is; the machine stays as it is."""
        with self.acting():
            state = self.state
            if state.has_ended or state.phase == "stopped":
                raise RunnerError(self.why_nothing_to_fetch())
            if state.phase in BEFORE_THE_JOB:
                self.go_on(("uploading", "running", "finished"))
            if state.phase in ("uploading", *BEFORE_THE_JOB):
                raise RunnerError("the job has not begun: there is nothing to fetch")
            said = self.patiently(lambda: self.need_target().status())
            if said["job"] == "running":
                self.fetch_from_running()
                return
            self.note_end(said)
            self.collect_results()
            self.file.move("collected", results=state.verdicts["results"])

    def stop(self) -> None:
        """Ends the job, fetches what exists, and stops the machine."""
        with self.acting():
            if self.state.has_ended or self.state.phase in RESTING:
                return
            self.wind_down()

    def start(self) -> None:
        """Starts a stopped machine again, and waits until commands run on it."""
        with self.acting():
            if self.state.phase == "stopped":
                self.file.move("starting")
            self.go_on(("ready", "uploading", "running", "finished", "collecting", "collected"))

    def terminate(self) -> None:
        """Deletes the machine, whatever is on it."""
        with self.acting():
            if self.state.has_ended:
                return
            if self.state.phase == "creating":
                self.adopt("the creation was interrupted")
            if not self.machine_id:
                self.file.move("refused", why="terminated before anything was made")
                return
            self.file.move("deleting", why="asked for")
            self._deleting()

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Around everything: believes the provider first, and leaves state and record as they are."""
        try:
            self.reconcile()
            yield
        except Interrupted:
            self.wind_down()
        finally:
            self.close()

    def close(self) -> None:
        """Leaves state and record as they are now."""
        self.state.cost = estimated_cost(self.state)
        self.file.save()
        if self.file.output.is_dir():
            write_record(self.file)

    def reconcile(self) -> None:
        """Looks at the machine and believes it more than the file."""
        if not self.machine_id or self.state.has_ended or self.state.phase == "creating":
            return
        machine = self.look()
        if machine.status == GONE and self.is_gone():
            if self.state.phase in ("deleting", "delete_unverified"):
                self.verify_deletion()
            else:
                self.lose()
        elif machine.status == STOPPED and self.state.phase not in ("stopped", "starting", "deleting"):
            self.state.verdicts["resource"] = "stopped"
            self.file.move("stopped", why="found stopped")
        elif machine.status in (BOOTING, RUNNING) and self.state.phase in ("stopped", "stopping"):
            self.state.verdicts["resource"] = "running"
            self.file.move("booting", why="found started")

    # The phases, in their order.

    def _planned(self) -> None:
        self.need_files()
        self.file.move("creating")

    def _creating(self) -> None:
        """Makes the machine. The third Ctrl-C waits too, until its id is on disk."""
        state = self.state
        if state.verdicts["resource"] == "maybe":
            self.adopt("the creation was interrupted")
            return
        state.verdicts["resource"] = "maybe"
        self.file.save()
        self.interrupts.is_held = True
        try:
            self.take(self.provider.create(state.run, self.file.folder))
        except NotCreated as error:
            state.verdicts["resource"], state.message = "none", str(error)
            self.file.move("refused", error=str(error))
            raise
        except Ambiguous as error:
            self.adopt(str(error))
        finally:
            self.interrupts.is_held = False
        self.interrupts.look()

    def adopt(self, why: str) -> None:
        """Nobody knows whether a machine was made: looks for it by its name, and never makes a second one."""
        self.console.say(f"{why}; looking whether {self.state.run} exists")
        for _ in range(SETTLE_POLLS):
            found = self.provider.find(self.state.run)
            if found:
                self.take(found[0])
                return
            self.interrupts.sleep(self.job.limits.poll)
        self.state.message = f"{why}; no machine with the name {self.state.run} has appeared"
        self.file.event("not found", message=self.state.message)
        raise Ambiguous(f"{self.state.message}; look again with `ls`: if it is there, `terminate` removes it")

    def take(self, machine: Machine) -> None:
        """A machine is there: its id comes first of all."""
        state = self.state
        state.verdicts["resource"] = "running"
        state.resource = {"id": machine.id, "name": machine.name, "usd_per_hour": machine.usd_per_hour, **machine.facts}
        state.resource["is_paid"] = self.provider.is_paid
        self.file.move("booting", id=machine.id, usd_per_hour=machine.usd_per_hour)
        if machine.usd_per_hour > self.job.limits.max_usd_per_hour:
            state.message = (
                f"the machine costs {machine.usd_per_hour:g} USD an hour, and {self.job.limits.max_usd_per_hour:g} are "
                "allowed"
            )
            self.file.move("deleting", why=state.message)
            return
        if machine.usd_per_hour:
            paid_for = time.time() + self.job.limits.max_usd / machine.usd_per_hour * 3600
            state.deadline_epoch = min(state.deadline_epoch, paid_for)
        rate = f" at {machine.usd_per_hour:g} USD an hour" if machine.usd_per_hour else ""
        self.console.say(f"machine {machine.id}{rate}; state in {self.file.path}")

    def _booting(self) -> None:
        """Waits until commands run on it."""
        deadline = time.monotonic() + self.job.limits.boot
        waits_for, num_looks = "", 0
        while True:
            machine = self.look()
            problem = machine.said if machine.status == FAILED else ""
            if machine.status == GONE and num_looks > SETTLE_POLLS and self.is_gone():
                self.lose()
                return
            if machine.status == STOPPED:
                problem = "it stopped by itself"
            if num_looks % BOOT_LOG_EVERY == BOOT_LOG_EVERY - 1:
                problem = problem or self.provider.boot_problem(machine.id)
            try:
                if problem:
                    problem = self.provider.boot_problem(machine.id) or problem
                    raise NotReady(problem)
                if machine.status == RUNNING:
                    self.connect(machine)
                    self.file.move("ready")
                    return
                waiting = f"the machine is {machine.said}"
            except (NotReady, ConnectionLost) as error:
                waiting = str(error)
            if waiting != waits_for:
                waits_for = waiting
                self.console.say(f"booting: {waiting}")
            if problem or time.monotonic() > deadline:
                self.give_up_booting(waits_for)
                return
            num_looks += 1
            self.interrupts.sleep(self.job.limits.poll)

    def give_up_booting(self, why: str) -> None:
        """A machine that never ran a command has nothing to keep, unless it did before."""
        self.state.message = f"the machine was not ready after {self.job.limits.boot:g} s: {why}"
        self.console.warn(self.state.message)
        has_data = self.state.verdicts["job"] != "none"
        self.file.move("stopping" if has_data else "deleting", why=self.state.message)

    def _ready(self) -> None:
        """Asks what there is already, and goes on from it."""
        job = self.patiently(lambda: self.need_target().status())["job"]
        if job == "none":
            self.file.move("uploading")
        elif job == "running":
            self.state.verdicts["job"] = "running"
            self.file.move("running")
        else:
            self.file.move("finished")

    def _uploading(self) -> None:
        """Sends the supervisor and the files, and begins the job."""
        bundle, target = self.need_files(), self.need_target()
        self.console.say(f"sending {len(bundle.files)} files, {bundle.num_bytes / 1e6:.2f} MB")
        self.patiently(target.install)
        self.patiently(lambda: target.push(bundle))
        self.state.sent = {"sha256": bundle.sha256, "files": bundle.manifest()}
        self.file.save()
        self.patiently(lambda: target.start(self.spec(), self.secrets))
        self.state.verdicts["job"] = "running"
        self.file.move("running")

    def spec(self) -> dict[str, Any]:
        """What the supervisor is told. No secrets."""
        job, work = self.job.to_json(), self.need_target().work
        machine = Machine(self.machine_id, self.state.run, RUNNING, "")
        return {
            "id": self.machine_id,
            "steps": job["steps"],
            "env": job["env"],
            "results": f"{work}/job/{self.job.results.path.replace('{id}', self.machine_id)}",
            "exclude": job["results"]["exclude"],
            "live": job["results"]["live"],
            "deadline": self.state.deadline_epoch,
            "stall": self.job.limits.stall,
            "kill_grace": self.job.limits.kill_grace,
            "collect_grace": self.job.limits.collect_grace,
            "guard": self.provider.guard(machine),
        }

    def _running(self) -> None:
        """Shows the log and fetches what grows, until the job has ended. A broken connection is made again for as long
        as the machine is there."""
        broken_since: float | None = None
        output = self.file.output if self.job.results.live else None
        while True:
            size = size_of(self.file.log)
            try:
                follow(self.need_target(), self.file.log, output, self.console)
                break
            except CommandFailed as error:
                self.console.warn(f"the job cannot be followed: {error}")
                break
            except ConnectionLost as error:
                self.target, now = None, time.monotonic()
                broken_since = now if broken_since is None or size_of(self.file.log) > size else broken_since
                if not self.is_still_there():
                    return
                is_over = time.time() > self.state.deadline_epoch + DEADLINE_GRACE_S
                if is_over or now - broken_since > self.job.limits.reconnect:
                    self.give_up_connecting(str(error))
                    return
                self.console.say(f"connection lost ({error}); connecting again")
                self.interrupts.sleep(self.job.limits.poll)
        self.file.move("finished")

    def is_still_there(self) -> bool:
        """Whether the machine runs, as far as one can know. If not, the state moves on."""
        try:
            machine = self.look()
            if machine.status == GONE and self.is_gone():
                self.lose()
                return False
        except RunnerError as error:
            self.console.say(f"the provider cannot be asked: {error}")
            return True
        if machine.status in (STOPPED, FAILED):
            self.state.message = f"the machine is {machine.said}, and not by this runner"
            self.state.verdicts["job"], self.state.verdicts["results"] = "unknown", "failed"
            self.file.move("stopping", why=self.state.message)
            return False
        return True

    def give_up_connecting(self, why: str) -> None:
        """A machine that nobody can reach is stopped: its disk keeps what there is."""
        self.state.message = f"no connection for {self.job.limits.reconnect:g} s: {why}"
        self.state.verdicts["job"], self.state.verdicts["results"] = "unknown", "failed"
        self.console.warn(f"{self.state.message}; the machine is stopped, with its disk kept")
        self.file.move("stopping", why=self.state.message)

    def _finished(self) -> None:
        """Writes down how the job ended, before anything is done about it."""
        try:
            said = self.patiently(lambda: self.need_target().status())
        except CommandFailed as error:
            said = {"job": "unknown", "reason": str(error)}
        self.note_end(said)
        self.file.move("collecting", job=self.state.verdicts["job"])

    def note_end(self, said: Mapping[str, Any]) -> None:
        """How the job ended, as the supervisor says."""
        state = self.state
        state.verdicts["job"] = said["job"] if said["job"] in JOB_ENDS else "unknown"
        state.steps, state.facts = said.get("steps", []), {"gpus": said.get("gpus", [])}
        state.message = said.get("reason") or state.message
        self.console.say(f"the job {state.verdicts['job']}" + (f": {said['reason']}" if said.get("reason") else ""))

    def _collecting(self) -> None:
        """Fetches and verifies the results."""
        state = self.state
        try:
            self.collect_results()
        except (TransferFailed, ConnectionLost, CommandFailed) as error:
            state.verdicts["results"], state.message = "failed", str(error)
            self.file.move("collect_failed", error=str(error))
            return
        self.file.move("collected", results=state.verdicts["results"])

    def collect_results(self) -> None:
        """The log's rest, then every result. The verdict says what is here."""
        target, state = self.need_target(), self.state
        self.patiently(lambda: follow(target, self.file.log, None, None))
        show = lambda done, total: self.console.progress("results", done, total)  # noqa: E731
        pulled = pull(target, self.file.output, self.job.results, self.job.limits.poll, show)
        state.results = {**pulled.describe(), "utc": utc_now()}
        is_whole = not pulled.missing or state.verdicts["job"] != "succeeded"
        state.verdicts["results"] = "verified" if is_whole else "partial"
        if not is_whole:
            state.message = f"the job made no {', '.join(pulled.missing)}"
        described = state.results
        self.console.say(
            f"results: {described['num_files']} files, {described['bytes'] / 1e6:.2f} MB, verified, in {self.file.output}"
        )
        for path, reason in list(pulled.skipped.items())[:5]:
            self.console.say(f"not fetched: {path}: {reason}")

    def fetch_from_running(self) -> None:
        """What exists while the job still writes: files that change meanwhile are left out, and named."""
        self.console.say("the job still runs: this is what exists now")
        try:
            self.collect_results()
        except TransferFailed as error:
            self.state.message = str(error)
        self.state.verdicts["results"] = "partial"
        self.file.move("running")

    def why_nothing_to_fetch(self) -> str:
        """Why `collect` cannot."""
        if self.state.phase == "stopped":
            return f"the machine is stopped: start it first, with `start {self.file.path}`"
        where = f"; what was fetched is in {self.file.output}" if self.file.output.is_dir() else ""
        return f"the machine is gone ({self.state.phase}){where}"

    def _collected(self) -> None:
        """Decides about the machine: nothing is removed whose results are not here."""
        job, results = self.state.verdicts["job"], self.state.verdicts["results"]
        may_delete = results == "verified" and (
            job == "succeeded" or (job == "failed" and self.job.on_failure == "delete")
        )
        self.file.move("deleting" if may_delete else "stopping")

    def _collect_failed(self) -> None:
        self.console.warn(f"{self.state.message}; the machine is stopped, with its disk kept")
        self.file.move("stopping")

    def _stopping(self) -> None:
        self.stop_machine()

    def _starting(self) -> None:
        self.provider.start(self.machine_id)
        self.state.verdicts["resource"] = "running"
        self.file.move("booting")

    def _deleting(self) -> None:
        """Deletes it, and does not believe that before it was looked for."""
        for attempt in range(DELETE_TRIES):
            try:
                self.provider.delete(self.machine_id)
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
                proof = self.provider.is_gone(self.machine_id)
            except RunnerError as error:  # a failed listing proves nothing
                proof, self.state.message = None, str(error)
            times = times + 1 if proof else 0
            if proof and times >= VERIFIED_TIMES:
                self.state.deleted = {**proof, "times": times, "utc": utc_now()}
                self.state.verdicts["resource"] = "deleted_verified"
                self.file.move("done", **self.state.deleted)
                self.forget_key()
                self.console.say(f"machine {self.machine_id} is deleted, and that was verified")
                return
            time.sleep(min(self.job.limits.poll, 5.0))
        self.state.verdicts["resource"] = "delete_unverified"
        self.file.move("delete_unverified")

    def forget_key(self) -> None:
        """The key of a machine that is gone opens nothing any more."""
        for name in ("id_ed25519", "id_ed25519.pub"):
            (self.file.folder / name).unlink(missing_ok=True)

    # What happens besides.

    def stop_machine(self) -> None:
        """Stops the machine with its disk kept, and says so."""
        if self.state.phase != "stopping":
            self.file.move("stopping")
        try:
            self.provider.stop(self.machine_id)
        except RunnerError as error:
            self.state.verdicts["resource"], self.state.message = "running", str(error)
            self.file.event("not stopped", error=str(error))
            raise
        self.state.verdicts["resource"] = "stopped"
        self.file.move("stopped")
        self.console.say(f"machine {self.machine_id} is stopped; its disk is kept, and may cost something")

    def wind_down(self) -> None:
        """After Ctrl-C: ends the job, fetches what exists, stops the machine; from the second on, only the last."""
        state = self.state
        if state.phase == "deleting":
            self._deleting()
            return
        if not self.machine_id:
            if state.verdicts["resource"] == "none":
                state.message = "interrupted before anything was made"
                self.file.move("refused", why=state.message)
            return
        if self.interrupts.count < 2 and state.phase in ("running", "finished", "collecting"):
            try:
                self.end_job()
                self.collect_results()
            except Interrupted:
                pass
            except RunnerError as error:
                state.verdicts["results"] = "partial" if state.results else "failed"
                state.message = str(error)
        if state.phase in RESTING:
            return
        while True:
            try:
                self.stop_machine()
                return
            except Interrupted:
                continue

    def end_job(self) -> None:
        """Asks the job to end, and waits for it."""
        target = self.need_target()
        self.patiently(target.cancel)
        deadline = time.monotonic() + self.job.limits.kill_grace + END_GRACE_S
        while time.monotonic() < deadline:
            said = self.patiently(target.status)
            if said["job"] != "running":
                self.state.verdicts["job"], self.state.steps = said["job"], said.get("steps", [])
                self.file.save()
                return
            self.interrupts.sleep(min(1.0, self.job.limits.poll))
        raise RunnerError("the job does not end")

    def lose(self) -> None:
        """The machine is gone by somebody else's hand: what was fetched while it ran is all there is."""
        state = self.state
        saved = salvage(self.file.output)
        if state.verdicts["results"] != "verified":
            state.verdicts["results"] = "partial" if saved else "none"
            state.results = {
                "files": saved,
                "skipped": {},
                "missing": list(self.job.results.required),
                "is_verified": False,
            }
        if state.verdicts["job"] == "running":
            state.verdicts["job"] = "unknown"
        state.verdicts["resource"] = "gone_externally"
        state.message = f"the machine {self.machine_id} is gone, and not by this runner"
        self.file.move("lost")
        self.forget_key()

    def is_gone(self) -> bool:
        """Whether the machine is surely gone, after a second look."""
        if self.provider.is_gone(self.machine_id) is None:
            return False
        self.interrupts.sleep(self.job.limits.poll)
        return self.provider.is_gone(self.machine_id) is not None

    def look(self) -> Machine:
        """The machine now; what is new about it goes into the state."""
        machine = self.provider.look(self.machine_id)
        known = self.state.resource
        known.update({name: value for name, value in machine.facts.items() if value is not None})
        if machine.usd_per_hour:
            known["usd_per_hour"] = machine.usd_per_hour
        known["status"] = machine.said
        return machine

    def connect(self, machine: Machine) -> None:
        """Reaches the machine; raises NotReady or ConnectionLost while that is not possible."""
        session, work, facts = self.provider.connect(machine, self.file.folder, self.job.limits.silence)
        session = session._replace(look=self.interrupts.look)
        try:
            session.run("true", timeout_s=max(5.0, self.job.limits.silence))
        except CommandFailed as error:
            raise NotReady(str(error)) from error
        self.state.resource.update(facts)
        self.target = Target(session, work)

    def need_target(self) -> Target:
        """The connection, made again where there is none."""
        if self.target is None:
            deadline = time.monotonic() + self.job.limits.reconnect
            while self.target is None:
                try:
                    self.connect(self.look())
                except (NotReady, ConnectionLost) as error:
                    if time.monotonic() > deadline:
                        raise ConnectionLost(f"the machine cannot be reached: {error}") from error
                    self.interrupts.sleep(self.job.limits.poll)
        assert self.target is not None
        return self.target

    def need_files(self) -> Bundle:
        """The files, read once; refused before anything is made if something is wrong with them."""
        if self.bundle is None:
            self.bundle = gather(self.job.files, Path(self.state.base), self.file.secrets)
        return self.bundle

    def patiently(self, action: Callable[[], T]) -> T:
        """Does something that may be done twice, over a connection that may break."""
        deadline = time.monotonic() + self.job.limits.reconnect
        while True:
            try:
                return action()
            except ConnectionLost as error:
                if time.monotonic() > deadline:
                    raise
                self.console.say(f"connection lost ({error}); trying again")
                self.target = None
                self.interrupts.sleep(self.job.limits.poll)
