"""The state machine: from a plan to a machine that is gone again, with the results here.

planned → creating → booting → ready → uploading → running → finished → collecting → collected → deleting → done

Each method `_<phase>` does what its phase is for and moves on. The state is on disk before and after each action, so
that a command which starts in any phase, after whatever happened, looks at what there is and goes on from there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiment_runner.bundle import Bundle, gather
from experiment_runner.console import Console
from experiment_runner.errors import RunnerError
from experiment_runner.following import follow
from experiment_runner.interrupts import Interrupted, Interrupts
from experiment_runner.job import Job
from experiment_runner.providers.base import BOOTING, FAILED, RUNNING, STOPPED, NotCreated, Provider
from experiment_runner.record import claim_output, keep_record
from experiment_runner.session import CommandFailed, ConnectionLost
from experiment_runner.state import StateFile, utc_now
from experiment_runner.tenancy import SETTLE_POLLS, Tenancy
from experiment_runner.transfer import TransferFailed, pull, salvage, size_of

RESTING = ("stopped", "delete_unverified")
"""Where a run waits for a person."""
BEFORE_THE_JOB = ("planned", "creating", "booting", "ready")
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
        self.file, self.state, self.job = file, file.state, job
        self.provider, self.console, self.interrupts = provider, console, interrupts
        self.machine = Tenancy(file, job, provider, console, interrupts)
        self.secrets = {name: keys[name] for name in job.secret_names if keys.get(name)}
        self.bundle: Bundle | None = None

    # What a person asks for.

    def run(self, until: Collection[str] = ()) -> None:
        """Goes on to the end: until the machine is gone, stopped, or waits for a person; or to one of these phases."""
        with self.acting():
            self.go_on(until)

    def collect(self) -> None:
        """Fetches what there is; the machine stays as it is."""
        with self.acting():
            if self.state.has_ended or self.state.phase == "stopped":
                raise RunnerError(self.why_nothing_to_fetch())
            if self.state.phase in BEFORE_THE_JOB:
                self.go_on(("uploading", "running", "finished"))
            if self.state.verdicts["job"] == "none" or self.state.has_ended:
                raise RunnerError("the job has not begun: there is nothing to fetch")
            said = self.machine.patiently(lambda target: target.status())
            if said["job"] == "running":
                self.fetch_from_running()
                return
            self.note_end(said)
            self.collect_results()
            self.file.move("collected", results=self.state.verdicts["results"])

    def stop(self) -> None:
        """Ends the job, fetches what exists, and stops the machine."""
        with self.acting():
            if not self.state.has_ended and self.state.phase not in RESTING:
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
                self.machine.adopt("the creation was interrupted")
            if not self.machine.id:
                self.file.move("refused", why="terminated before anything was made")
                return
            self.file.move("deleting", why="asked for")
            self.machine.delete()

    # What they share.

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Around everything: believes the provider first, and leaves state and record as they are."""
        try:
            self.reconcile()
            yield
        except Interrupted:
            self.wind_down()
        finally:
            keep_record(self.file)

    def go_on(self, until: Collection[str] = ()) -> None:
        """Phase after phase."""
        while not self.state.has_ended and self.state.phase not in (*RESTING, *until):
            phase = self.state.phase
            try:
                getattr(self, f"_{phase}")()
            except (CommandFailed, ConnectionLost) as error:
                if phase not in ("ready", "uploading"):
                    raise
                self.give_up_booting(str(error))

    def reconcile(self) -> None:
        """Looks at the machine and believes it more than the file. One that was just made may not be listed yet: its
        boot is waited for."""
        phase, verdicts = self.state.phase, self.state.verdicts
        if not self.machine.id or self.state.has_ended or phase == "booting":
            return
        machine = self.machine.look()
        if self.machine.is_gone(machine):
            if phase in ("deleting", "delete_unverified"):
                self.machine.verify_deletion()
            else:
                self.lose()
        elif machine.status == STOPPED and phase not in ("stopped", "starting", "deleting"):
            verdicts["resource"] = "stopped"
            self.file.move("stopped", why="found stopped")
        elif machine.status in (BOOTING, RUNNING) and phase in ("stopped", "stopping"):
            verdicts["resource"] = "running"
            self.file.move("booting", why="found started")

    # The phases, in their order.

    def _planned(self) -> None:
        """Reads all that is sent: what is wrong with it is said before anything is made."""
        self.need_files()
        self.file.move("creating")

    def _creating(self) -> None:
        """Gets a machine, and gives it back if it costs more than is allowed."""
        try:
            self.machine.create()
        except NotCreated as error:
            self.state.message = str(error)
            self.file.move("refused", error=str(error))
            raise
        rate, limits = self.state.usd_per_hour, self.job.limits
        if rate > limits.max_usd_per_hour:
            self.state.message = f"the machine costs {rate:g} USD an hour, and {limits.max_usd_per_hour:g} are allowed"
            self.console.warn(self.state.message)
            self.file.move("deleting", why=self.state.message)
            return
        if rate:
            self.state.deadline_epoch = min(self.state.deadline_epoch, time.time() + limits.max_usd / rate * 3600)
        price = f" at {rate:g} USD an hour" if rate else ""
        self.console.say(f"machine {self.machine.id}{price}; state in {self.file.path}")
        self.interrupts.look()

    def _booting(self) -> None:
        """Waits until commands run on it."""
        deadline = time.monotonic() + self.job.limits.boot
        waits_for, num_looks = "", 0
        while True:
            num_looks += 1
            problem = False
            try:
                machine = self.machine.look()
                if num_looks > SETTLE_POLLS and self.machine.is_gone(machine):
                    self.lose()
                    return
                waiting, problem = f"the machine is {machine.said}", machine.status in (FAILED, STOPPED)
                if problem or num_looks % BOOT_LOG_EVERY == 0:
                    told = self.provider.boot_problem(machine.id)
                    waiting, problem = (f"{waiting}: {told}", True) if told else (waiting, problem)
                if machine.status == RUNNING and not problem:
                    self.machine.reach(machine)
                    self.file.move("ready")
                    return
            except RunnerError as error:  # not ready, or nobody answers: both may pass
                waiting = str(error)
            if waiting != waits_for:
                waits_for = waiting
                self.console.say(f"booting: {waiting}")
            if problem or time.monotonic() > deadline:
                self.give_up_booting(waiting)
                return
            self.interrupts.sleep(self.job.limits.poll)

    def give_up_booting(self, why: str) -> None:
        """A machine that never ran a command has nothing to keep, unless it did before."""
        self.state.message = f"the machine did not become ready: {why}"
        self.console.warn(self.state.message)
        has_data = self.state.verdicts["job"] != "none"
        self.file.move("stopping" if has_data else "deleting", why=self.state.message)

    def _ready(self) -> None:
        """Asks what there is already, and goes on from it."""
        job = self.machine.patiently(lambda target: target.status())["job"]
        if job == "running":
            self.state.verdicts["job"] = "running"
        self.file.move({"none": "uploading", "running": "running"}.get(job, "finished"))

    def _uploading(self) -> None:
        """Sends the supervisor and the files, and begins the job."""
        bundle = self.need_files()
        self.console.say(f"sending {len(bundle.files)} files, {bundle.num_bytes / 1e6:.2f} MB")
        self.machine.patiently(lambda target: target.install())
        self.machine.patiently(lambda target: target.push(bundle))
        self.state.sent = {"sha256": bundle.sha256, "files": bundle.manifest()}
        self.file.save()
        self.machine.patiently(lambda target: target.start(self.spec(target.work), self.secrets))
        self.state.facts["guard"] = self.machine.patiently(lambda target: target.status()).get("guard", "none")
        if self.provider.is_paid and self.state.facts["guard"] == "none":
            self.console.warn("the machine cannot stop itself: nothing protects you if this computer goes away")
        self.state.verdicts["job"] = "running"
        self.file.move("running")

    def spec(self, work: str) -> dict[str, Any]:
        """What the supervisor is told. No secrets."""
        job, limits = self.job.to_json(), self.job.limits
        return {
            "id": self.machine.id,
            "steps": job["steps"],
            "env": {**self.job.env, **self.job.node.environment()},
            "results": f"{work}/job/{self.job.results.path.replace('{id}', self.machine.id)}",
            "exclude": job["results"]["exclude"],
            "live": job["results"]["live"],
            "deadline": self.state.deadline_epoch,
            "stall": limits.stall,
            "kill_grace": limits.kill_grace,
            "collect_grace": limits.collect_grace,
            "guard": self.provider.guard()._asdict(),
        }

    def _running(self) -> None:
        """Shows the log and fetches what grows, until the job has ended. A broken connection is made again for as long
        as the machine is there."""
        broken_since: float | None = None
        output = self.file.output if self.job.results.live else None
        while True:
            size = size_of(self.file.log)
            try:
                follow(self.machine.target(), self.file.log, output, self.console)
                break
            except CommandFailed as error:
                self.console.warn(f"the job cannot be followed: {error}")
                break
            except ConnectionLost as error:
                self.machine.connection, now = None, time.monotonic()
                broken_since = now if broken_since is None or size_of(self.file.log) > size else broken_since
                if not self.is_still_there():
                    return
                is_over = time.time() > self.state.deadline_epoch + DEADLINE_GRACE_S
                if is_over or now - broken_since > self.job.limits.reconnect:
                    self.give_up(f"no connection for {now - broken_since:.0f} s: {error}")
                    return
                self.console.say(f"connection lost ({error}); connecting again")
                self.interrupts.sleep(self.job.limits.poll)
        self.file.move("finished")

    def is_still_there(self) -> bool:
        """Whether the machine runs, as far as one can know. If not, the state moves on."""
        try:
            machine = self.machine.look()
            if self.machine.is_gone(machine):
                self.lose()
                return False
        except RunnerError as error:
            self.console.say(f"the provider cannot be asked: {error}")
            return True
        if machine.status in (STOPPED, FAILED):
            self.give_up(f"the machine is {machine.said}, and not by this runner")
            return False
        return True

    def give_up(self, why: str) -> None:
        """A machine that nobody can reach is stopped: its disk keeps what there is."""
        self.state.message = why
        self.state.verdicts["job"], self.state.verdicts["results"] = "unknown", "failed"
        self.console.warn(f"{why}; the machine is stopped, with its disk kept")
        self.file.move("stopping", why=why)

    def _finished(self) -> None:
        """Writes down how the job ended, before anything is done about it."""
        try:
            said = self.machine.patiently(lambda target: target.status())
        except CommandFailed as error:
            said = {"job": "unknown", "reason": str(error)}
        self.note_end(said)
        self.file.move("collecting", job=self.state.verdicts["job"])

    def note_end(self, said: Mapping[str, Any]) -> None:
        """How the job ended, as the supervisor says."""
        state = self.state
        state.verdicts["job"] = said["job"] if said["job"] in JOB_ENDS else "unknown"
        state.steps, state.facts = said.get("steps", []), {key: said[key] for key in ("gpus", "guard") if key in said}
        state.message = said.get("reason") or state.message
        self.console.say(f"the job {state.verdicts['job']}" + (f": {said['reason']}" if said.get("reason") else ""))

    def _collecting(self) -> None:
        """Fetches and verifies the results."""
        try:
            self.collect_results()
        except (RunnerError, OSError) as error:
            self.state.verdicts["results"], self.state.message = "failed", str(error)
            self.file.move("collect_failed", error=str(error))
            return
        self.file.move("collected", results=self.state.verdicts["results"])

    def collect_results(self) -> None:
        """The log's rest, then every result. The verdict says what is here."""
        state, output = self.state, self.file.output
        claim_output(self.file)
        is_at_work = state.verdicts["job"] == "running"
        self.machine.patiently(lambda target: follow(target, self.file.log, None, None, only_now=is_at_work))
        pulled = self.machine.patiently(
            lambda target: pull(
                target, output, self.job.results, self.job.limits.poll,
                lambda done, total: self.console.progress("results", done, total),
            )
        )  # fmt: skip
        state.results = {**pulled.describe(), "utc": utc_now()}
        is_whole = not pulled.missing or state.verdicts["job"] != "succeeded"
        state.verdicts["results"] = "verified" if is_whole else "partial"
        if not is_whole:
            state.message = f"the job succeeded, and made no {', '.join(pulled.missing)}"
        num_mb = state.results["bytes"] / 1e6
        self.console.say(f"results: {len(pulled.files)} files, {num_mb:.2f} MB, verified, in {output}")
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
        is_wanted_gone = job == "succeeded" or (job == "failed" and self.job.on_failure == "delete")
        self.file.move("deleting" if results == "verified" and is_wanted_gone else "stopping")

    def _collect_failed(self) -> None:
        self.console.warn(f"{self.state.message}; the machine is stopped, with its disk kept")
        self.file.move("stopping")

    def _stopping(self) -> None:
        self.machine.stop()

    def _starting(self) -> None:
        try:
            self.provider.start(self.machine.id)
        except RunnerError:
            self.file.move("stopped", why="it could not be started")
            raise
        self.state.verdicts["resource"] = "running"
        self.file.move("booting")

    def _deleting(self) -> None:
        self.machine.delete()

    # What happens besides.

    def wind_down(self) -> None:
        """After Ctrl-C: ends the job, fetches what exists, stops the machine; from the second on, only the last."""
        state = self.state
        if state.phase == "deleting":  # the shortest way out
            self.machine.delete()
            return
        if not self.machine.id:
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
                state.verdicts["results"], state.message = "failed", str(error)
        while not state.has_ended and state.phase not in RESTING:
            with contextlib.suppress(Interrupted):
                self.machine.stop()

    def end_job(self) -> None:
        """Asks the job to end, and waits for it."""
        self.machine.patiently(lambda target: target.cancel())
        deadline = time.monotonic() + self.job.limits.kill_grace + END_GRACE_S
        while time.monotonic() < deadline:
            said = self.machine.patiently(lambda target: target.status())
            if said["job"] != "running":
                self.note_end(said)
                self.file.save()
                return
            self.interrupts.sleep(min(1.0, self.job.limits.poll))
        raise RunnerError("the job does not end")

    def lose(self) -> None:
        """The machine is gone by somebody else's hand: what was fetched while it ran is all there is."""
        state = self.state
        if state.verdicts["results"] != "verified":
            claim_output(self.file)
            saved = salvage(self.file.output)
            state.verdicts["results"] = "partial" if saved else "none"
            state.results = {"num_files": len(saved), "files": saved, "skipped": {}, "missing": [], "is_salvaged": True}
        if state.verdicts["job"] == "running":
            state.verdicts["job"] = "unknown"
        state.verdicts["resource"] = "gone_externally"
        state.message = f"the machine {self.machine.id} is gone, and not by this runner"
        self.console.warn(state.message)
        self.file.move("lost")
        self.machine.forget_key()

    def need_files(self) -> Bundle:
        """The files, read once."""
        if self.bundle is None:
            self.bundle = gather(self.job.files, Path(self.state.base), self.file.secrets)
        return self.bundle
