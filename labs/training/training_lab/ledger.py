"""The ledger of a folder of runs: marks and notes of a person, in a file that is only appended to.

They are judgements about runs, and no part of their records. Standard library only, Python 3.9.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from experiment_runner.durable import sync_file
from training_lab import record
from training_lab.errors import LabError, UserError
from training_lab.record import RunFolder, list_runs

LEDGER = "ledger.jsonl"
STUDIES, STUDY = "studies", "study.json"
MARKS = ("keep", "discard", "crash", "none")
"""What a person says of a run; `none` takes a mark back."""


class Judgement(NamedTuple):
    """What was said of a run."""

    mark: str
    notes: list[str]


NOTHING_SAID = Judgement("", [])


def add_judgement(runs_dir: Path, runs: list[RunFolder], mark: str, note: str) -> None:
    """Appends a mark or a note for some runs; all of them are there, or none."""
    utc = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    entries = [{"utc": utc, "run": run.run_id, "mark": mark, "note": note} for run in runs]
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    path = runs_dir / LEDGER
    try:
        with open(path, "a+b") as file:
            if file.tell() and not ends_whole(path):
                text = "\n" + text  # what a killed process left unfinished stays a line of its own
            file.write(text.encode("utf-8"))
            file.flush()
            sync_file(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def ends_whole(path: Path) -> bool:
    """Whether the last line of a file is finished."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_judgements(runs_dir: Path) -> dict[str, Judgement]:
    """The last mark and all notes of each run. Lines that are none are passed over."""
    try:
        lines = (runs_dir / LEDGER).read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    said: dict[str, Judgement] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            run, mark, note = str(entry["run"]), str(entry["mark"]), str(entry["note"])
        except (ValueError, KeyError, TypeError):
            continue
        before = said.get(run, NOTHING_SAID)
        mark = before.mark if not mark else "" if mark == "none" else mark
        said[run] = Judgement(mark, [*before.notes, *([note] if note else [])])
    return said


def describe_run(run: RunFolder, judgement: Judgement, study: dict[str, Any]) -> dict[str, Any]:
    """A run in a list: what its files say, and its study asks; unknown where they say nothing, or are damaged."""
    summary, config = (or_empty(run, name) for name in (record.SUMMARY, record.CONFIG))

    def said(source: Any, *keys: str) -> Any:
        for key in keys:
            source = source.get(key) if isinstance(source, dict) else None
        return source

    return {
        "run": run.run_id,
        "config": said(config, "name"),
        "question": study.get("question") or said(config, "values", "purpose") or "",
        "study": study.get("study", ""),
        "state": run.state(),
        "mark": judgement.mark,
        "notes": judgement.notes,
        "updates": said(summary, "updates"),
        "planned_updates": said(summary, "planned_updates"),
        "val_loss": said(summary, "val_loss", "last"),
        "target_tokens_per_s": said(summary, "throughput", "target_tokens_per_s"),
        "folder": str(run.path),
    }


def or_empty(run: RunFolder, name: str) -> dict[str, Any]:
    """A JSON file of a run; empty where it is missing or damaged."""
    try:
        return run.read_json(name)
    except LabError:
        return {}


def read_studies(runs_dir: Path) -> list[dict[str, Any]]:
    """What each study's file says, newest first; damaged ones are told as such."""
    found = []
    for path in sorted((runs_dir / STUDIES).glob(f"*/{STUDY}"), key=lambda one: one.stat().st_mtime_ns, reverse=True):
        try:
            said = json.loads(path.read_text("utf-8"))
            runs = [one for one in said.get("runs", []) if isinstance(one, dict)]
            found.append({
                "study": path.parent.name,
                "question": str(said["declared"]["question"]),
                "state": "complete" if said.get("is_complete") else "begun",
                "runs": [str(one.get("run")) for one in runs],
                "with_outcome": sum(one.get("state") in ("finished", "failed: non-finite") for one in runs),
                "verdicts": [str(one) for one in said.get("verdicts", [])],
                "folder": str(path.parent),
            })  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            found.append({
                "study": path.parent.name, "question": "", "state": "damaged", "runs": [], "with_outcome": 0,
                "verdicts": [], "folder": str(path.parent),
            })  # fmt: skip
    return found


def read_ledger(runs_dir: Path) -> list[dict[str, Any]]:
    """Every run, newest first, with what was said of it and the study that it belongs to."""
    judgements = read_judgements(runs_dir)
    study_of = {run: study for study in reversed(read_studies(runs_dir)) for run in study["runs"]}
    return [
        describe_run(run, judgements.get(run.run_id, NOTHING_SAID), study_of.get(run.run_id, {}))
        for run in list_runs(runs_dir)
    ]
