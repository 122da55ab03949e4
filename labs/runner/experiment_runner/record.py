"""What remains of a run beside its results: `remote.json`, with the three verdicts, where it ran, what was sent, what
came home, what it cost, and the proof that the machine is gone."""

from __future__ import annotations

import shutil
from typing import Any

from experiment_runner.durable import json_text, write_atomically
from experiment_runner.errors import InputError
from experiment_runner.state import State, StateFile

RECORD = "remote.json"
LOG = "remote-log.txt"
UNPAID = ("planned", "creating", "refused", "stopped", "done", "lost")
BILLING = ("maybe", "running", "delete_unverified")
"""Verdicts on the machine with which it may go on costing money."""
SCHEMA = 1


def estimated_cost(state: State) -> dict[str, Any]:
    """The rate times the time in which the machine was there; what was really billed is kept, once it is known."""
    seconds = sum(spent for phase, spent in state.seconds.items() if phase not in UNPAID)
    return {
        "usd_per_hour": state.usd_per_hour,
        "seconds": seconds,
        "estimated_usd": round(state.usd_per_hour * seconds / 3600, 4),
        **({"billed": state.cost["billed"]} if "billed" in state.cost else {}),
    }


def record_of(state: State) -> dict[str, Any]:
    """The content of `remote.json`."""
    machine = {name: value for name, value in state.resource.items() if name != "ssh"}
    return {
        "schema": SCHEMA,
        "run": state.run,
        "provider": state.job["provider"],
        "verdicts": dict(state.verdicts),
        "message": state.message,
        "machine": {**machine, **state.facts},
        "settings": state.job["settings"].get(state.job["provider"], {}),
        "steps": state.steps,
        "sent": state.sent,
        "results": state.results,
        "seconds_by_phase": state.seconds,
        "cost": state.cost,
        "deleted": state.deleted,
    }


def write_record(file: StateFile) -> None:
    """Writes the record and the job's log into the output."""
    text = file.secrets.redact(json_text(record_of(file.state)))
    write_atomically(file.output / RECORD, text.encode("utf-8"))
    if file.log.exists():
        shutil.copyfile(file.log, file.output / LOG)


def keep_record(file: StateFile) -> None:
    """Brings state and record up to date on disk."""
    file.state.cost = estimated_cost(file.state)
    file.save()
    if is_own(file):
        write_record(file)


def is_own(file: StateFile) -> bool:
    """Whether the output folder is there, and this run's."""
    record = file.output / RECORD
    return record.is_file() and f'"run": "{file.state.run}"' in record.read_text("utf-8", "replace")


def need_own_output(file: StateFile) -> None:
    """Raises InputError if the output folder holds anything that is not this run's, or would be confused with it."""
    if "{id}" in file.state.output and not file.state.resource:
        return
    output = file.output
    if output.exists() and not output.is_dir():
        raise InputError(f"{output}: is a file; choose another folder with --output")
    if output.is_dir() and any(output.iterdir()) and not is_own(file):
        raise InputError(f"{output}: is not empty, and not of this run; choose another folder with --output")


def claim_output(file: StateFile) -> None:
    """Makes the output folder this run's before anything else is in it: the next command knows it, whatever happens."""
    need_own_output(file)
    file.output.mkdir(parents=True, exist_ok=True)
    write_record(file)


def is_billing(state: State) -> bool:
    """Whether a machine may go on costing money."""
    return state.verdicts["resource"] in BILLING and bool(state.resource.get("is_paid", True))


def exit_code(state: State, is_interrupted: bool) -> int:
    """What the three verdicts come to: 30 before 130, 50, 40, 20 and 10."""
    verdicts = state.verdicts
    if is_billing(state):
        return 30
    if is_interrupted and verdicts["resource"] != "deleted_verified":
        return 130
    if state.phase == "refused":
        return 50
    if verdicts["job"] == "none":
        return 40
    if verdicts["results"] != "verified":
        return 20
    return 0 if verdicts["job"] == "succeeded" else 10


def summary_of(file: StateFile, url: str) -> list[str]:
    """The end of a run in words: what became of the job, the results and the machine, and what to do next."""
    state = file.state
    verdicts, results, cost = state.verdicts, state.results, state.cost
    where = f", {results['num_files']} files in {file.output}" if results.get("num_files") else ""
    lines = [
        "",
        f"job       {verdicts['job']}" + (f": {state.message}" if state.message else ""),
        f"results   {verdicts['results']}{where}",
        f"machine   {verdicts['resource'].replace('_', ' ')}" + (f", {state.resource['id']}" if state.resource else ""),
    ]
    if cost.get("usd_per_hour"):
        rate, seconds = cost["usd_per_hour"], cost["seconds"]
        lines.append(f"cost      {cost['estimated_usd']:.2f} USD estimated: {seconds:,.0f} s at {rate:g} USD an hour")
    if "billed" in cost:
        lines.append(f"billed    {cost['billed']['usd']:.4f} USD by {cost['billed']['utc']}")
    lines.append(f"state     {file.path}")
    if file.log.exists() and not file.output.is_dir():
        lines.append(f"log       {file.log}")
    if is_billing(state):
        lines += ["", f"THE MACHINE MAY STILL COST MONEY: {state.run}, {state.usd_per_hour:g} USD an hour. See to it:"]
        lines += [f"  {command} {file.path}" for command in ("monitor", "collect", "stop", "terminate")]
        lines += [f"  {url}"] if url else []
    elif verdicts["resource"] == "stopped":
        lines += [
            "",
            f"The stopped machine keeps its disk. To go on: start {file.path}; to remove it: terminate {file.path}",
        ]
    return lines
