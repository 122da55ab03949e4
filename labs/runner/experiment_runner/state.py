"""The state of one run, in a file that every command starts from and that survives whatever happens: written before and
after each action, whole, readable by its owner alone. Beside it is a folder with the log of events, the job's log, the
connection's key and the host's."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import secrets as randomness
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from experiment_runner.durable import json_text, try_lock, write_atomically
from experiment_runner.errors import InputError, RunnerError
from experiment_runner.redaction import Secrets

SCHEMA = 1
PRIVATE = 0o600
NAME_PREFIX = "exp"

PHASES = ("planned", "creating", "booting", "ready", "uploading", "running", "finished", "collecting", "collected",
          "collect_failed", "stopping", "stopped", "starting", "deleting", "delete_unverified", "lost", "refused",
          "done")  # fmt: skip
ENDED = ("done", "lost", "refused")
"""Nothing is left to do: deleted and verified, gone by somebody else's hand, or never created."""


class Verdicts(TypedDict):
    """Three answers that have nothing to do with each other."""

    job: str
    """none, running, succeeded, failed, timeout, cancelled or unknown."""
    results: str
    """none, partial, verified or failed."""
    resource: str
    """none, maybe, running, stopped, deleted_verified, delete_unverified or gone_externally."""


@dataclass
class State:
    """Everything that a command needs to go on. Plain JSON values; no secrets."""

    run: str
    """The run's unique name, which the machine has too: `exp-<job>-<created>-<deadline>-<8 hexadecimal digits>`."""
    job: dict[str, Any]
    base: str
    """The folder that the job's files are relative to."""
    output: str
    """Where the results go; `{id}` stands for the resource's id."""
    computer: str
    """The computer that began the run."""
    deadline_epoch: float
    phase: str = "planned"
    verdicts: Verdicts = field(default_factory=lambda: Verdicts(job="none", results="none", resource="none"))
    message: str = ""
    """Why it is where it is, where something went wrong."""
    resource: dict[str, Any] = field(default_factory=dict)
    """What the provider said of the machine: id, rate, GPU, endpoint, how its host key was learned."""
    sent: dict[str, Any] = field(default_factory=dict)
    """What was sent: one hash over all, and each file's."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    """What came home, and what was left out with its reason."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent in each phase."""
    cost: dict[str, Any] = field(default_factory=dict)
    deleted: dict[str, Any] = field(default_factory=dict)
    """The proof that the machine is gone."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the machine said of itself."""
    entered_epoch: float = field(default_factory=time.time)
    schema: int = SCHEMA

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDED

    @property
    def usd_per_hour(self) -> float:
        return float(self.resource.get("usd_per_hour") or 0.0)


class StateFile:
    """A state and its file."""

    def __init__(self, path: Path, state: State, secrets: Secrets) -> None:
        self.path, self.state, self.secrets = path, state, secrets

    @property
    def folder(self) -> Path:
        """What belongs to the run besides its state."""
        return self.path.with_suffix("")

    @property
    def log(self) -> Path:
        """The job's output, as far as it is here."""
        return self.folder / "log.txt"

    @property
    def output(self) -> Path:
        """Where the results go, once the machine has an id."""
        return Path(self.state.output.replace("{id}", str(self.state.resource.get("id", self.state.run))))

    def save(self) -> None:
        """Makes what the state says now last."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        text = self.secrets.redact(json_text(dataclasses.asdict(self.state)))
        write_atomically(self.path, text.encode("utf-8"), mode=PRIVATE)

    def move(self, phase: str, **facts: Any) -> None:
        """Enters a phase: counts the time of the one before, saves, and adds a line to the events."""
        now, state = time.time(), self.state
        state.seconds[state.phase] = state.seconds.get(state.phase, 0.0) + max(0.0, now - state.entered_epoch)
        before, state.phase, state.entered_epoch = state.phase, phase, now
        self.save()
        self.event("phase", before=before, phase=phase, **facts)

    def event(self, kind: str, **facts: Any) -> None:
        """Adds a line to `events.jsonl`."""
        line = json.dumps({"utc": utc_now(), "event": kind, **facts}, ensure_ascii=False)
        descriptor = os.open(self.folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
        with open(descriptor, "a", encoding="utf-8") as file:
            file.write(self.secrets.redact(line) + "\n")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held by the one command that acts on the run; it ends with the process, however that ends."""
        with open(self.folder / ".lock", "a+", encoding="utf-8") as file:
            if not try_lock(file):
                raise RunnerError(
                    f"{self.path}: another command is at work on this run; wait for it, or end it with Ctrl-C there"
                )
            yield


def new_state(folder: Path, job: dict[str, Any], base: Path, output: str, hours: float, secrets: Secrets) -> StateFile:
    """A state for a new run, not yet saved."""
    now = time.time()
    name = f"{NAME_PREFIX}-{job['name']}-{int(now)}-{int(now + hours * 3600)}-{randomness.token_hex(4)}"
    state = State(name, job, str(base), output, computer(), now + hours * 3600)
    return StateFile(folder / f"{name}.json", state, secrets)


def load_state(path: Path, secrets: Secrets) -> StateFile:
    """The state in a file. Raises InputError for one that is missing, damaged or of another version."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        there = sorted(str(other) for other in path.parent.glob(f"{NAME_PREFIX}-*.json"))
        advice = f"there is {there[-1]}" if there else f"there is none in {path.parent}"
        raise InputError(f"{path}: no such state file; {advice}") from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a folder; the state is the .json file beside it") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: truncated or damaged ({error}); the machine may still run: `ls` finds it by its name, "
            "`terminate` by its id"
        ) from error
    if not isinstance(values, dict) or "schema" not in values:
        raise InputError(f"{path}: not the state of a run")
    if values["schema"] != SCHEMA:
        raise InputError(f"{path}: of version {values['schema']}, and this runner knows version {SCHEMA}; use its own")
    try:
        state = State(**values)
        if state.phase not in PHASES:
            raise ValueError(f"unknown phase {state.phase!r}")
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: damaged: {error}") from error
    file = StateFile(path, state, secrets)
    if not file.folder.is_dir():
        where = "" if state.computer == computer() else f" It was made on the computer {state.computer.split()[0]}."
        raise InputError(
            f"{path}: its folder {file.folder} is missing, and with it the key to the machine.{where} Bring both here, "
            f"or give up the results: `terminate --id {state.resource.get('id', '?')} --yes`"
        )
    return file


def created_and_deadline(name: str) -> tuple[int, int] | None:
    """When a machine of ours was made and when its time is over, from its name alone; None for any other name."""
    parts = name.split("-")
    if len(parts) < 5 or parts[0] != NAME_PREFIX or len(parts[-1]) != 8:
        return None
    if not (parts[-2].isdigit() and parts[-3].isdigit()):
        return None
    return int(parts[-3]), int(parts[-2])


def computer() -> str:
    """A name for this computer that says which one it is, and does not tell its hardware address."""
    return f"{platform.node()} {hashlib.sha256(uuid.getnode().to_bytes(8, 'big')).hexdigest()[:12]}"


def utc_now() -> str:
    """The time, as ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
