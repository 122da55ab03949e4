"""Saving while training goes on: the loop waits for a copy of the state in memory, and a thread writes that.

Never two at once. What went wrong in the thread is raised in the loop, at the next update or at the end. Older states
are removed only when the new one was read back and is right.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from training_lab.checkpoint import Checkpoint, remove_old, save_checkpoint, save_sharded_checkpoint
from training_lab.config import CheckpointConfig
from training_lab.copies import Copier
from training_lab.distributed import Processes
from training_lab.record import CHECKPOINTS, RunFolder
from training_lab.tracking import Row


class Saver:
    """Saves the states of one run. Entered for as long as it trains; `saved_update` is the last that was begun."""

    def __init__(
        self,
        folder: RunFolder,
        config: CheckpointConfig,
        saved_update: int,
        processes: Processes,
        is_sharded: bool,
        copier: Copier | None,
    ) -> None:
        self.folder, self.config, self.saved_update, self.processes = folder, config, saved_update, processes
        self.copier = copier
        self._copy = HostCopy(processes if is_sharded else None)
        self._group = dist.new_group(backend="gloo") if is_sharded else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._running: Future[Row] | None = None
        self._finished: list[Row] = []

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def save(self, update: int, state: dict[str, Any], facts: dict[str, Any], best_update: int | None) -> None:
        """Begins to save the state after `update`, once the last one is done. Raises what went wrong with that."""
        started = time.perf_counter()
        self.wait()
        in_background = self.config.background
        copied = self._copy.take(state) if in_background else state
        blocked = time.perf_counter() - started
        self.saved_update = update

        def work() -> Row:
            checkpoint = self._write(update, copied, facts)
            if self.processes.is_first:
                remove_old(self.folder.file(CHECKPOINTS), self.config, best_update, checkpoint)
            if self.copier is not None:
                self.copier.notify()
            seconds = time.perf_counter() - started
            path = checkpoint.path.relative_to(self.folder.path).as_posix()
            waited = blocked if in_background else seconds
            return {"event": "checkpoint", "update": update, "path": path, "seconds": seconds, "blocked_s": waited}

        if in_background:
            self._running = self._pool.submit(work)
        else:
            self._finished.append(work())

    def _write(self, update: int, state: dict[str, Any], facts: dict[str, Any]) -> Checkpoint:
        checkpoints = self.folder.file(CHECKPOINTS)
        if self._group is None:
            return save_checkpoint(checkpoints, update, state, facts)
        return save_sharded_checkpoint(checkpoints, update, state, facts, self.processes.rank, self._group)

    def wait(self) -> None:
        """Waits until what was begun is on the disk. Raises what went wrong."""
        if self._running is not None:
            running, self._running = self._running, None
            self._finished.append(running.result())

    def news(self) -> list[Row]:
        """What has come to the disk, and to where copies go, since this was asked last: facts for the run's events.
        Raises what went wrong with the disk."""
        if self._running is not None and self._running.done():
            self.wait()
        finished, self._finished = self._finished, []
        return finished + (self.copier.news() if self.copier else [])


class HostCopy:
    """A copy of a state in the machine's memory, made again and again in the same place: fresh memory costs three times
    as much as the copying."""

    def __init__(self, sharing: Processes | None) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._mesh = init_device_mesh("cpu", (sharing.world_size,)) if sharing else None

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copies every tensor; the last copy is overwritten."""
        copied: dict[str, Any] = self._take(state, "")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what is not on CUDA was copied at once
        return copied

    def _take(self, value: Any, place: str) -> Any:
        if isinstance(value, DTensor):
            local = self._take(value.to_local(), place)
            assert self._mesh is not None
            shape, stride = value.shape, value.stride()
            return DTensor.from_local(local, self._mesh, value.placements, run_check=False, shape=shape, stride=stride)
        if torch.is_tensor(value):
            kept = self._kept.get(place)
            if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
                kept = self._kept[place] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            return kept.copy_(value.detach(), non_blocking=value.is_cuda)
        if isinstance(value, dict):
            return {key: self._take(one, f"{place}/{key}") for key, one in value.items()}
        if isinstance(value, list):
            return [self._take(one, f"{place}/{number}") for number, one in enumerate(value)]
        return value
