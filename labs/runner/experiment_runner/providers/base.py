"""What the flow knows of a provider: a way to get a machine, to look at it, to reach it, to stop it and to remove it.
Everything that is particular to one stands in its module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from experiment_runner.errors import RunnerError
from experiment_runner.session import Session

BOOTING, RUNNING, STOPPED, FAILED, GONE, UNKNOWN = "booting", "running", "stopped", "failed", "gone", "unknown"


class NotCreated(RunnerError):
    """No machine was made; it says why."""

    exit_code = 50


class NoCapacity(NotCreated):
    """There is no machine of the kind that was asked for, or none at a price that is allowed."""

    exit_code = 40


class Ambiguous(RunnerError):
    """A machine may have been made: nobody knows. Look for it by its name."""

    exit_code = 30


class ProviderFailed(RunnerError):
    """The provider did not do what was asked; the machine is as it was, or in between."""

    exit_code = 30


class NotReady(RunnerError):
    """Nothing runs commands there yet; it says what is waited for."""


class Candidate(NamedTuple):
    """A kind of machine that would be taken."""

    name: str
    usd_per_hour: float | None
    """None: not known."""
    is_available: bool | None


class Plan(NamedTuple):
    """What would be asked for. Made without side effects."""

    candidates: list[Candidate]
    request: dict[str, Any]
    """What would be sent to the provider, without secrets."""
    notes: list[str]
    """What one should know before it."""


class Guard(NamedTuple):
    """A program for the target, and its argument; with `check` after it, it says whether it could do it."""

    program: str = ""
    argument: str = ""


class Machine(NamedTuple):
    """A machine as the provider describes it now."""

    id: str
    name: str
    status: str
    """`booting`, `running`, `stopped`, `failed`, `gone` or `unknown`."""
    said: str
    """The provider's own word for it."""
    usd_per_hour: float = 0.0
    facts: Mapping[str, Any] = {}
    """What goes into the record: the GPU, the data centre, the address."""


class Provider(Protocol):
    """One provider, for one job. Errors are RunnerErrors; a NotCreated means that nothing was made."""

    is_paid: bool
    """Whether a machine that is there costs money."""

    def need(self) -> None:
        """Raises InputError if something is missing without which nothing can be made."""

    def plan(self) -> Plan:
        """What would be asked for, with prices where they can be known."""

    def create(self, name: str, folder: Path) -> Machine:
        """Makes a machine with a name that nobody else has; `folder` is for keys. Raises NotCreated or Ambiguous."""

    def find(self, name: str) -> list[Machine]:
        """The machines of exactly this name, in a complete listing."""

    def owned(self) -> list[Machine]:
        """Every machine with a name like ours."""

    def look(self, machine_id: str) -> Machine:
        """How it is now; `gone` where the provider knows no such machine."""

    def boot_problem(self, machine_id: str) -> str:
        """What the machine's own messages say about why it will never be ready; empty if nothing."""

    def connect(self, machine: Machine, folder: Path, silence_s: float) -> tuple[Session, str, dict[str, Any]]:
        """A session, the working folder there, and what the record says of the connection. Raises NotReady."""

    def guard(self) -> Guard:
        """How a machine can end itself if nobody comes for its results."""

    def stop(self, machine_id: str) -> None:
        """Stops it, with its disk kept. Returns only when it is stopped, or gone."""

    def start(self, machine_id: str) -> None:
        """Starts a stopped one."""

    def delete(self, machine_id: str) -> None:
        """Asks for its removal. One that is gone already is no error."""

    def is_gone(self, machine_id: str) -> dict[str, Any] | None:
        """The proof that it is gone: neither found by its id nor in a complete listing. None if it is there. Raises an
        error where nobody can tell."""

    def console_url(self, machine_id: str) -> str:
        """Where a person can see to it by hand; empty if nowhere."""

    def bill(self, machine_id: str) -> dict[str, Any] | None:
        """What was really billed; None where nobody bills."""
