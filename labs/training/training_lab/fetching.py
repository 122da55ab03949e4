"""A run's folder made anew from its copies: the record, and the newest checkpoint that verifies.

It is written aside, under a name that nothing takes for a run, and renamed when all of it is there, verified and on
the disk. What an interrupted download left is gone on from, file by file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiment_runner.durable import READ_BYTES, UNFINISHED_PREFIX, sync_file, sync_folder, try_lock
from training_lab.checkpoint import DESCRIPTION, NAME, link_last
from training_lab.copying import COPIED_NAME, files_of, is_plain_name
from training_lab.errors import LabError, UserError
from training_lab.progress import NoProgress, Progress
from training_lab.record import CHECKPOINTS, CONFIG, COPIES, LAST_CHECKPOINT, LOCK, METRICS, RunFolder
from training_lab.storage import Digest, Patience, Storage, StorageError, check_address

RUN_ID = re.compile(r"[\w.-]*\w[\w.-]*")


def fetch_copy(
    address: str,
    runs_dir: Path,
    progress: Progress = NoProgress(),  # noqa: B008 - it has no state
    patience: Patience = Patience(),  # noqa: B008
) -> RunFolder:
    """Downloads the run whose copies are at `address` (`s3://bucket/prefix/<run id>`) into `runs_dir`.

    A checkpoint that is damaged or incomplete there is passed over for an older one, and `progress` is told. Raises
    UserError if the run is here already or nothing of it is there, LabError if no checkpoint is good or the download
    cannot be finished; the same command goes on with what came.
    """
    address = check_address(address)
    _, _, run_id = address.rpartition("/")
    if RUN_ID.fullmatch(run_id) is None or address.endswith("://"):
        raise UserError(f"{address}: does not end in a run's id; write it as s3://bucket/prefix/<run id>")
    final = RunFolder(runs_dir / run_id)
    if final.path.exists():
        raise UserError(f"{final.path}: is here already; move it away, or choose another folder with --runs")
    storage = Storage(address, patience)
    try:
        sizes = {name: size for name, size in storage.sizes().items() if is_plain_name(name)}
        if CONFIG not in sizes:
            raise UserError(f"{address}: no copy of a run is there: it has no {CONFIG}")
        aside = runs_dir / f"{UNFINISHED_PREFIX}{run_id}"
        aside.mkdir(parents=True, exist_ok=True)
        with only_one(aside):
            Fetch(storage, aside, sizes, progress).run()
            os.rename(aside, final.path)
            sync_folder(runs_dir)
    except StorageError as error:
        kind = UserError if error.is_lasting else LabError
        raise kind(f"{error}; what came is kept, the same command goes on from there") from error
    except OSError as error:
        raise LabError(
            f"{error.filename or runs_dir}: cannot be written: {error.strerror}; make room and give the same command "
            "again, it goes on from what came; no run's folder was made"
        ) from error
    return final


@contextlib.contextmanager
def only_one(aside: Path) -> Iterator[None]:
    """Held by the one process that downloads the run."""
    with open(aside / LOCK, "a+", encoding="utf-8") as file:
        if not try_lock(file):
            raise UserError(f"{aside}: another process is downloading this run now; wait for it")
        yield


class Fetch:
    """One download of a run, from a storage into a folder aside."""

    def __init__(self, storage: Storage, aside: Path, sizes: dict[str, int], progress: Progress) -> None:
        self.storage, self.aside, self.progress = storage, aside, progress
        self.sizes = sizes
        self.kept = {LOCK}
        """What belongs to the folder; the rest is left from an earlier try."""

    def run(self) -> None:
        verified = self.fetch_record()
        update = self.fetch_checkpoint(verified)
        (self.aside / CHECKPOINTS).mkdir(exist_ok=True)
        if update is None:
            self.progress.note(f"{self.storage.address}: no checkpoint was copied; the run begins from its start")
        else:
            self.write_known(verified, update)
            link_last(self.aside / CHECKPOINTS / update, self.aside / LAST_CHECKPOINT)
            self.kept.add(LAST_CHECKPOINT)
        self.sweep()

    def fetch_record(self) -> dict[str, Any]:
        """Downloads the files beside the checkpoints; what `copies.json` there says."""
        known: dict[str, Any] = {}
        if COPIES in self.sizes:
            self.fetch_file(COPIES, None)
            with contextlib.suppress(LabError):
                known = RunFolder(self.aside).read_json(COPIES, checkpoints=dict, record=dict)
        record = known.get("record", {})
        names = [name for name in sorted(self.sizes) if not name.startswith(f"{CHECKPOINTS}/") and name != COPIES]
        for name in names:
            # Fetched anew each time: they are small, and a run that still goes on changes them.
            (self.aside / name).unlink(missing_ok=True)
            self.fetch_file(name, None)
            if name in record and not self.is_as_recorded(name, record[name]):
                self.progress.note(f"{name} is not what it was when its copy was verified: look at it")
        return known

    def is_as_recorded(self, name: str, entry: Any) -> bool:
        """Whether a file has the hash that was recorded. Metrics only grow: their beginning must have it."""
        try:
            wanted = Digest(int(entry["bytes"]), str(entry["sha256"]))
        except (KeyError, TypeError, ValueError):
            return False
        content = (self.aside / name).read_bytes()
        part = content[: wanted.size] if name == METRICS else content
        return Digest(len(part), hashlib.sha256(part).hexdigest()) == wanted

    def fetch_checkpoint(self, known: dict[str, Any]) -> str | None:
        """Downloads the newest checkpoint that verifies, and returns its name; None if there is none at all."""
        matches = [match for name in self.sizes if (match := COPIED_NAME.fullmatch(name))]
        names = {match[1]: int(match[2]) for match in matches}
        damaged = []
        for name in sorted(names, key=lambda name: names[name], reverse=True):
            try:
                self.fetch_whole(name, known.get("checkpoints", {}).get(str(names[name]), {}))
            except StorageError:
                raise
            except LabError as error:
                damaged.append(str(error))
                self.progress.note(f"{error}; the one before it is tried")
                shutil.rmtree(self.aside / CHECKPOINTS / name, ignore_errors=True)
            else:
                return name
        if damaged:
            raise LabError(f"{self.storage.address}: no checkpoint there is good: {'; '.join(damaged)}")
        return None

    def fetch_whole(self, name: str, known: dict[str, Any]) -> None:
        """Downloads one checkpoint. Raises LabError if the copy is damaged or incomplete."""
        folder = f"{CHECKPOINTS}/{name}"
        subject = f"{self.storage.address}/{folder}"
        if f"{folder}/{DESCRIPTION}" not in self.sizes:
            raise LabError(f"{subject}: incomplete: it was still being copied")
        path = self.aside / folder
        (path / DESCRIPTION).unlink(missing_ok=True)
        self.fetch_file(f"{folder}/{DESCRIPTION}", None)
        description = (path / DESCRIPTION).read_bytes()
        if known.get("state") == "verified" and known.get("sha256") != hashlib.sha256(description).hexdigest():
            raise LabError(f"{subject}: damaged: {DESCRIPTION} is not what it was when the copy was verified")
        try:
            files = files_of(path)
        except LabError as error:
            raise LabError(f"{subject}: damaged: its {DESCRIPTION} cannot be read") from error
        for file, digest in files.items():
            if self.sizes.get(f"{folder}/{file}") != digest.size:
                raise LabError(f"{subject}: damaged: {file} has not the {digest.size:,} bytes that it had")
        for file, digest in files.items():
            self.fetch_file(f"{folder}/{file}", digest)

    def fetch_file(self, name: str, wanted: Digest | None) -> None:
        """Brings one file here, from where an earlier try ended. Raises LabError if its hash is not as wanted."""
        path = self.aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for is_first in (True, False):
            had = path.stat().st_size if path.exists() else 0
            if self.receive(name, path) == (wanted.sha256 if wanted else None) or wanted is None:
                break
            path.unlink()
            # The part that an earlier try left may have been bad; one that came in one go is what it is.
            if not (is_first and had):
                raise LabError(f"{self.storage.address}/{name}: damaged: its SHA-256 differs")
        self.kept.add(name)

    def receive(self, name: str, path: Path) -> str:
        """Appends what is missing of a file and forces it to the disk; the SHA-256 of all of it."""
        digest, size = hashlib.sha256(), 0
        with open(path, "a+b") as file:
            if path.stat().st_size > self.sizes[name]:
                file.truncate(0)
            file.seek(0)
            while block := file.read(READ_BYTES):
                digest.update(block)
                size += len(block)
            for block in self.storage.read(name, size, self.sizes[name]):
                file.write(block)
                digest.update(block)
                size += len(block)
                self.progress.show(f"Fetching {name}", size, self.sizes[name], f"{size / 1e6:,.0f} MB")
            sync_file(file)
        return digest.hexdigest()

    def write_known(self, known: dict[str, Any], update: str) -> None:
        """Leaves of `copies.json` what is true of the new folder: it has one checkpoint. The copies of the others,
        which this folder never had, stay where they are."""
        match = NAME.fullmatch(update)
        number = str(int(match[1])) if match else ""
        if known.get("checkpoints"):
            of_this = {key: entry for key, entry in known["checkpoints"].items() if key == number}
            RunFolder(self.aside).write_json(COPIES, {**known, "checkpoints": of_this})

    def sweep(self) -> None:
        """Removes what an earlier try left and does not belong here, and forces the folders to the disk."""
        for path in sorted(self.aside.rglob("*"), reverse=True):
            name = path.relative_to(self.aside).as_posix()
            if path.is_file() and name not in self.kept:
                path.unlink()
            elif path.is_dir() and name != CHECKPOINTS and not any(path.iterdir()):
                path.rmdir()
        for path in [self.aside, *self.aside.rglob("*")]:
            if path.is_dir():
                sync_folder(path)
