"""What to run: the files that are sent, the steps, the results that come home, and the limits. Knows nothing of models.

A job is a JSON file; README.md shows one. Every path in it is relative, with `/`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from experiment_runner.errors import InputError
from experiment_runner.parsing import Seconds, read_settings

SCHEMA = 1
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Problems = Iterator[tuple[str, str]]
T = TypeVar("T")


@dataclass(frozen=True)
class Files:
    """What leaves this machine: nothing but this."""

    root: str = "."
    """The folder that patterns and paths start from; relative to the job's file."""
    include: tuple[str, ...] = ()
    """Patterns such as `src/*.py` or `data/**/*.txt`; one that matches nothing is an error."""
    exclude: tuple[str, ...] = ()
    """Patterns of what is left out again."""
    inline: Mapping[str, str] = field(default_factory=dict)
    """Files that exist nowhere but here: path to text."""
    max_mb: float = 20.0
    """More than this is refused: it is likely a mistake in a pattern."""

    def problems(self) -> Problems:
        for key, patterns in (("include", self.include), ("exclude", self.exclude), ("inline", tuple(self.inline))):
            for pattern in patterns:
                if not is_inside(pattern):
                    yield key, f"must stay inside the root, got {pattern!r}"
        if not self.include and not self.inline:
            yield "include", "nothing is sent; name at least one file"


@dataclass(frozen=True)
class Step:
    """One command, run by a shell in the folder of the sent files."""

    name: str
    run: str
    """The command. It finds EXPERIMENT_ID, EXPERIMENT_RESULTS (the folder for results) and EXPERIMENT_SHARED (a folder
    that the machine's runs share) in its environment; and EXPERIMENT_NODES (how many machines do the job),
    EXPERIMENT_NODE_RANK, EXPERIMENT_MASTER and EXPERIMENT_MASTER_PORT (where they meet)."""
    timeout: Seconds = Seconds(3600.0)
    """After it the step is ended, and the job with it."""
    cwd: str = "."
    """Where it runs."""
    secrets: tuple[str, ...] = ()
    """The secrets that this step alone finds in its environment, where they are set here."""

    def problems(self) -> Problems:
        if not WORD.fullmatch(self.name):
            yield "name", f"must be a word of letters, digits and . _ -, got {self.name!r}"
        if not self.run.strip():
            yield "run", "must be a command"
        if not is_inside(self.cwd):
            yield "cwd", f"must stay inside the sent files, got {self.cwd!r}"
        if self.timeout <= 0:
            yield "timeout", "must be above 0"
        for name in self.secrets:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name.startswith("RUNPOD_"):
                yield "secrets", f"{name!r} is not the name of a secret that a step may have"


@dataclass(frozen=True)
class Results:
    """What comes home."""

    path: str = "results"
    """The folder with the results, among the sent files; `{id}` stands for the resource's id."""
    required: tuple[str, ...] = ()
    """Files without which a job that succeeded is not complete."""
    live: tuple[str, ...] = ()
    """Patterns of files that only grow, such as logs: fetched while the job runs."""
    exclude: tuple[str, ...] = ()
    """Patterns of what stays there."""
    max_gb: float = 20.0
    """More than this is not fetched: the machine is stopped instead, with its disk kept."""

    def problems(self) -> Problems:
        if not is_inside(self.path) or self.path in (".", ""):
            yield "path", f"must be a folder inside the sent files, got {self.path!r}"
        for name in self.required:
            if not is_inside(name):
                yield "required", f"must stay inside the results, got {name!r}"


@dataclass(frozen=True)
class Limits:
    """What ends a job that does not end by itself."""

    max_hours: float = 3.0
    """From the creation of the machine; the job is ended after it, and the machine stopped."""
    max_usd: float = 12.0
    """The same for money: hours are cut down to what this pays at the machine's rate."""
    max_usd_per_hour: float = 4.0
    """A machine that costs more is not taken."""
    boot: Seconds = Seconds(900.0)
    """The longest that a machine may take until commands run on it."""
    stall: Seconds = Seconds(1200.0)
    """A job whose log does not grow for so long is ended; 0: never."""
    silence: Seconds = Seconds(60.0)
    """A connection that gives no sign of life for so long counts as lost, and is made again."""
    reconnect: Seconds = Seconds(900.0)
    """The longest that a lost connection is tried again, before the machine is stopped."""
    collect_grace: Seconds = Seconds(1800.0)
    """After the job's end, or the last sign of somebody who fetches its results, the machine waits so long and stops
    itself, where it can."""
    kill_grace: Seconds = Seconds(30.0)
    """From the polite signal to the end of a step to the other one."""
    poll: Seconds = Seconds(5.0)
    """Between two looks at the provider or the job. RunPod asks for 5 s or more."""

    def problems(self) -> Problems:
        for limit in dataclasses.fields(self):
            if getattr(self, limit.name) <= 0 and limit.name not in ("stall", "kill_grace"):
                yield limit.name, "must be above 0"


@dataclass(frozen=True)
class Node:
    """The place of a machine among those that do a job together. Alone it is the first of one."""

    rank: int = 0
    count: int = 1
    master: str = "127.0.0.1"
    """Where the others reach the machine of rank 0."""
    port: int = 29500
    """The port there on which they meet."""

    def problems(self) -> Problems:
        if not 0 <= self.rank < self.count:
            yield "rank", f"must be one of {self.count}, counted from 0, got {self.rank}"
        if not 0 < self.port < 1 << 16:
            yield "port", f"must be from 1 to 65535, got {self.port}"

    def environment(self) -> dict[str, str]:
        """What a step finds of it."""
        return {
            "EXPERIMENT_NODES": str(self.count),
            "EXPERIMENT_NODE_RANK": str(self.rank),
            "EXPERIMENT_MASTER": self.master,
            "EXPERIMENT_MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True)
class Job:
    """All of it, on one machine."""

    name: str
    steps: tuple[Step, ...]
    files: Files
    results: Results = field(default_factory=Results)
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every step. No place for secrets."""
    provider: str = "local"
    """Where it runs: `runpod`, `ssh` or `local`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Each provider's own settings, by its name. With `nodes` among them, several machines do the job: see group.py."""
    node: Node = field(default_factory=Node)
    """Which of several machines this one is; written by the runner."""
    on_failure: str = "delete"
    """What becomes of the machine of a job that failed, once its log and whatever it made is here: `delete` or
    `stop`."""
    schema: int = SCHEMA

    def problems(self) -> Problems:
        if self.schema != SCHEMA:
            yield "schema", f"this version knows schema {SCHEMA}, got {self.schema}"
        if not WORD.fullmatch(self.name) or len(self.name) > 24:
            yield "name", f"must be a word of at most 24 letters, digits and . _ -, got {self.name!r}"
        if not self.steps:
            yield "steps", "nothing to run; write at least one step"
        names = [step.name for step in self.steps]
        for name in names:
            if names.count(name) > 1:
                yield "steps", f"{name!r} is the name of {names.count(name)} steps"
        if self.on_failure not in ("delete", "stop"):
            yield "on_failure", f"must be delete or stop, got {self.on_failure!r}"
        for name in self.env:
            if name.startswith(("RUNPOD_", "EXPERIMENT_")) or not re.fullmatch(r"[A-Za-z_]\w*", name):
                yield f"env.{name}", "is not a variable that a job may set"

    @property
    def secret_names(self) -> list[str]:
        """The names of all secrets that any step has; sorted."""
        return sorted({name for step in self.steps for name in step.secrets})

    def to_json(self) -> dict[str, Any]:
        """The job as JSON; `job_from_json` reads it back."""
        return dataclasses.asdict(self)


def job_from_json(values: Any, label: str) -> Job:
    """The job that a JSON value describes. Raises InputError with the key of what is wrong."""
    job: Job = read_settings(Job, values, label)
    if len(job.steps) and not job.files.include and not job.files.inline:
        raise InputError(f"{label}: files.include: nothing is sent; name at least one file")
    return job


def settings_for(kind: type[T], job: Job, label: str) -> T:
    """The settings of the job's provider."""
    return read_settings(kind, job.settings.get(job.provider, {}), label, f"settings.{job.provider}")


def is_inside(path: str) -> bool:
    """Whether a relative POSIX path or pattern stays below where it starts."""
    parts = PurePosixPath(path).parts
    return bool(path) and not path.startswith("/") and ".." not in parts and "\\" not in path and path.isprintable()
