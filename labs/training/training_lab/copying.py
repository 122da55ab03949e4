"""One round of copying: the storage is brought to the state of a run's folder.

    <address>/<run id>/config.json, metrics.jsonl, ...        the record, as it is now
    <address>/<run id>/checkpoints/update-000100/state.pt     the same names as in the folder
    <address>/<run id>/checkpoints/update-000100/checkpoint.json
    <address>/<run id>/copies.json                            what of this was verified, and its hashes

A checkpoint's description is uploaded last, after every file of it was read back and has its hash, and removed first:
a copy with a description was whole. A round may end anywhere, and the next one goes on from what is there. Nothing is
removed but checkpoints of this run that this folder had and keeps no longer, once a newer one is verified there.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiment_runner.durable import UNFINISHED_PREFIX, sha256_of_file
from training_lab.checkpoint import DESCRIPTION, NAME, Checkpoint, list_checkpoints
from training_lab.errors import LabError
from training_lab.record import CHECKPOINTS, COPIES, LAST_CHECKPOINT, LOCK, METRICS, RunFolder
from training_lab.storage import Digest, Storage, StorageError, digest_of

IN_MEMORY_BYTES = 64 << 20
"""A file of the record up to this size is uploaded as it was at one moment, however it changes meanwhile."""
HELD = f"{UNFINISHED_PREFIX}copying"
"""Second names of the checkpoint that is being uploaded, so that it stays until then though it is rotated away."""
COPIED_NAME = re.compile(rf"{CHECKPOINTS}/({NAME.pattern})/(.+)")


class Problem(NamedTuple):
    """Why something is not copied: a checkpoint, or (None) whatever was next."""

    kind: str
    update: int | None
    message: str
    is_lasting: bool


def files_of(checkpoint: Path) -> dict[str, Digest]:
    """The files of a checkpoint but for its description, by POSIX name, as the description says that they are.

    Raises LabError if it is damaged, and FileNotFoundError if it is not there. The one place that knows its format.
    """
    text = (checkpoint / DESCRIPTION).read_bytes()
    try:
        description = json.loads(text)
        listed = description["files"]
        found = {str(name): Digest(int(one["bytes"]), str(one["sha256"])) for name, one in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LabError(f"{checkpoint}: damaged: its {DESCRIPTION} cannot be read") from error
    if not found or not all(is_plain_name(name) and name != DESCRIPTION for name in found):
        raise LabError(f"{checkpoint}: damaged: its {DESCRIPTION} names files that cannot be its own")
    return found


def is_plain_name(name: str) -> bool:
    """Whether a name stays below the folder that it is relative to, on every system."""
    return bool(name) and not any(part in ("", ".", "..") or "\\" in part or ":" in part for part in name.split("/"))


def record_names(folder: RunFolder) -> list[str]:
    """The files of a run's folder that are copied beside its checkpoints."""
    names = []
    for parent, folders, files in os.walk(folder.path):
        is_top = Path(parent) == folder.path
        left_out = {CHECKPOINTS, LAST_CHECKPOINT, COPIES, LOCK} if is_top else set()
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(UNFINISHED_PREFIX)]
        kept = [name for name in files if name not in left_out and not name.startswith(UNFINISHED_PREFIX)]
        names += [(Path(parent) / name).relative_to(folder.path).as_posix() for name in kept]
    return sorted(names)


class Copying:
    """The copies of one run: what is known of them, and the work of a round. One thread calls `bring`."""

    def __init__(self, folder: RunFolder, storage: Storage, tell: Callable[[dict[str, Any]], None]) -> None:
        """`tell` is given a fact for each checkpoint that was copied."""
        self.folder, self.storage, self._tell = folder, storage, tell
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.record: dict[str, Digest] = {}
        self.is_over = False
        """Set from another thread; the round ends soon, and nothing of the folder is written any more."""
        self._saving = threading.Lock()
        self._unsaved = ""
        self._digests: dict[str, tuple[tuple[int, int], Digest]] = {}
        self._recall()
        self.let_go()

    def bring(self) -> list[Problem]:
        """One round; what it could not do. A failure of the storage ends it, since what follows would fail as well."""
        problems: list[Problem] = []
        try:
            there = self.storage.sizes()
            problems += self._bring_record(there)
            problems += self._bring_checkpoints(there)
            self.save()
            self.storage.put_bytes(self.folder.file(COPIES).read_bytes(), COPIES)
        except StorageError as error:
            problems.append(Problem(error.kind, None, str(error), error.is_lasting))
        except OSError as error:
            message = f"{error.filename or self.folder.path}: cannot be read: {error.strerror or error}"
            problems.append(Problem("local", None, message, False))
        if self._unsaved:
            problems.append(Problem("local", None, self._unsaved, False))
        return problems

    def mark(self, problems: list[Problem]) -> None:
        """Writes down why what is not copied is not, and saves it."""
        self._expect(list_checkpoints(self.folder.file(CHECKPOINTS)))
        general = next((one.message for one in problems if one.update is None), "")
        own = {str(one.update): one.message for one in problems if one.update is not None}
        for update, entry in list(self.checkpoints.items()):
            message = own.get(update, general)
            if entry["state"] != "verified" and message:
                self.checkpoints[update] = {**entry, "state": "failed", "message": message, "utc": utc_now()}
        self.save()

    def save(self) -> None:
        """Writes `copies.json`. A disk that refuses it is a problem of the round: the copies themselves go on."""
        checkpoints, record = dict(self.checkpoints), dict(self.record)
        value = {
            "address": self.storage.address,
            "checkpoints": {update: checkpoints[update] for update in sorted(checkpoints, key=int)},
            "record": {name: {"bytes": one.size, "sha256": one.sha256} for name, one in sorted(record.items())},
        }
        with self._saving:
            if self.is_over:
                return
            try:
                self.folder.write_json(COPIES, value)
                self._unsaved = ""
            except LabError as error:
                self._unsaved = str(error)

    def end(self) -> None:
        """From here on the folder is left alone, wherever a round is."""
        with self._saving:
            self.is_over = True
        self.let_go()

    def let_go(self) -> None:
        """Removes the second names of a checkpoint that was being uploaded."""
        shutil.rmtree(self.folder.file(HELD), ignore_errors=True)

    def is_verified(self, update: int, description: bytes) -> bool:
        """Whether the copy of the very checkpoint with this description was verified."""
        entry = self.checkpoints.get(str(update), {})
        return entry.get("state") == "verified" and entry.get("sha256") == digest_of(description).sha256

    def unverified_checkpoints(self) -> list[Checkpoint]:
        """The checkpoints here of which no copy is known to be right."""
        missing = []
        for checkpoint in list_checkpoints(self.folder.file(CHECKPOINTS)):
            with contextlib.suppress(OSError):
                if not self.is_verified(checkpoint.update, (checkpoint.path / DESCRIPTION).read_bytes()):
                    missing.append(checkpoint)
        return missing

    def unverified_record(self) -> list[str]:
        """The files of the record of which the storage does not have what is here now."""
        return [name for name in record_names(self.folder) if self.record.get(name) != self._digest_here(name)]

    def _recall(self) -> None:
        """Reads what another process of the run knew; what is not as it should be is not known."""
        try:
            known = self.folder.read_json(COPIES, address=str, checkpoints=dict, record=dict)
            if known["address"] != self.storage.address:
                return
            self.record = {name: Digest(int(one["bytes"]), str(one["sha256"])) for name, one in known["record"].items()}
            self.checkpoints = {
                str(int(update)): dict(entry) for update, entry in known["checkpoints"].items() if entry["state"]
            }
        except (LabError, KeyError, TypeError, ValueError, AttributeError):
            self.record, self.checkpoints = {}, {}

    # --- the record ---

    def _bring_record(self, there: dict[str, int]) -> list[Problem]:
        """Uploads each file that changed since it was verified. First of all, since it is small, and a checkpoint
        without its config is of little use."""
        wrong = []
        for name in record_names(self.folder):
            if self.is_over:
                break
            with contextlib.suppress(FileNotFoundError):  # it was there a moment ago, and is no more part of the record
                wrong += [] if self._bring_file(name, there) else [name]
        message = f"{self.storage.address}: not what was uploaded: {', '.join(wrong)}; it is tried again"
        return [Problem("differs", None, message, False)] if wrong else []

    def _bring_file(self, name: str, there: dict[str, int]) -> bool:
        """Whether the storage has a file of the record as it is, or as it was when it was uploaded just now."""
        path = self.folder.file(name)
        digest = self._digest_here(name)
        if self.record.get(name) == digest and there.get(name) == digest.size:
            return True
        self.record.pop(name, None)
        if digest.size <= IN_MEMORY_BYTES or name == METRICS:
            content = path.read_bytes()
            digest = digest_of(content)
            self.storage.put_bytes(content, name)
        else:
            self.storage.put(path, name)
        if not self.storage.verifies(name, digest):
            return False
        self.record[name] = digest
        return True

    def _digest_here(self, name: str) -> Digest:
        """Of a file in the folder; read again only if it changed."""
        status = self.folder.file(name).stat()
        seen = (status.st_size, status.st_mtime_ns)
        if name not in self._digests or self._digests[name][0] != seen:
            digest = Digest(status.st_size, sha256_of_file(self.folder.file(name)))
            self._digests[name] = (seen, digest)
        return self._digests[name][1]

    # --- the checkpoints ---

    def _bring_checkpoints(self, there: dict[str, int]) -> list[Problem]:
        """Copies what is not copied, the newest first: it is what a lost machine would be gone on from. After each,
        there may be a newer one."""
        problems: dict[int, Problem] = {}
        confirmed: set[int] = set()
        while not self.is_over:
            here = list_checkpoints(self.folder.file(CHECKPOINTS))
            self._expect(here)
            rest = [one for one in here if one.update not in confirmed and one.update not in problems]
            if not rest:
                self._remove_rotated({one.update for one in here}, confirmed)
                break
            update = rest[0].update
            problem = self._bring_checkpoint(rest[0], there)
            if problem is not None:
                problems[update] = problem
            elif self.checkpoints[str(update)]["state"] == "verified":
                confirmed.add(update)
        return list(problems.values())

    def _expect(self, here: list[Checkpoint]) -> None:
        """Notes those that are still to be copied, before anything of them is in the storage."""
        new = [str(one.update) for one in here if str(one.update) not in self.checkpoints]
        for update in new:
            self.checkpoints[update] = {"state": "pending", "bytes": 0, "utc": utc_now(), "message": ""}
        if new:
            self.save()

    def _bring_checkpoint(self, checkpoint: Checkpoint, there: dict[str, int]) -> Problem | None:
        """Copies one checkpoint, unless it is copied."""
        update, name = str(checkpoint.update), f"{CHECKPOINTS}/{checkpoint.path.name}"
        began = time.monotonic()
        try:
            with held(self.folder, checkpoint) as path:
                description = (path / DESCRIPTION).read_bytes()
                files = files_of(path)
                sizes = {f"{name}/{file}": digest.size for file, digest in files.items()}
                sizes[f"{name}/{DESCRIPTION}"] = len(description)
                if self.is_verified(checkpoint.update, description) and sizes.items() <= there.items():
                    return None
                self.checkpoints[update] = {
                    "state": "pending",
                    "bytes": sum(sizes.values()),
                    "utc": utc_now(),
                    "message": "",
                    "sha256": digest_of(description).sha256,
                }
                self.save()
                wrong = self._upload(path, name, files, description, there)
        except FileNotFoundError:
            if checkpoint.path.exists():
                raise
            return None  # rotated away in the middle, where it could not be held
        except StorageError:
            raise
        except LabError as error:
            return Problem("damaged", checkpoint.update, f"{error}; not copied", True)
        if self.is_over:
            return None
        if wrong:
            message = f"{self.storage.address}/{name}: {wrong}; uploaded once more at the next try"
            return Problem("differs", checkpoint.update, message, False)
        self.checkpoints[update] = {**self.checkpoints[update], "state": "verified", "utc": utc_now()}
        self.save()
        self._tell(
            {
                "event": "copied",
                "update": checkpoint.update,
                "address": f"{self.storage.address}/{name}",
                "bytes": sum(sizes.values()),
                "seconds": time.monotonic() - began,
            }
        )
        return None

    def _upload(
        self, path: Path, name: str, files: dict[str, Digest], description: bytes, there: dict[str, int]
    ) -> str:
        """Uploads the files of a checkpoint that are not there as they should be, and its description last; what is
        wrong with the copy, or nothing. Keeps `there` true."""
        last = f"{name}/{DESCRIPTION}"
        wanted = digest_of(description)
        if last in there and (there[last] != wanted.size or not self.storage.verifies(last, wanted)):
            self.storage.remove(last)
            del there[last]
        for file, digest in files.items():
            target = f"{name}/{file}"
            if there.get(target) == digest.size and self.storage.verifies(target, digest):
                continue  # an earlier try came so far
            if last in there:
                self.storage.remove(last)
                del there[last]
            if self.is_over:
                return "not finished"
            there.pop(target, None)
            self.storage.put(path / file, target)
            there[target] = digest.size
            if not self.storage.verifies(target, digest):
                # Either the copy is wrong, or what was read here; the next round asks which.
                is_damaged = Digest((path / file).stat().st_size, sha256_of_file(path / file)) != digest
                if is_damaged:
                    raise LabError(f"{path.name}/{file}: damaged on this machine: its SHA-256 differs")
                return f"{file} there differs from what was uploaded"
        if last not in there:
            self.storage.put_bytes(description, last)
            there[last] = len(description)
            if not self.storage.verifies(last, wanted):
                return f"{DESCRIPTION} there differs from what was uploaded"
        return ""

    def _remove_rotated(self, here: set[int], confirmed: set[int]) -> None:
        """Removes the copies of checkpoints that this folder had and keeps no longer, older than a verified one."""
        newest = max(confirmed, default=-1) if here else -1
        old = sorted(update for update in map(int, self.checkpoints) if update not in here and update < newest)
        if not old:
            return
        parts = {name: COPIED_NAME.fullmatch(name) for name in self.storage.sizes()}  # some may be of this very round
        updates = {name: int(match[2]) for name, match in parts.items() if match}
        for update in old:
            names = [name for name, its_update in updates.items() if its_update == update]
            # The description first, so that no copy looks whole that is not.
            for name in sorted(names, key=lambda name: not name.endswith(f"/{DESCRIPTION}")):
                self.storage.remove(name)
            del self.checkpoints[str(update)]


@contextlib.contextmanager
def held(folder: RunFolder, checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder with the checkpoint's files that stays though the checkpoint is rotated away: copies to a slow storage
    would else never become whole. Hard links, so it costs no room of its own; where there are none, the checkpoint."""
    aside = folder.file(HELD)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        try:
            for path in checkpoint.path.rglob("*"):
                if path.is_file():
                    target = aside / path.relative_to(checkpoint.path)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(path, target)
            is_held = aside.exists() and checkpoint.path.exists()
        except FileNotFoundError:
            raise
        except OSError:
            is_held = False
        yield aside if is_held else checkpoint.path
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
