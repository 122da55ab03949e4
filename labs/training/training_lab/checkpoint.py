"""States to resume from: one folder each, written aside, synced, hashed, and renamed when it is whole.

    checkpoints/update-000100/state.pt            tensors and plain types; loads with weights_only=True
    checkpoints/update-000100/checkpoint.json     size and SHA-256 of the state, and what it belongs to
    checkpoint.pt                                 the last state, under the name that people look for

A folder with that name is complete, because it got its name last; whether it is still intact, its hash says. So
there is always a whole checkpoint once the first was saved, wherever the process is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from experiment_runner.durable import UNFINISHED_PREFIX, json_text, sha256_of_file, sync_file, sync_folder
from training_lab.errors import LabError
from training_lab.record import LAST_CHECKPOINT

FORMAT = 1
"""Raised when a state of an older version can no longer be read."""
STATE = "state.pt"
DESCRIPTION = "checkpoint.json"
DESCRIBED = {"bytes": int, "sha256": str, "metrics_lines": int, "weights_sha256": str}
NAME = re.compile(r"update-(\d{6,})")


class Checkpoint(NamedTuple):
    """A checkpoint on disk, whole by its name."""

    update: int
    path: Path

    def describe(self) -> dict[str, Any]:
        """Its description. Raises LabError if that is damaged."""
        try:
            description: dict[str, Any] = json.loads((self.path / DESCRIPTION).read_text("utf-8"))
            if description["format"] != FORMAT:
                raise LabError(f"{self.path}: written in format {description['format']}; this version reads {FORMAT}")
            for key, kind in DESCRIBED.items():
                if not isinstance(description[key], kind):
                    raise TypeError(key)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{self.path}: damaged: its {DESCRIPTION} cannot be read") from error
        return description

    def verify(self) -> dict[str, Any]:
        """Compares the state with its description, and returns that. Raises LabError if it is damaged."""
        description = self.describe()
        state = self.path / STATE
        try:
            size = state.stat().st_size
            sha256 = sha256_of_file(state)
        except OSError as error:
            raise LabError(f"{self.path}: damaged: {STATE} cannot be read: {error.strerror}") from error
        if size != description["bytes"]:
            raise LabError(f"{self.path}: damaged: {STATE} has {size} bytes, had {description['bytes']}")
        if sha256 != description["sha256"]:
            raise LabError(f"{self.path}: damaged: the SHA-256 of {STATE} differs")
        return description

    def load(self) -> dict[str, Any]:
        """The state, on the CPU. Verify before."""
        state: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        return state


class HashingFile:
    """A file that hashes what is written to it. torch writes checkpoints from front to back."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._file.write(data)
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The whole checkpoints of a folder, newest first."""
    matches = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((Checkpoint(int(match[1]), path) for match, path in matches if match), reverse=True)


def save_checkpoint(folder: Path, update: int, state: dict[str, Any], facts: dict[str, Any]) -> Checkpoint:
    """Saves `state` as the checkpoint after `update`, of which there is none yet.

    `facts` are what its description says besides: at least `metrics_lines` and `weights_sha256`. Raises LabError if the
    disk does not take it; the older checkpoints are then as they were.
    """
    final = folder / f"update-{update:06d}"
    aside = folder / f"{UNFINISHED_PREFIX}{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    written = 0
    try:
        aside.mkdir(parents=True)
        with open(aside / STATE, "wb") as file:
            hashing = HashingFile(file)
            try:
                torch.save(state, hashing)  # type: ignore[arg-type]  # it asks for write and flush only
            finally:
                written = hashing.size
            sync_file(file)
        description = {
            "format": FORMAT,
            "update": update,
            "bytes": written,
            "sha256": hashing.digest.hexdigest(),
            **facts,
        }
        with open(aside / DESCRIPTION, "w", encoding="utf-8") as text_file:
            text_file.write(json_text(description))
            sync_file(text_file)
        sync_folder(aside)
        os.rename(aside, final)
        sync_folder(folder)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        shutil.rmtree(aside, ignore_errors=True)
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise LabError(
            f"{final}: cannot be saved: {cause.strerror} after {written:,} bytes, {free:,} bytes are free; "
            "make room and give the same command again: the checkpoints before it are whole"
        ) from error
    link_last(final / STATE, folder.parent / LAST_CHECKPOINT)
    return Checkpoint(update, final)


def link_last(state: Path, name: Path) -> None:
    """Gives the last state its second name: a hard link, or a copy where the file system has none."""
    aside = name.with_name(f"{UNFINISHED_PREFIX}{name.name}")
    try:
        aside.unlink(missing_ok=True)
        try:
            os.link(state, aside)
        except OSError:
            with open(state, "rb") as source, open(aside, "wb") as target:
                shutil.copyfileobj(source, target)
                sync_file(target)
        os.replace(aside, name)
    except OSError as error:
        raise LabError(f"{name}: cannot be made: {error.strerror}; the checkpoint itself, {state}, is whole") from error


def remove_old(folder: Path, keep_last: int, best_update: int | None) -> None:
    """Removes all but the newest `keep_last` checkpoints and the best one, and what a crash left unfinished."""
    try:
        for old in list_checkpoints(folder)[keep_last:]:
            if old.update != best_update:
                # Renamed first, so that a crash in the middle leaves no folder that looks whole.
                os.rename(old.path, old.path.with_name(f"{UNFINISHED_PREFIX}{old.path.name}"))
        for left in folder.glob(f"{UNFINISHED_PREFIX}*"):
            shutil.rmtree(left)
    except OSError as error:
        raise LabError(f"{folder}: old checkpoints cannot be removed: {error.filename}: {error.strerror}") from error


def newest_good(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and what is wrong with those that are newer.

    None if there is no checkpoint at all. Raises LabError if there are some and all are damaged.
    """
    damaged = []
    for checkpoint in list_checkpoints(folder):
        try:
            checkpoint.verify()
        except LabError as error:
            damaged.append(str(error))
        else:
            return checkpoint, damaged
    if damaged:
        raise LabError("no checkpoint verifies, and starting afresh would hide it: " + "; ".join(damaged))
    return None, []


def set_aside_damaged(folder: Path, good: Checkpoint | None) -> None:
    """Renames what is newer than the checkpoint to go on from, so that nothing takes it for a state of the run."""
    for checkpoint in list_checkpoints(folder):
        if good is None or checkpoint.update > good.update:
            aside = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(checkpoint.path, aside)


def weights_sha256(model: torch.nn.Module) -> str:
    """One hash over all parameters, with their names: equal hashes are equal weights, bit for bit."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode("utf-8") + b"\0")
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
