"""Watching updates at work: it changes no bit, and what it records is what happened."""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny, train_tiny

from training_lab import engine, observation, record
from training_lab import train as training
from training_lab.checkpoint import weights_sha256
from training_lab.config import MeasureConfig
from training_lab.data.dataset import prepare_dataset
from training_lab.engine import NonFiniteError, Process, observe, train
from training_lab.memory_peaks import PeakMemory
from training_lab.observation import CudaHistory, Held, Observation, plan_observation
from training_lab.phases import Phases
from training_lab.precision import Hardware, choose_hardware
from training_lab.record import RunFolder
from training_lab.stopping import StopRequest
from training_lab.summary import Outcome
from training_lab.trace import PHASES
from training_lab.tracking import MetricsWriter, Recorder, Row
from training_lab.trainer import Trainer, make_trainer
from training_lab.wall_clock import WallClock

WATCHED = (
    "measure.timeline_from=4",
    "measure.memory_update=8",
    "train.updates=9",
    "eval.every=0",
    "batch.micro_batches=2",
)


class Run:
    """A training in this process, in the current folder."""

    def __init__(self, *overrides: str) -> None:
        self.config = tiny(*overrides)
        self.folder, self.rows = RunFolder(Path.cwd()), list[Row]()
        hardware = choose_hardware(self.config)
        self.trainer: Trainer = make_trainer(self.config, hardware, prepare_dataset(self.config))

    def train(self, stop_after: int | None = None, segment: int = 1) -> Run:
        Path("checkpoints").mkdir(exist_ok=True)
        with MetricsWriter(Path("metrics.jsonl")) as writer:
            recorder = Recorder(writer, self.rows.append)
            peaks, observed = PeakMemory(self.trainer.hardware.device), observe(self.trainer, self.folder, recorder)
            process = Process(segment, stop_after, recorder, StopRequest(), WallClock(), peaks, observed)
            train(self.trainer, self.folder, process)
        return self

    @property
    def updates(self) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "update"]

    def observed(self) -> dict[int, str]:
        return {row["update"]: row["observed"] for row in self.updates if "observed" in row}

    def events(self, name: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "event" and row["event"] == name]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a timeline and a history of its memory, in a folder of its own."""
    with contextlib.chdir(tmp_path_factory.mktemp("watched")):
        run = Run(*WATCHED).train()
        run.folder = RunFolder(Path.cwd())
    return run


def test_being_watched_changes_no_bit(watched: Run) -> None:
    alone = Run(*WATCHED, "measure.timeline_from=0", "measure.memory_update=0").train()
    assert weights_sha256(alone.trainer.model) == weights_sha256(watched.trainer.model)
    kept = ("update", "loss", "grad_norm", "lr", "batch_sha256")
    seen, expected = ([[row[key] for key in kept] for row in run.updates] for run in (watched, alone))
    assert seen == expected
    assert alone.observed() == {}
    assert not any(Path(name).exists() for name in (record.TIMELINE, record.MEMORY_EVENTS))


def test_the_device_is_waited_for_where_something_comes_between_updates_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Evaluations after 4 and 8, checkpoints after 3, 6 and 9, updates 2 and 3 recorded with 1 for the warm-up, the
    memory of 11: all others follow each other without a pause."""
    measured = ("measure.timeline_from=2", "measure.memory_update=11", "train.updates=14")
    run = Run(*measured, "eval.every=4", "checkpoint.every=3", "checkpoint.keep_best=false")
    waited = list[int]()
    monkeypatch.setattr(Hardware, "synchronise", lambda self: waited.append(run.trainer.progress.update))
    run.train()
    assert waited == [1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 14]


def test_rows_say_which_updates_were_watched_and_how(watched: Run) -> None:
    assert watched.observed() == {3: "timeline warm-up", 4: "timeline", 5: "timeline", 8: "memory"}


def test_the_timeline_has_each_phase_of_each_recorded_update(watched: Run) -> None:
    trace = watched.folder.read_json(record.TIMELINE)
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("update ")] == ["update 4", "update 5"]
    assert {name: names.count(name) for name in PHASES} == {
        "batch": 2, "zero_grad": 2, "transfer": 4, "forward": 4, "backward": 4, "clip": 2, "optimizer": 2,
    }  # fmt: skip
    assert not {"host_name", "traceName"} & trace.keys()
    (event,) = watched.events("timeline")
    assert event["summary"]["updates"] == [4, 5]
    assert 0 < event["summary"]["busy"]["share"] <= 1
    assert 0.5 < sum(phase["share"] for phase in event["summary"]["phases"]) <= 1
    assert event["summary"]["operators"][0]["seconds"] > 0


def test_the_history_of_memory_adds_up(watched: Run) -> None:
    """After the update as much is held as before it; at the most the weights and what the forward pass kept."""
    memory = watched.folder.read_json(record.MEMORY_EVENTS)
    assert memory["update"] == 8
    assert [phase["name"] for phase in memory["phases"]] == [
        "batch", "zero_grad", *["transfer", "forward", "backward"] * 2, "clip", "optimizer",
    ]  # fmt: skip
    curve = memory["curve"]["bytes"]
    assert curve[-1] == pytest.approx(memory["base_bytes"], rel=0.02)
    peaks: dict[str, int] = {}
    for phase in memory["phases"]:
        peaks[phase["name"]] = max(phase["peak_bytes"], peaks.get(phase["name"], 0))
    assert peaks["backward"] == max(peaks.values()) == max(curve)
    assert peaks["backward"] > 1.2 * memory["base_bytes"]
    assert "profiler" in memory["source"]


def test_what_a_stop_cuts_off_is_kept_and_not_recorded_again() -> None:
    run = Run(*WATCHED)
    run.train(stop_after=4).train(segment=2)
    assert run.observed() == {3: "timeline warm-up", 4: "timeline", 8: "memory"}
    assert run.events("timeline")[0]["summary"]["updates"] == [4]


def test_a_stop_while_the_profiler_warms_up_leaves_nothing_and_the_next_process_records() -> None:
    run = Run(*WATCHED)
    run.train(stop_after=3)
    assert not Path(record.TIMELINE).exists()
    run.train(segment=2)
    assert run.observed() == {3: "timeline warm-up", 4: "timeline", 5: "timeline", 8: "memory"}
    assert [row["segment"] for row in run.updates if row.get("observed") == "timeline"] == [2, 2]


def test_a_recording_that_fails_stops_nothing_and_is_told(monkeypatch: pytest.MonkeyPatch, watched: Run) -> None:
    def fail(*_: Any) -> dict[str, Any]:
        raise RuntimeError("the profiler broke")

    monkeypatch.setattr(observation, "exported", fail)
    run = Run(*WATCHED).train()
    assert weights_sha256(run.trainer.model) == weights_sha256(watched.trainer.model)
    assert [event["path"] for event in run.events("not recorded")] == [record.TIMELINE, record.MEMORY_EVENTS]
    assert run.events("not recorded")[0]["message"] == "RuntimeError: the profiler broke"


@pytest.mark.parametrize("where", ["Timeline.__init__", "Timeline.step", "CpuHistory.__init__", "CpuHistory.start",
                                   "CpuHistory.stop", "CpuHistory.picture"])  # fmt: skip
def test_wherever_recording_fails_the_training_is_the_same(
    where: str, monkeypatch: pytest.MonkeyPatch, watched: Run
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    owner, name = where.split(".")
    monkeypatch.setattr(getattr(observation, owner), name, fail)
    run = Run(*WATCHED).train()
    assert weights_sha256(run.trainer.model) == weights_sha256(watched.trainer.model)
    assert [row["update"] for row in run.updates] == list(range(1, 10))
    path = record.TIMELINE if owner == "Timeline" else record.MEMORY_EVENTS
    told = [event for event in run.events("not recorded") if event["path"] == path]
    assert told
    assert "RuntimeError: broken" in [event["message"] for event in told]
    assert run.trainer.phases.watch is None


def test_an_update_that_fails_while_it_is_watched_ends_the_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(*WATCHED)
    real, stopped = observation.CpuHistory.stop, list[bool]()

    def stop(history: observation.CpuHistory) -> None:
        stopped.append(True)
        real(history)

    monkeypatch.setattr(observation.CpuHistory, "stop", stop)
    monkeypatch.setattr(engine, "train_update", fail_at(8, run.trainer))
    with pytest.raises(NonFiniteError):
        run.train()
    assert stopped == [True]
    assert run.trainer.phases.watch is None


def fail_at(update: int, trainer: Trainer) -> Any:
    """Makes updates until this one, which is not finite."""
    real = engine.train_update

    def update_or_fail(*arguments: Any) -> Row:
        if trainer.progress.update + 1 == update:
            raise NonFiniteError("not finite", {})
        return real(*arguments)

    return update_or_fail


PLANS: list[tuple[dict[str, int], tuple[int, int], tuple[bool, bool], dict[int, str]]] = [
    ({}, (1, 100), (False, False), {}),
    ({"timeline_from": 21}, (1, 100), (False, False), {20: "timeline warm-up", 21: "timeline", 22: "timeline"}),
    ({"timeline_from": 21}, (21, 100), (False, False), {21: "timeline", 22: "timeline"}),
    ({"timeline_from": 21}, (22, 100), (False, False), {22: "timeline", 23: "timeline"}),
    ({"timeline_from": 21}, (50, 100), (True, False), {}),
    ({"timeline_from": 1, "timeline_updates": 1}, (1, 100), (False, False), {1: "timeline"}),
    ({"timeline_from": 100}, (1, 100), (False, False), {99: "timeline warm-up", 100: "timeline"}),
    ({"timeline_from": 101}, (1, 100), (False, False), {}),
    ({"memory_update": 100}, (1, 100), (False, False), {100: "memory"}),
    ({"memory_update": 30}, (40, 100), (False, False), {40: "memory"}),
    ({"memory_update": 30}, (40, 100), (False, True), {}),
    ({"memory_update": 101}, (1, 100), (False, False), {}),
    (
        {"timeline_from": 21, "memory_update": 30},
        (40, 100),
        (False, False),
        {40: "timeline", 41: "timeline", 42: "memory"},
    ),
]


@pytest.mark.parametrize(("measure", "span", "is_there", "expected"), PLANS, ids=str)
def test_what_is_watched_follows_from_the_config_and_what_is_there(
    measure: dict[str, int], span: tuple[int, int], is_there: tuple[bool, bool], expected: dict[int, str]
) -> None:
    assert plan_observation(MeasureConfig(**measure), *span, *is_there) == expected  # type: ignore[arg-type]


# --- the CUDA allocator's history, with the allocator played by this test ---


class Allocator:
    """Answers as torch.cuda.memory does, and keeps what it was asked."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events, self.asked = events, list[Any]()

    def _record_memory_history(self, **options: Any) -> None:
        self.asked.append(options)

    def _snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": [self.events]}


@contextlib.contextmanager
def cuda_update(events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Allocator, list[Row]]]:
    """Watches an update on a pretended GPU, at whose time 100.0 the forward pass begins, a second each phase."""
    allocator, rows, now = Allocator(events), list[Row](), iter(range(100, 200))
    monkeypatch.setattr(torch.cuda, "memory", allocator)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    with MetricsWriter(Path("metrics.jsonl")) as writer:
        phases, recorder, held = Phases(), Recorder(writer, rows.append), Held(0, 0)
        folder, device = RunFolder(Path.cwd()), torch.device("cuda")
        with Observation({5: "memory"}, folder, recorder, phases, device, lambda: held) as watching:
            with watching.of(5) as facts:
                for name in ("forward", "backward"):
                    with phases(name):
                        pass
            assert facts == {"observed": "memory"}
            yield allocator, rows


def test_the_snapshot_of_a_gpu_is_kept_and_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {"action": "alloc", "size": 500, "time_us": 100_500_000, "addr": 1},
        {"action": "free_requested", "size": 500, "time_us": 102_400_000, "addr": 1},
        {"action": "free_completed", "size": 500, "time_us": 102_500_000, "addr": 1},
    ]
    with cuda_update(events, monkeypatch) as (allocator, rows):
        picture = json.loads(Path(record.MEMORY_EVENTS).read_text())
    assert picture["curve"] == {"s": [0.0, 0.5, 2.5], "bytes": [1000, 1500, 1000]}
    phases = [(phase["name"], phase["peak_bytes"]) for phase in picture["phases"]]
    assert phases == [("forward", 1500), ("backward", 1500)]
    assert (picture["device"], picture["source"]) == ("cuda", CudaHistory.source)
    assert pickle.loads(Path(record.MEMORY_SNAPSHOT).read_bytes())["device_traces"] == [events]
    assert [options["enabled"] for options in allocator.asked] == ["all", None]
    assert allocator.asked[0]["max_entries"] == observation.MOST_MEMORY_EVENTS
    assert [row["event"] for row in rows] == ["memory"]


def test_an_empty_history_is_told_and_no_file_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_update([], monkeypatch) as (_, rows):
        assert [row["event"] for row in rows] == ["not recorded"]
    assert rows[0]["message"] == "ValueError: the allocator recorded nothing"
    assert not Path(record.MEMORY_SNAPSHOT).exists()
    assert not Path(record.MEMORY_EVENTS).exists()


def test_on_a_device_that_tells_nothing_of_allocations_that_is_said() -> None:
    rows = list[Row]()
    with MetricsWriter(Path("metrics.jsonl")) as writer:
        recorder, device = Recorder(writer, rows.append), torch.device("mps")
        watching = Observation({5: "memory"}, RunFolder(Path.cwd()), recorder, Phases(), device, lambda: Held(0, 0))
        with watching, watching.of(5):
            pass
    assert [row["message"] for row in rows] == ["ValueError: nothing tells of allocations on mps"]


# --- the rate of matrix products ---


def test_a_finished_run_stays_finished_if_its_device_cannot_be_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    run, finished = Run("measure.matmul_probe=true"), Outcome("finished", 0, {})
    with MetricsWriter(Path("metrics.jsonl")) as writer:
        recorder = Recorder(writer, run.rows.append)
        peaks, observed = PeakMemory(run.trainer.hardware.device), observe(run.trainer, run.folder, recorder)
        process = Process(1, None, recorder, StopRequest(), WallClock(), peaks, observed)
        found = training.probe_device(run.trainer, process, finished)
        assert found is not None
        assert found["tflops"] > 0
        monkeypatch.setattr(training, "measure_matmul_rate", fail)
        assert training.probe_device(run.trainer, process, finished) is None
    assert [event["message"] for event in run.events("not recorded")] == ["OutOfMemoryError: no memory left"]


# --- a whole run ---


def test_a_whole_run_accounts_for_its_time_and_leaves_out_what_was_watched() -> None:
    lines = train_tiny(*(word for override in WATCHED for word in ("--set", override)))
    summary = lines[-1]
    assert [one["update"] for one in summary["throughput"]["excluded"]] == [1, 3, 4, 5, 8]
    assert summary["timeline"]["updates"] == [4, 5]
    (process,) = summary["wall_clock"]["processes"]
    parts = process["parts"]
    assert sum(parts.values()) == pytest.approx(process["elapsed_s"], rel=0.02)
    seconds = sum(row["seconds"] for row in lines if row["kind"] == "update")
    assert parts["update_s"] == pytest.approx(seconds)
    assert parts["checkpoint_s"] >= sum(row["blocked_s"] for row in lines if row.get("event") == "checkpoint")
    assert parts["profile_s"] > 0
    (end,) = (row for row in lines if row.get("event") == "end")
    assert end["elapsed_s"] >= process["elapsed_s"]
    assert all(row["memory_bytes"] is None or row["memory_bytes"] > 10**7 for row in lines if row["kind"] == "update")
