"""A host that is there already: another machine over SSH, or this one. A machine of a run is then a folder on it, which
is made for its owner alone, and removed at the end."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment_runner.errors import InputError
from experiment_runner.job import Job, Problems, settings_for
from experiment_runner.providers.base import GONE, RUNNING, STOPPED, Ambiguous, Guard, Machine, NotCreated, Plan
from experiment_runner.session import (
    CommandFailed,
    ConnectionLost,
    Session,
    common_options,
    local_session,
    ssh_session,
)  # fmt: skip
from experiment_runner.state import created_and_deadline

ENDED = ".ended"
"""A file in a folder whose job was ended for good: the folder is then a stopped machine."""


@dataclass(frozen=True)
class SshSettings:
    """A machine of one's own."""

    host: str
    """A name from one's SSH configuration, or user@address. Its host key must be known: connect once by hand."""
    work: str = ".experiment-runner"
    """The folder for the runs there; relative to the home."""
    python: str = "python3"
    ssh_config: str = ""
    """Another configuration file for ssh."""

    def problems(self) -> Problems:
        if not self.host or self.host.startswith("-"):
            yield "host", f"must be the name of a host, got {self.host!r}"


@dataclass(frozen=True)
class LocalSettings:
    """This machine."""

    work: str = ".runpod/local"
    """The folder for the runs; relative to the current folder."""
    python: str = "python3"


class Host:
    """Folders on a host, for one job."""

    is_paid = False

    def __init__(self, session: Session, work: str, described: str) -> None:
        self.session, self.work, self.described = session, work, described

    def need(self) -> None:
        """Whether the host is there shows when the folder is made."""

    def plan(self) -> Plan:
        request = {"folder": f"{self.work}/exp-…", "on": self.described}
        return Plan([], request, [f"runs on {self.described}, which costs nothing that the runner knows of"])

    def folder(self, name: str) -> str:
        return shlex.quote(f"{self.work}/{name}")

    def create(self, name: str, folder: Path) -> Machine:
        work, place = shlex.quote(self.work), self.folder(name)
        try:
            path = self.session.run(f"umask 077 && mkdir -p {work} && mkdir {place} && cd {place} && pwd -P")
        except CommandFailed as error:
            raise NotCreated(f"{self.described}: {error}") from error
        except ConnectionLost as error:
            if self.is_reachable():
                raise Ambiguous(f"{self.described}: {error}") from error
            raise NotCreated(f"{self.described}: {error}") from error
        return Machine(name, name, RUNNING, "made", facts={"folder": path.decode().strip(), "host": self.described})

    def is_reachable(self) -> bool:
        try:
            self.session.run("true")
        except ConnectionLost:
            return False
        return True

    def find(self, name: str) -> list[Machine]:
        return [machine for machine in self.owned() if machine.name == name]

    def owned(self) -> list[Machine]:
        listing = self.session.run(f"ls -1 {shlex.quote(self.work)} 2>/dev/null || true").decode("utf-8", "replace")
        names = [name for name in listing.splitlines() if created_and_deadline(name)]
        return [self.look(name) for name in names]

    def look(self, machine_id: str) -> Machine:
        place = self.folder(machine_id)
        question = f"cd {place} 2>/dev/null && pwd -P && if [ -e {ENDED} ]; then echo ended; fi || true"
        answer = self.session.run(question).decode("utf-8", "replace").splitlines()
        if not answer:
            return Machine(machine_id, machine_id, GONE, "not found")
        status = STOPPED if answer[-1] == "ended" else RUNNING
        return Machine(machine_id, machine_id, status, status, facts={"folder": answer[0], "host": self.described})

    def address(self) -> str:
        """Where other machines may reach it: its HostName in the SSH configuration, which asks nobody."""
        if not self.session.is_remote:
            return "127.0.0.1"
        client, *words = self.session.prefix
        described = self.session._replace(prefix=(client, "-G", *words), is_remote=False).run("")
        settings = dict(line.split(" ", 1) for line in described.decode("utf-8", "replace").splitlines() if " " in line)
        return settings["hostname"]

    def boot_problem(self, machine_id: str) -> str:
        return ""

    def connect(self, machine: Machine, folder: Path, silence_s: float) -> tuple[Session, str, dict[str, Any]]:
        how = "in the user's known_hosts" if self.session.is_remote else "this machine"
        return self.session, str(machine.facts["folder"]), {"host_key": how}

    def guard(self) -> Guard:
        return Guard()

    def stop(self, machine_id: str) -> None:
        """Ends whatever of the job still runs there, the supervisor too."""
        place = self.folder(machine_id)
        agent = f"{shlex.quote(self.session.python)} control/agent.pyz end"
        self.session.run(f"cd {place} 2>/dev/null || exit 0; touch {ENDED}; [ ! -f control/agent.pyz ] || {agent}")

    def start(self, machine_id: str) -> None:
        self.session.run(f"rm -f {self.folder(machine_id)}/{ENDED}")

    def delete(self, machine_id: str) -> None:
        self.stop(machine_id)
        self.session.run(f"rm -rf {self.folder(machine_id)}", timeout_s=600.0)

    def is_gone(self, machine_id: str) -> dict[str, Any] | None:
        if self.look(machine_id).status != GONE or self.find(machine_id):
            return None
        return {"lookup": "not found", "listed": False}

    def console_url(self, machine_id: str) -> str:
        return ""

    def bill(self, machine_id: str) -> dict[str, Any] | None:
        return None


def ssh_host(job: Job, label: str) -> Host:
    """The host that a job's settings name, over SSH with the user's own configuration."""
    settings: SshSettings = settings_for(SshSettings, job, label)
    options = common_options(job.limits.silence, settings.ssh_config)
    session = ssh_session(settings.host, settings.python, (*options, "-o", "StrictHostKeyChecking=yes"))
    return Host(session, settings.work, settings.host)


def local_host(job: Job, label: str) -> Host:
    """This machine."""
    settings: LocalSettings = settings_for(LocalSettings, job, label)
    if settings.work.startswith("-"):
        raise InputError(f"{label}: settings.work: must be a folder, got {settings.work!r}")
    return Host(local_session(settings.python), settings.work, "this machine")
