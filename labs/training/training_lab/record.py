"""The run folder: its names, atomic writes, the lock of the process that trains in it, and its manifest.

Every file is either written whole under another name, synced and renamed, or (`metrics.jsonl`) only ever appended
to. The manifest comes last: size and SHA-256 of every other file. Standard library only, Python 3.9.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiment_runner.durable import UNFINISHED_PREFIX, json_text, sha256_of_file, try_lock, write_atomically
from experiment_runner.redaction import Secrets
from training_lab.errors import LabError, UserError

CONFIG = "config.json"
SOURCE = "source.json"
SOURCE_ARCHIVE = "source.zip"
ENVIRONMENT = "environment.json"
DATA_MANIFEST = "data-manifest.json"
DATA_STATS = "data-stats.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
WANDB = "wandb.json"
TIMELINE = "timeline.json"
MEMORY_SNAPSHOT = "memory-snapshot.pickle"
MEMORY_EVENTS = "memory-events.json"
NOTES = "notes.md"
TENSORBOARD = "tensorboard"
CSV = "metrics.csv"
REPORT = "report.html"
REPORT_DATA = "report.json"
CHECKPOINTS = "checkpoints"
LAST_CHECKPOINT = "checkpoint.pt"
COPIES = "copies.json"
MANIFEST = "manifest.json"
LOCK = ".lock"


class Finding(NamedTuple):
    """One thing that `verify` looked at: what, whether it is right, and what was seen."""

    subject: str
    is_good: bool
    message: str


class RunFolder:
    """One run's folder. The name of the folder is the run's id."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_id(self) -> str:
        return self.path.name

    def as_typed(self) -> str:
        """The run as a person types it: its id where that is enough, else its folder."""
        return shlex.quote(self.run_id if self.path.parent == Path(".runs") else str(self.path))

    def file(self, name: str) -> Path:
        return self.path / name

    def write_json(self, name: str, value: Any) -> None:
        """Replaces a file of the folder as a whole: a crash leaves the old one or the new one. A secret in it is
        replaced by its name."""
        secrets_here = Secrets.from_environment(os.environ)
        write_atomically(self.file(name), secrets_here.redact(json_text(value)).encode("utf-8"))

    def read_json(self, name: str, **keys: type) -> dict[str, Any]:
        """One of the folder's JSON files: an object that has at least `keys`, of these types.

        Raises LabError if it is missing or damaged.
        """
        path = self.file(name)
        try:
            value = json.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            raise LabError(f"{path}: missing from the run's folder") from error
        except (OSError, ValueError, RecursionError) as error:
            raise LabError(f"{path}: damaged: {error}") from error
        if not isinstance(value, dict):
            raise LabError(f"{path}: damaged: not a JSON object")
        for key, kind in keys.items():
            if not isinstance(value.get(key), kind):
                raise LabError(f"{path}: damaged: its {key!r} is missing or not what it should be")
        return value

    def state(self) -> str:
        """What became of the run: what its summary says, or `killed` for one that ended without saying so."""
        try:
            said: str = self.read_json(SUMMARY, state=str)["state"]
        except LabError:
            return "damaged"
        return said if said != "running" or self.is_locked() else "killed"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held by the one process that trains in the folder; it ends with the process, however that ends."""
        with open(self.file(LOCK), "a+", encoding="utf-8") as file:
            for _ in range(10):  # a process that only looks whether the run is going on holds the lock for a moment
                if try_lock(file):
                    break
                time.sleep(0.1)
            else:
                raise UserError(f"{self.path}: another process is training in this run now; wait for it, or use --new")
            yield

    def is_locked(self) -> bool:
        """Whether a process is training in the folder now."""
        try:
            with open(self.file(LOCK), "r+", encoding="utf-8") as file:
                return not try_lock(file)
        except OSError:
            return False

    def content(self) -> list[str]:
        """The files that a manifest covers, as sorted POSIX paths from the folder."""
        found = []
        for path in self.path.rglob("*"):
            relative = path.relative_to(self.path)
            # What is copied where goes on changing after the manifest, which is itself among what is copied.
            is_passing = relative.as_posix() in (MANIFEST, LOCK, COPIES) or any(
                part.startswith(UNFINISHED_PREFIX) for part in relative.parts
            )
            if path.is_file() and not is_passing:
                found.append(relative.as_posix())
        return sorted(found)

    def write_manifest(self) -> None:
        """Writes size and SHA-256 of every file. A file under two names is read once."""
        hashes: dict[tuple[int, int], str] = {}
        files = {}
        for name in self.content():
            status = self.file(name).stat()
            inode = (status.st_dev, status.st_ino)
            if inode not in hashes:
                hashes[inode] = sha256_of_file(self.file(name))
            files[name] = {"bytes": status.st_size, "sha256": hashes[inode]}
        self.write_json(MANIFEST, {"run": self.run_id, "files": files})

    def refresh_manifest(self, *names: str) -> None:
        """Brings the entries of files that were made anew up to date, and no others: what is damaged stays known as
        damaged. A folder without a manifest gets none, and a damaged one is left as it is."""
        try:
            manifest = self.read_json(MANIFEST, files=dict)
        except LabError:
            return
        for name in names:
            path = self.file(name)
            manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
        self.write_json(MANIFEST, {**manifest, "files": dict(sorted(manifest["files"].items()))})

    def verify_manifest(self) -> list[Finding]:
        """Compares every file with the manifest, and names what is missing, changed or not listed."""
        if not self.file(MANIFEST).exists():
            why = "the run was not closed" if self.state() in ("running", "killed") else "the file is gone"
            return [Finding(MANIFEST, False, f"missing: {why}; nothing says what the files should be")]
        try:
            listed: dict[str, dict[str, Any]] = self.read_json(MANIFEST, files=dict)["files"]
            expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
        except (LabError, KeyError, TypeError, ValueError, OverflowError) as error:
            return [Finding(MANIFEST, False, f"damaged: {error}")]
        findings = []
        for name, (size, sha256) in sorted(expected.items()):
            path = self.file(name)
            if name == NOTES and not (path.is_file() and sha256_of_file(path) == sha256):
                findings.append(Finding(name, True, "edited since the run was closed: notes are yours to change"))
            elif not path.is_file():
                findings.append(Finding(name, False, "missing"))
            elif path.stat().st_size != size:
                findings.append(Finding(name, False, f"changed: has {path.stat().st_size} bytes, had {size}"))
            elif sha256_of_file(path) != sha256:
                findings.append(Finding(name, False, "changed: same size, other content"))
            else:
                findings.append(Finding(name, True, f"{size} bytes, SHA-256 {sha256[:12]}…"))
        findings += [Finding(name, False, "not in the manifest") for name in self.content() if name not in expected]
        return findings


def create_run(runs_dir: Path, name: str, run_id: str | None = None) -> RunFolder:
    """A new, empty folder for a run: `<name>-<UTC time>-<four random digits>`, or what is given as its id."""
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    safe_name = re.sub(r"[^\w.-]+", "-", name)
    path = runs_dir / (run_id or f"{safe_name}-{stamp}-{secrets.token_hex(2)}")
    if run_id is not None and (re.fullmatch(r"[\w.-]*\w[\w.-]*", run_id) is None or (path / CONFIG).exists()):
        raise UserError(
            f"--run-id {run_id}: must be a word of letters, digits and . _ -, and no run's name in {runs_dir}"
        )
    try:
        (path / CHECKPOINTS).mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be made: {error.strerror}; choose another folder with --runs") from error
    return RunFolder(path)


def list_runs(runs_dir: Path) -> list[RunFolder]:
    """The runs in a folder, newest first."""
    if not runs_dir.is_dir():
        return []
    runs = [RunFolder(path) for path in runs_dir.iterdir() if (path / CONFIG).is_file()]
    return sorted(runs, key=lambda run: (run.file(CONFIG).stat().st_mtime_ns, run.run_id), reverse=True)


def find_run(runs_dir: Path, text: str) -> RunFolder:
    """The run that a person means by a path, an id, the beginning of one, or `latest`."""
    direct = Path(text)
    if (direct / CONFIG).is_file():
        return RunFolder(Path(os.path.normpath(direct)))
    if direct.is_dir():
        raise UserError(f"{text}: not the folder of a run: it has no {CONFIG}")
    runs = list_runs(runs_dir)
    if not runs:
        raise UserError(f"{text}: no such run, and none in {runs_dir}; give a run's folder, or --runs DIR")
    if text == "latest":
        return runs[0]
    found = [run for run in runs if run.run_id.startswith(text)]
    exact = [run for run in found if run.run_id == text]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        raise UserError(f"{text}: stands for {len(found)} runs: {', '.join(run.run_id for run in found[:5])}")
    raise UserError(f"{text}: no such run in {runs_dir}; the newest there is {runs[0].run_id}")
