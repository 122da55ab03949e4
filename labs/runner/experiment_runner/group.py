"""Several machines that do one job together: the form of it, and the file that says which state belongs to which.

Where a provider's settings have `nodes`, each is a machine: what stands there goes over the rest of the settings.

    "settings": {"ssh": {"python": "python3.12", "nodes": [{"host": "gpu-a"}, {"host": "gpu-b"}]}}

Every machine is then an ordinary run of all steps, with a state, a folder and verdicts of its own; it only knows its
place among the others. The results are those of the first; what comes home of the others is their log.
"""

from __future__ import annotations

import dataclasses
import json
import secrets as randomness
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from experiment_runner.durable import json_text, write_atomically
from experiment_runner.errors import InputError
from experiment_runner.job import Job, Node, Problems
from experiment_runner.parsing import Seconds, read_settings
from experiment_runner.redaction import Secrets
from experiment_runner.state import PRIVATE, StateFile, load_state

SCHEMA = 1
PREFIX = "group-"
MOST = 64
LONGEST_NAME = 24
PLACES = ("ssh", "local")
"""Machines that reach one another by themselves, or by what their owner has set up."""


@dataclass(frozen=True)
class Nodes:
    """The settings of a provider that are about several machines."""

    nodes: tuple[Mapping[str, Any], ...] = ()
    """What is particular to each machine, over the rest of the settings."""
    master: str = ""
    """Where the others reach the first; its address in the SSH configuration, where this is left out."""
    master_port: int = 29500
    """The port there on which they meet. On others they may talk besides, as their program likes."""

    def problems(self) -> Problems:
        if len(self.nodes) > MOST:
            yield "nodes", f"at most {MOST} machines, got {len(self.nodes)}"
        for index, node in enumerate(self.nodes):
            if node in self.nodes[:index]:
                yield f"nodes[{index}]", "is the same machine as one before it"
        if not 0 < self.master_port < 1 << 16:
            yield "master_port", f"must be from 1 to 65535, got {self.master_port}"
        if self.master.startswith("-"):
            yield "master", f"must be an address, got {self.master!r}"


class Entry(NamedTuple):
    """A machine of a group, as the overview names it."""

    rank: int
    name: str
    state: Path

    @property
    def label(self) -> str:
        """What its lines begin with."""
        return f"{self.rank} {self.name}"


def is_group(job: Job) -> bool:
    """Whether several machines do it."""
    return "nodes" in job.settings.get(job.provider, {})


def nodes_of(job: Job, label: str) -> Nodes:
    """The settings about several machines. Raises InputError for what is wrong with them."""
    key = f"settings.{job.provider}"
    if job.provider not in PLACES:
        raise InputError(f"{label}: {key}.nodes: several machines are for {' and '.join(PLACES)}, not {job.provider}")
    found: Nodes = read_settings(Nodes, parted(job)[0], label, key)
    if not found.nodes:
        raise InputError(f"{label}: {key}.nodes: names no machine")
    return found


def parted(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """The provider's settings that are about several machines, and the rest."""
    of_group = {field.name for field in dataclasses.fields(Nodes)}
    settings = job.settings[job.provider]
    return (
        {name: value for name, value in settings.items() if name in of_group},
        {name: value for name, value in settings.items() if name not in of_group},
    )


def jobs_of(job: Job, nodes: Nodes, master: str) -> list[Job]:
    """The job of each machine.

    Only the first brings results home. The others may have nothing to say while it has: their silence ends nothing.
    """
    made = []
    for rank, own in enumerate(nodes.nodes):
        ending = f"-n{rank}"
        one = replace(
            job,
            name=job.name[: LONGEST_NAME - len(ending)].rstrip(".-_") + ending,
            settings={job.provider: {**parted(job)[1], **own}},
            node=Node(rank, len(nodes.nodes), master, nodes.master_port),
        )
        if rank:
            one = replace(
                one,
                results=replace(job.results, required=(), live=(), exclude=("*",)),
                limits=replace(job.limits, stall=Seconds(0.0)),
            )
        made.append(one)
    return made


def new_overview(folder: Path, job: Job) -> Path:
    """A name for the overview of a group that begins."""
    return folder / f"{PREFIX}{job.name}-{int(time.time())}-{randomness.token_hex(4)}.json"


def write_overview(path: Path, files: list[StateFile], names: list[str]) -> list[Entry]:
    """Writes which state belongs to which machine. The states are on disk already."""
    entries = [Entry(rank, name, file.path) for rank, (name, file) in enumerate(zip(names, files))]
    listed = [{"rank": entry.rank, "name": entry.name, "state": entry.state.name} for entry in entries]
    text = json_text({"schema": SCHEMA, "group": path.stem, "nodes": listed})
    write_atomically(path, text.encode("utf-8"), mode=PRIVATE)
    return entries


def read_overview(path: Path, secrets: Secrets) -> list[tuple[Entry, StateFile]] | None:
    """The machines of a group with their states; None for a file that is no overview. Raises InputError for one that is
    damaged, or whose states are."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads a state says what is wrong
    if not isinstance(values, dict) or "group" not in values:
        return None
    try:
        if values["schema"] != SCHEMA:
            raise InputError(f"{path}: of version {values['schema']}, and this runner knows version {SCHEMA}")
        entries = [Entry(int(one["rank"]), str(one["name"]), path.parent / one["state"]) for one in values["nodes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: damaged: {type(error).__name__}: {error}; each state beside it still works"
        ) from error
    return [(entry, load_state(entry.state, secrets)) for entry in entries]
