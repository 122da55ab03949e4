"""States to resume from: one folder each, written aside, synced, hashed, and renamed when it is whole.

    checkpoints/update-000100/state.pt            tensors and plain types; loads with weights_only=True
    checkpoints/update-000100/parts/              the tensors, where several processes have a part of each
    checkpoints/update-000100/checkpoint.json     size and SHA-256 of each file, and what they belong to
    checkpoint.pt                                 the last state, under the name that people look for

A folder with that name is complete, because it got its name last; whether it is still intact, its hashes say. So
there is always a whole checkpoint once the first was saved, wherever the process is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from experiment_runner.durable import UNFINISHED_PREFIX, json_text, sha256_of_file, sync_file, sync_folder
from training_lab.config import CheckpointConfig
from training_lab.errors import LabError
from training_lab.parallel import whole_of
from training_lab.record import CONFIG, LAST_CHECKPOINT
from training_lab.sharded import join_tensors, own_parts, read_parts, split_tensors, write_parts

FORMAT = 2
"""Raised when a state of an older version can no longer be read."""
STATE = "state.pt"
PARTS = "parts"
DESCRIPTION = "checkpoint.json"
DESCRIBED = {"files": dict, "metrics_lines": int, "weights_sha256": str}
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
            if not all(isinstance(one["bytes"], int) and one["sha256"] for one in description["files"].values()):
                raise TypeError("files")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{self.path}: damaged: its {DESCRIPTION} cannot be read") from error
        return description

    def verify(self) -> dict[str, Any]:
        """Compares the files with their description, and returns that. Raises LabError if one is damaged."""
        description = self.describe()
        for name, expected in description["files"].items():
            try:
                size = (self.path / name).stat().st_size
                sha256 = sha256_of_file(self.path / name)
            except OSError as error:
                raise LabError(f"{self.path}: damaged: {name} cannot be read: {error.strerror}") from error
            if size != expected["bytes"]:
                raise LabError(f"{self.path}: damaged: {name} has {size} bytes, had {expected['bytes']}")
            if sha256 != expected["sha256"]:
                raise LabError(f"{self.path}: damaged: the SHA-256 of {name} differs")
        return description

    def load(self) -> dict[str, Any]:
        """The state, whole, on the CPU. Verify before."""
        state: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        parts = self.path / PARTS
        return join_tensors(state, read_parts(parts)) if parts.is_dir() else state


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
    """The whole checkpoints of a run, newest first. One that says it is another run's is passed over."""
    matches = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    found = sorted((Checkpoint(int(match[1]), path) for match, path in matches if match), reverse=True)
    own = run_of(folder.parent / CONFIG, "uid")
    return [one for one in found if own is None or run_of(one.path / DESCRIPTION, "run") in (None, own)]


def run_of(path: Path, key: str) -> str | None:
    """Which run a JSON file says that it belongs to; None if it does not."""
    try:
        found = json.loads(path.read_text("utf-8")).get(key)
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def save_checkpoint(folder: Path, update: int, state: dict[str, Any], facts: dict[str, Any]) -> Checkpoint:
    """Saves `state` as the checkpoint after `update`, of which there is none yet.

    `facts` are what its description says besides, at least `metrics_lines`. Raises LabError if the disk does not take
    it; the older checkpoints are then as they were.
    """
    checkpoint = Checkpoint(update, folder / f"update-{update:06d}")
    aside = begin_aside(checkpoint)
    with removing_on_error(checkpoint, aside):
        files = {STATE: write_state(aside / STATE, state)}
        finish(checkpoint, aside, {"files": files, "weights_sha256": hash_weights(state["model"]), **facts})
    link_last(checkpoint.path, folder.parent / LAST_CHECKPOINT)
    return checkpoint


def save_sharded_checkpoint(
    folder: Path, update: int, state: dict[str, Any], facts: dict[str, Any], rank: int, group: dist.ProcessGroup
) -> Checkpoint:
    """The same for a state that lies in parts in all processes, which all call this and see the folder. `facts` has
    the `weights_sha256` as well. Raises LabError in all of them if the disk of one does not take it."""
    checkpoint = Checkpoint(update, folder / f"update-{update:06d}")
    aside = aside_of(checkpoint)
    plain, tensors = split_tensors(state)
    try:
        with agreeing(group):
            if rank == 0:
                begin_aside(checkpoint)
        write_parts(aside / PARTS, tensors, group)
        own: dict[str, Any] = {}
        with agreeing(group):
            for path in own_parts(aside / PARTS, rank):
                own[path.relative_to(aside).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
        gathered: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
        with agreeing(group):
            if rank == 0:
                files = {STATE: write_state(aside / STATE, plain)}
                for parts in gathered:
                    files |= parts
                sync_folder(aside / PARTS)
                finish(checkpoint, aside, {"files": files, **facts})
                link_last(checkpoint.path, folder.parent / LAST_CHECKPOINT)
    except LabError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise LabError(f"{checkpoint.path}: cannot be saved: {error}; the checkpoints before it are whole") from error
    return checkpoint


@contextlib.contextmanager
def agreeing(group: dist.ProcessGroup) -> Iterator[None]:
    """Raises LabError in all processes if what is done within failed in one."""
    failure = None
    try:
        yield
    except Exception as error:  # whatever it is, the others must hear of it
        failure = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
    heard: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, failure, group=group)
    for rank, message in enumerate(heard):
        if message is not None:
            raise LabError(f"process {rank}: {message}")


def aside_of(checkpoint: Checkpoint) -> Path:
    """The folder in which a checkpoint is made."""
    return checkpoint.path.with_name(f"{UNFINISHED_PREFIX}{checkpoint.path.name}")


def begin_aside(checkpoint: Checkpoint) -> Path:
    """Makes it, empty."""
    aside = aside_of(checkpoint)
    if checkpoint.path.exists():
        raise LabError(f"{checkpoint.path}: is another run's checkpoint, and in the way of this one's: move it away")
    with removing_on_error(checkpoint, aside):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    return aside


def write_state(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Writes and syncs a state. Returns its size and hash."""
    with open(path, "wb") as file:
        hashing = HashingFile(file)
        torch.save(state, hashing)  # type: ignore[arg-type]  # it asks for write and flush only
        sync_file(file)
    return {"bytes": hashing.size, "sha256": hashing.digest.hexdigest()}


def finish(checkpoint: Checkpoint, aside: Path, facts: dict[str, Any]) -> None:
    """Writes the description, and gives the folder its name."""
    own = run_of(checkpoint.path.parent.parent / CONFIG, "uid")
    description = {"format": FORMAT, "run": own, "update": checkpoint.update, **facts}
    with open(aside / DESCRIPTION, "w", encoding="utf-8") as text_file:
        text_file.write(json_text(description))
        sync_file(text_file)
    sync_folder(aside)
    os.rename(aside, checkpoint.path)
    sync_folder(checkpoint.path.parent)


@contextlib.contextmanager
def removing_on_error(checkpoint: Checkpoint, aside: Path) -> Iterator[None]:
    """Turns what the disk refuses into a LabError, and leaves nothing unfinished behind."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        written = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file())
        shutil.rmtree(aside, ignore_errors=True)
        folder = checkpoint.path.parent
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise LabError(
            f"{checkpoint.path}: cannot be saved: {cause.strerror} after {written:,} bytes, {free:,} bytes are free; "
            "make room and give the same command again: the checkpoints before it are whole"
        ) from error


def link_last(checkpoint: Path, name: Path) -> None:
    """Gives the last state its second name: a hard link, or a copy where the file system has none. A state in parts is
    no one file; then nothing has that name, rather than an older state."""
    state, aside = checkpoint / STATE, name.with_name(f"{UNFINISHED_PREFIX}{name.name}")
    try:
        if (checkpoint / PARTS).is_dir():
            name.unlink(missing_ok=True)
            return
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


def remove_old(folder: Path, config: CheckpointConfig, best_update: int | None, newest: Checkpoint) -> None:
    """Removes what need not be kept, and what a crash left unfinished; but nothing before `newest` was read back and is
    right. Kept are the newest `keep_last`, the best one, and each multiple of `keep_every`."""
    old = [
        one
        for one in list_checkpoints(folder)[config.keep_last :]
        if one.update != best_update and not (config.keep_every and one.update % config.keep_every == 0)
    ]
    if old:
        newest.verify()
    try:
        for one in old:
            # Renamed first, so that a crash in the middle leaves no folder that looks whole.
            os.rename(one.path, one.path.with_name(f"{UNFINISHED_PREFIX}{one.path.name}"))
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
    """One hash over all parameters, with their names: equal hashes are equal weights, bit for bit. Where processes have
    a part of each, all of them must call this."""
    return hash_weights({name: whole_of(parameter.detach()) for name, parameter in model.named_parameters()})


def hash_weights(weights: dict[str, torch.Tensor]) -> str:
    """The same from the weights by their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode("utf-8") + b"\0")
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
