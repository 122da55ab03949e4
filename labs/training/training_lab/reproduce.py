"""The command `reproduce`: from a run's folder alone, the recorded source trains the recorded config again.

The source is unpacked from the folder, or taken from the commit, each file by its hash; what runs here now does not
matter. What differs between the environments is named, the data are built again, and the two runs are compared.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from training_lab import record
from training_lab.again import OTHER_DATA
from training_lab.comparing.arms import Run
from training_lab.comparing.compare import read_run
from training_lab.comparing.noise_floor import find_floor, last_val_loss
from training_lab.comparing.parting import find_parting
from training_lab.comparing.significance import of_two_runs
from training_lab.errors import LabError, UserError
from training_lab.identity import sha256_of_bytes
from training_lab.progress import Progress
from training_lab.provenance import changed_files, describe_host, describe_source, git, source_files
from training_lab.record import Finding, RunFolder
from training_lab.studying.making import Stopped, as_row, started

IDENTICAL, WITHIN_NOISE, PARTED = 0, 1, 3
IN_REPOSITORY = {"training_lab": "labs/training", "experiment_runner": "labs/runner"}
UNCOMPARED = ("segment", "image", "device_reason", "compute_reason", "attention_reason", "loss_reason",
              "compile_reason")  # fmt: skip
MOST_NAMED = 8


class Reproduced(NamedTuple):
    """What came out."""

    exit_code: int
    sentence: str


def reproduce(
    folder: RunFolder, runs_dir: Path, updates: int | None, show: Progress, say: Callable[[Finding], None]
) -> Reproduced:
    """Trains the run again and compares. Raises LabError if its source cannot be had, or its data are others now."""
    recorded = folder.read_json(record.SOURCE, files=dict, sha256=str)
    with tempfile.TemporaryDirectory(prefix="training-lab-") as place:
        for name, content in recorded_source(folder, recorded):
            path = Path(place) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        say(Finding("source", True, f"{len(recorded['files'])} files, each with its recorded SHA-256"))
        changes = changed_files(recorded, describe_source())
        if changes:
            more = f" and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else ""
            text = f"{', '.join(changes[:MOST_NAMED])}{more}; the recorded files are used"
            say(Finding("the code here", False, text))
        for finding in compare_environment(folder):
            say(finding)
        again = new_folder(folder, runs_dir)
        last = last_update(folder) if updates is None else updates
        train_again(folder, again, Path(place), last, show)
    say(Finding("data", True, "built again, with the recorded identity"))
    return judge(read_run(folder), read_run(again), runs_dir)


def recorded_source(folder: RunFolder, recorded: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Every file that ran, with its content: from the folder, from here, or from the commit. Raises LabError for one
    whose content is nowhere."""
    packed = unpack(folder)
    here = source_files()
    for name, sha256 in sorted(recorded["files"].items()):
        if name.startswith("/") or ".." in Path(name).parts:
            raise LabError(f"{folder.file(record.SOURCE)}: damaged: {name!r} is no file of the lab")
        in_archive = packed.get(name)
        if in_archive is not None and sha256_of_bytes(in_archive) == sha256:
            yield name, in_archive
            continue
        in_archive_text = "is not in it" if in_archive is None else "has another SHA-256 in it"
        candidates = [here[name].read_bytes()] if name in here else []
        from_commit = git("show", f"{recorded.get('commit')}:{IN_REPOSITORY[name.partition('/')[0]]}/{name}")
        candidates += [f"{from_commit}\n".encode()] if from_commit is not None else []
        found = next((content for content in candidates if sha256_of_bytes(content) == sha256), None)
        if found is None:
            raise LabError(
                f"{folder.file(record.SOURCE_ARCHIVE)}: {name} {in_archive_text}, and neither the code here nor commit "
                f"{str(recorded.get('commit'))[:12]} has the one that ran ({sha256[:12]}…)"
            )
        yield name, found


def unpack(folder: RunFolder) -> dict[str, bytes]:
    """The files of the folder's archive; none if there is no archive that can be read."""
    try:
        with zipfile.ZipFile(folder.file(record.SOURCE_ARCHIVE)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except (OSError, ValueError, zipfile.BadZipFile):
        return {}


def compare_environment(folder: RunFolder) -> Iterator[Finding]:
    """What differs between the machine and packages of the record and those here, each by name."""
    processes = folder.read_json(record.ENVIRONMENT, processes=list)["processes"]
    before = dict(processes[-1]) if processes and isinstance(processes[-1], dict) else {}
    now = {**describe_host(), "torch": torch.__version__}
    wrong = []
    for key, value in now.items():
        if key in UNCOMPARED:
            continue
        was = before.get(key)
        if isinstance(value, dict) and isinstance(was, dict):
            names = sorted(name for name in {*value, *was} if value.get(name) != was.get(name))
            wrong += [f"{name} is {value.get(name, 'missing')}, was {was.get(name, 'missing')}" for name in names]
        elif was != value:
            wrong.append(f"{key} is {value}, was {was}")
    if not wrong:
        yield Finding("environment", True, "Python, packages, processor and variables as recorded")
    for text in wrong:
        yield Finding("environment", False, text)


def last_update(folder: RunFolder) -> int | None:
    """Where to stop: at the end, or where the run stood."""
    said = folder.read_json(record.SUMMARY, updates=int, planned_updates=int)
    return None if said["updates"] == said["planned_updates"] else int(said["updates"])


def new_folder(folder: RunFolder, runs_dir: Path) -> RunFolder:
    """Where the run is made again: a folder that is not there yet."""
    number = 1
    while (runs_dir / f"{folder.run_id}-again-{number}").exists():
        number += 1
    return RunFolder(runs_dir / f"{folder.run_id}-again-{number}")


def train_again(folder: RunFolder, again: RunFolder, source: Path, last: int | None, show: Progress) -> None:
    """Starts the unpacked source and waits. Raises LabError if it does not come to its end."""
    if last == 0:
        raise UserError(f"{folder.path}: has no update that could be made again")
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-m", "training_lab.again", str(folder.path), str(again.path.parent), again.run_id]
    words += [str(last)] if last is not None else []
    with started(words, environment) as process:
        assert process.stdout is not None
        total: float | None = last
        for line in process.stdout:
            row = as_row(line)
            if row.get("kind") == "begin" and last is None:
                total = row.get("updates")
            elif row.get("kind") == "update":
                show.show("training again", int(row["update"]), total, "updates")
    if process.returncode in (130, 143, -2, -15):
        raise Stopped
    if process.returncode:
        errors = process.errors.strip().splitlines()
        message = errors[-1].removeprefix("error: ") if errors else f"exit code {process.returncode}"
        what = "its data are not what they were" if process.returncode == OTHER_DATA else "could not be trained again"
        raise LabError(f"{folder.path}: {what}: {message}")


def judge(first: Run, again: Run, runs_dir: Path) -> Reproduced:
    """Bit-identical, the same within the noise floor, or where it parts."""
    parting = find_parting(first, again)
    if parting.is_same:
        return Reproduced(IDENTICAL, f"bit-identical: {parting.detail} ({again.id})")
    floor = find_floor(runs_dir, first)
    before, after = last_val_loss(first), last_val_loss(again)
    if floor is not None and floor.values and before is not None and after is not None:
        verdict = of_two_runs(before, after, floor.values)
        if not verdict.is_different:
            return Reproduced(WITHIN_NOISE, f"the same within the noise floor: {parting.detail}; {verdict.sentence}")
    hint = "" if floor is not None else "; whether that is more than noise, `noise` of its config would tell"
    return Reproduced(PARTED, f"{parting.detail}{hint} ({again.id})")
