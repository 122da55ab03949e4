"""Watching chosen updates at work: a timeline of their operations, a history of their allocations.

Which updates is known beforehand, from the config and from what the run's folder holds already. Nothing that is
recorded changes what is trained, and nothing that goes wrong in recording stops it: it becomes an event of the run.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from experiment_runner.durable import write_atomically
from training_lab.config import MeasureConfig
from training_lab.memory_events import Change, Phase, memory_picture
from training_lab.phases import Phases
from training_lab.record import MEMORY_EVENTS, MEMORY_SNAPSHOT, TIMELINE, RunFolder
from training_lab.trace import PHASES, summarise_trace
from training_lab.tracking import Recorder

MOST_MEMORY_EVENTS = 1_000_000
"""Of CUDA's allocator, each with its Python stack: some hundred megabytes at the most."""


class Held(NamedTuple):
    """Bytes in tensors before an update."""

    bytes: int
    gradients: int
    """The part of them that the update frees when it begins: the last one's gradients."""


def plan_observation(
    measure: MeasureConfig, first: int, last: int, has_timeline: bool, has_memory: bool
) -> dict[int, str]:
    """What is watched in a process that trains the updates from `first` to `last`, by update.

    What the folder has already is not recorded again. What an earlier process should have recorded and has not, since
    it was killed, is recorded as early as this one can.
    """
    plan: dict[int, str] = {}
    if measure.timeline_from and not has_timeline:
        begin = max(measure.timeline_from, first)
        plan.update(dict.fromkeys(range(begin, begin + measure.timeline_updates), "timeline"))
        if first < begin <= last:
            plan[begin - 1] = "timeline warm-up"
    if measure.memory_update and not has_memory:
        update = max(measure.memory_update, first)
        while update in plan:
            update += 1
        plan[update] = "memory"
    return {update: what for update, what in plan.items() if first <= update <= last}


class Observation:
    """Watches the updates of one process as planned. Entered for as long as it trains."""

    def __init__(
        self,
        plan: dict[int, str],
        folder: RunFolder,
        recorder: Recorder,
        phases: Phases,
        device: torch.device,
        held: Callable[[], Held],
    ) -> None:
        self.plan, self.folder, self.recorder = plan, folder, recorder
        self.phases, self.device, self.held = phases, device, held
        self._timeline: Timeline | None = None

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timeline is not None:  # stopped in between: what there is of it is kept
            self._finish_timeline()

    def is_edge(self, update: int) -> bool:
        """Whether a stretch of updates that are not watched ends with this one."""
        return update in self.plan or update + 1 in self.plan

    @contextlib.contextmanager
    def of(self, update: int) -> Iterator[dict[str, str]]:
        """Watches an update if that is planned. Gives what its row says of it."""
        what = self.plan.get(update)
        if what is None:
            yield {}
            return
        with self._memory(update) if what == "memory" else self._timeline_of(update, what):
            yield {"observed": what}

    @contextlib.contextmanager
    def _timeline_of(self, update: int, what: str) -> Iterator[None]:
        if self._timeline is None:
            with self._trying(TIMELINE):
                self._timeline = Timeline(self.device, has_warm_up=what != "timeline")
        with record_function(f"update {update}"), watched(self.phases, record_function):
            yield
        if self._timeline is None:  # it could not be begun, which was told
            self.plan = {later: other for later, other in self.plan.items() if other == "memory"}
            return
        with self._trying(TIMELINE):
            self._timeline.step()
        if self.plan.get(update + 1) != "timeline":
            self._finish_timeline()

    def _finish_timeline(self) -> None:
        timeline, self._timeline = self._timeline, None
        assert timeline is not None
        with self._trying(TIMELINE):
            started = time.perf_counter()
            trace = timeline.finish(self.folder.file(TIMELINE))
            if trace is None:  # stopped while it warmed up
                return
            summary = summarise_trace(trace["traceEvents"])
            write_json(self.folder.file(TIMELINE), trace)
            self._tell("timeline", TIMELINE, started, update=summary["updates"][-1], summary=summary)

    @contextlib.contextmanager
    def _memory(self, update: int) -> Iterator[None]:
        history: CpuHistory | CudaHistory | None = None
        with self._trying(MEMORY_EVENTS):
            history, held = make_history(self.device), self.held()
            history.start()
        if history is None:
            yield
            return
        try:
            with watched(self.phases, history.phase):
                yield
        finally:  # also where the update has failed
            with self._trying(MEMORY_EVENTS):
                history.stop()
        with self._trying(MEMORY_EVENTS):
            started = time.perf_counter()
            picture = history.picture(self.folder, held)
            head = {"update": update, "device": str(self.device), "source": history.source}
            write_json(self.folder.file(MEMORY_EVENTS), {**head, **picture})
            self._tell("memory", MEMORY_EVENTS, started, update=update)

    def _tell(self, event: str, path: str, started: float, **facts: Any) -> None:
        """Writes down that a file was made, and how long that took."""
        self.recorder.event(event, path=path, seconds=time.perf_counter() - started, **facts)

    @contextlib.contextmanager
    def _trying(self, path: str) -> Iterator[None]:
        """Training goes on whatever goes wrong here; that it did becomes an event of the run."""
        try:
            yield
        except Exception as error:  # whatever a profiler may raise
            self.recorder.event("not recorded", path=path, message=f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def watched(phases: Phases, watch: Callable[[str], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Has the parts of an update marked by `watch` for as long as this is entered."""
    phases.watch = watch
    try:
        yield
    finally:
        phases.watch = None


class Timeline:
    """torch's profiler over some updates, of which the first only warms it up."""

    def __init__(self, device: torch.device, has_warm_up: bool) -> None:
        """Begins. Without an update to warm up on, a small product has to do."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1_000_000))
        self._steps = 0
        self._profiler.start()
        if not has_warm_up:
            torch.ones(8, 8) @ torch.ones(8, 8)
            self.step()

    def step(self) -> None:
        """Ends an update."""
        self._profiler.step()
        self._steps += 1

    def finish(self, path: Path) -> dict[str, Any] | None:
        """Stops, and gives the trace; None if it has only warmed up. Uses a file beside `path` for it."""
        self._profiler.stop()
        return exported(self._profiler, path) if self._steps > 1 else None


def exported(profiler: profile, path: Path) -> dict[str, Any]:
    """The trace of a profiler that was stopped, without what names this machine."""
    aside = path.with_name(f".unfinished-trace-{path.name}")
    try:
        profiler.export_chrome_trace(str(aside))
        trace: dict[str, Any] = json.loads(aside.read_text("utf-8", errors="replace"))
    finally:
        aside.unlink(missing_ok=True)
    for key in ("host_name", "traceName"):
        trace.pop(key, None)
    return trace


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a file of many numbers, without spaces."""
    write_atomically(path, json.dumps(value, separators=(",", ":")).encode("utf-8"))


class CpuHistory:
    """Allocations on the CPU, as torch's profiler sees them."""

    source = (
        "the memory events of torch's profiler, on the CPU: allocations and frees of tensors in the update. What was "
        "held before is counted from the weights, gradients, optimizer states and buffers; the last update's gradients "
        "are taken to be freed at the end of zero_grad"
    )

    def __init__(self, device: torch.device) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.phase: Callable[[str], contextlib.AbstractContextManager[Any]] = record_function

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def picture(self, folder: RunFolder, held: Held) -> dict[str, Any]:
        """The content of `memory-events.json`."""
        events = exported(self._profiler, folder.file(MEMORY_EVENTS))["traceEvents"]
        phases = [
            Phase(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in events
            if event.get("cat") == "user_annotation" and event["name"] in PHASES
        ]
        changes = [
            Change(event["ts"] / 1e6, event["args"]["Bytes"])
            for event in events
            if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
        ]
        freed = next(phase.end_s for phase in phases if phase.name == "zero_grad")
        return memory_picture([*changes, Change(freed, -held.gradients)], phases, held.bytes)


class CudaHistory:
    """Allocations on a GPU, as torch's allocator records them."""

    source = "the history of torch's CUDA allocator, which is in " + MEMORY_SNAPSHOT

    def __init__(self, device: torch.device) -> None:
        self.device, self.phases = device, list[Phase]()
        self._base_bytes = 0
        self._snapshot: dict[str, Any] = {}

    def start(self) -> None:
        self._base_bytes = torch.cuda.memory_allocated(self.device)
        record_history = torch.cuda.memory._record_memory_history
        record_history(enabled="all", context="alloc", stacks="python", max_entries=MOST_MEMORY_EVENTS)

    def stop(self) -> None:
        try:
            self._snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Marks a part in the snapshot, and by the clock that the allocator uses as well."""
        begin = time.time()
        with record_function(name):
            yield
        self.phases.append(Phase(name, begin, time.time()))

    def picture(self, folder: RunFolder, held: Held) -> dict[str, Any]:
        """The content of `memory-events.json`; the snapshot is written beside it. Raises ValueError if it is empty."""
        import pickle

        index = self.device.index or 0
        changes = [
            Change(event["time_us"] / 1e6, event["size"] if event["action"] == "alloc" else -event["size"])
            for event in self._snapshot["device_traces"][index]
            if event["action"] in ("alloc", "free_completed")
        ]
        if not changes:
            raise ValueError("the allocator recorded nothing")
        write_atomically(folder.file(MEMORY_SNAPSHOT), pickle.dumps(self._snapshot))
        return memory_picture(changes, self.phases, self._base_bytes)


def make_history(device: torch.device) -> CpuHistory | CudaHistory:
    """What tells of allocations on a device. Raises ValueError where nothing does."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"nothing tells of allocations on {device.type}")
    return CudaHistory(device) if device.type == "cuda" else CpuHistory(device)
