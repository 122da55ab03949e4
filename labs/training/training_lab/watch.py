"""What a run says of itself while it goes, read from its folder alone.

Of `metrics.jsonl` only what was appended is read each time, into figures and curves of bounded size, so that a run of
a million updates is as cheap to watch as one of ten. Whatever is missing or damaged there is left out, and told.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO, Any, NamedTuple

from training_lab import record
from training_lab.braille import Curve
from training_lab.console import EVENT_TEXTS
from training_lab.errors import LabError
from training_lab.measurement import OBSERVED
from training_lab.record import RunFolder
from training_lab.tracking import Row, is_resume, parse_row

RECENT_UPDATES = 50
"""Over how many updates the present speed is taken."""

MOST_EVENTS = 50
MOST_CHARACTERS = 500
"""Of one text from the folder."""

MOST_UPDATE = 2**53
"""Where floats stop telling one update from the next; a row beyond is damage."""

MOST_NUMBER = 1e30
"""Far beyond any figure, and far from where sums and differences overflow."""

LEAST_SILENCE_S, SILENCE = 10.0, 5
"""Something is amiss if nothing has come for longer, and for so many times what the slowest of the last rows took."""

MORE_EVENT_TEXTS = {
    "start": "process {segment} began",
    "resume": "process {segment} went on from update {from_update}",
    "end": "process {segment} ended after {elapsed_s:.0f}s",
}

WARNINGS = ("not recorded", "implausible initial loss", "failure")
UPDATE_FIGURES = ("loss", "lr", "grad_norm", "memory_bytes")


# --- the rows ---


class Tally:
    """What the rows of a run come to, each taken once and in order."""

    def __init__(self, warmup_updates: int) -> None:
        self.warmup_updates = warmup_updates
        self.update: Row = {}
        """The latest, with UPDATE_FIGURES as numbers that are finite, or None."""
        self.evaluation: Row = {}
        """The latest, with its `val_loss` likewise."""
        self.best: Row = {}
        """The first evaluation with the lowest `val_loss`."""
        self.curves = {"loss": Curve(), "val_loss": Curve(), "tokens/s": Curve()}
        self.num_rows = self.num_updates = 0
        self.update_s = self.other_s = 0.0
        self.recent_s: deque[float] = deque(maxlen=RECENT_UPDATES)
        self.measured: deque[tuple[float, float]] = deque(maxlen=RECENT_UPDATES)
        """Target tokens and seconds of the latest updates that count for the speed."""
        self.events: deque[str] = deque(maxlen=MOST_EVENTS)
        self.num_events = 0
        self.warnings: deque[str] = deque(maxlen=MOST_EVENTS)
        self._seen_in_segment: dict[str, int] = {}

    def take(self, row: Row) -> None:
        """The next row that counts."""
        self.num_rows += 1
        seconds = max(0.0, finite(row.get("seconds")) or 0.0)
        if seconds:
            self.recent_s.append(seconds)
        if row["kind"] == "update":
            self._take_update(row, seconds)
        else:
            self.other_s += seconds
            if row["kind"] == "evaluation":
                self._take_evaluation(row)
            elif row["kind"] == "event":
                self._take_event(row)

    @property
    def slowest_s(self) -> float:
        """What the slowest of the latest rows took."""
        return max(self.recent_s, default=0.0)

    def _take_update(self, row: Row, seconds: float) -> None:
        self.update = {"update": row["update"], **{key: finite(row.get(key)) for key in UPDATE_FIGURES}}
        self.num_updates += 1
        self.update_s += seconds
        self._draw("loss", row["update"], self.update["loss"])
        segment, tokens = str(row.get("segment")), finite(row.get("target_tokens"))
        place = self._seen_in_segment[segment] = self._seen_in_segment.get(segment, 0) + 1
        is_measured = place > self.warmup_updates and str(row.get("observed")) not in OBSERVED
        if is_measured and seconds and tokens is not None:
            self.measured.append((tokens, seconds))
            self._draw("tokens/s", row["update"], finite(tokens / seconds))

    def _take_evaluation(self, row: Row) -> None:
        loss = finite(row.get("val_loss"))
        self.evaluation = {"update": row["update"], "val_loss": loss}
        self._draw("val_loss", row["update"], loss)
        if loss is not None and (not self.best or loss < self.best["val_loss"]):
            self.best = self.evaluation

    def _take_event(self, row: Row) -> None:
        text = describe_event(row)
        self.num_events += 1
        self.events.append(text)
        if row["event"] in WARNINGS:
            self.warnings.append(text)

    def _draw(self, name: str, update: int, value: float | None) -> None:
        if value is not None:
            self.curves[name].add(update, value)


class Follower:
    """Reads a growing `metrics.jsonl`; its `tally` is that of the rows that `tracking.read_metrics` would give."""

    def __init__(self, path: Path, warmup_updates: int) -> None:
        self.path, self.warmup_updates = path, warmup_updates
        self._file = (0, 0)
        self._begin({})

    def _begin(self, resumes: dict[int, int]) -> None:
        """Forgets all rows. `resumes`: by the line that says so, counted from 0, the first line that is superseded."""
        self._resumes = resumes
        self._superseded: list[range] = []
        for first, at in sorted((first, at) for at, first in resumes.items() if first < at):
            if self._superseded and first <= self._superseded[-1].stop:
                first, at = self._superseded[-1].start, max(at, self._superseded.pop().stop)
            self._superseded.append(range(first, at))
        self.tally = Tally(self.warmup_updates)
        self.share_read = 0.0
        self.first_damaged = self.num_damaged = 0
        self._offset = self._line = 0
        self._is_taken = False
        """Whether the row of the present line, which has no end yet, is in the tally."""
        self._unfinished: list[int] = []

    def read(self, at_most_bytes: int) -> None:
        """Takes in what was appended, or the next part of it. Raises LabError if the file cannot be read."""
        try:
            with open(self.path, "rb") as file:
                self._read(file, at_most_bytes)
        except FileNotFoundError:
            self._begin({})
            self.share_read = 1.0
        except OSError as error:
            raise LabError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _read(self, file: IO[bytes], at_most_bytes: int) -> None:
        status = os.fstat(file.fileno())
        before, self._file = self._file, (status.st_dev, status.st_ino)
        if self._file != before or status.st_size < self._offset:  # replaced, as by a copying program, or cut
            self._begin(find_resumes(file))
        file.seek(self._offset)
        end = self._offset + at_most_bytes
        while self._offset < end:
            text = file.readline()
            is_whole, row = text.endswith(b"\n"), possible_row(text)
            if not is_whole and row is None:  # nothing more, or a row that is being written
                break
            first = superseded_from(row)
            if first is not None and self._line not in self._resumes:  # what was taken may count no more
                file.seek(0)
                self._begin({**find_resumes(file), self._line: first})
                file.seek(0)
                continue
            if not self._is_taken:
                self._take(row)
            self._is_taken = not is_whole
            if not is_whole:
                break
            self._offset += len(text)
            self._line += 1
        self.share_read = min(1.0, file.tell() / status.st_size) if status.st_size else 1.0

    def _take(self, row: Row | None) -> None:
        if row is None:
            self._unfinished.append(self._line)
            return
        if superseded_from(row) is not None:
            self._unfinished.clear()  # a killed process left them
        elif is_resume(row):
            self._unfinished.append(self._line)
        if self._unfinished:
            self.first_damaged = self.first_damaged or self._unfinished[0] + 1
            self.num_damaged += len(self._unfinished)
            self._unfinished.clear()
        while self._superseded and self._line >= self._superseded[0].stop:
            del self._superseded[0]
        if row["kind"] == "event" or not (self._superseded and self._line in self._superseded[0]):
            self.tally.take(row)

    def problems(self) -> list[str]:
        """What is wrong with the file."""
        if not self.num_damaged:
            return []
        more = f" and {self.num_damaged - 1:,} more" if self.num_damaged > 1 else ""
        return [clean(f"{self.path}:{self.first_damaged}: damaged line{more}: left out of what is shown")]


def find_resumes(file: IO[bytes]) -> dict[int, int]:
    """Every line that says that the run went on, counted from 0, and the first line that it supersedes."""
    firsts = ((at, superseded_from(possible_row(text))) for at, text in enumerate(file) if b'"resume"' in text)
    return {at: first for at, first in firsts if first is not None}


def superseded_from(row: Row | None) -> int | None:
    """The first line that a row supersedes; None for a row that does not say so."""
    first = row.get("supersedes_from_line") if row is not None and is_resume(row) else None
    return first if isinstance(first, int) and first >= 0 else None


def possible_row(text: bytes) -> Row | None:
    """The row of a line; None for one that is damaged, or whose update no run can have."""
    row = parse_row(text.decode("utf-8", "replace"))
    is_numbered = row is not None and row["kind"] in ("update", "evaluation")
    return row if row is None or not is_numbered or 0 <= row["update"] < MOST_UPDATE else None


def describe_event(row: Row) -> str:
    """An event in words."""
    try:
        text = {**EVENT_TEXTS, **MORE_EVENT_TEXTS}[row["event"]].format_map(row)
    except (KeyError, ValueError, TypeError, OverflowError):  # another event, or not with what belongs to it
        facts = {key: value for key, value in row.items() if isinstance(value, (str, int, float)) and key != "kind"}
        text = f"{facts.pop('event')}: " + ", ".join(f"{key} {value}" for key, value in facts.items())
    return clean(re.sub(" +", " ", text))


# --- the folder ---


class Seen(NamedTuple):
    """A run as it is now; None is what nobody knows. Texts are clean: one line without control characters."""

    run_id: str
    folder: str
    config: str
    purpose: str
    state: str
    has_ended: bool
    """Nothing more will come."""
    planned_updates: int | None
    tally: Tally
    share_read: float
    """Less than 1 while a long file is still being read."""
    age_s: float | None
    """Since the last row."""
    tokens_per_s: float | None
    """Target tokens per second and device, by the record's definition."""
    speed_of: str
    """The updates that it is taken over."""
    memory_bytes: int | None
    wandb: str
    problems: list[str]
    """What is damaged, and why the run failed."""

    @property
    def update(self) -> int:
        """The last update that was made."""
        return int(self.tally.update.get("update", 0))

    @property
    def elapsed_s(self) -> float:
        """Seconds of all updates, evaluations and checkpoints, and since the last of them while the run goes."""
        return self.tally.update_s + self.tally.other_s + (0.0 if self.has_ended else self.age_s or 0.0)

    @property
    def left_s(self) -> float | None:
        """What the rest takes at the speed of the last updates, with as much besides as there was so far."""
        tally = self.tally
        if self.planned_updates is None or not tally.num_updates or self.has_ended:
            return None
        seconds = [seconds for _, seconds in tally.measured] or [tally.update_s / tally.num_updates]
        each_s = sum(seconds) / len(seconds) + tally.other_s / tally.num_updates
        return each_s * max(0, self.planned_updates - self.update)

    @property
    def is_silent(self) -> bool:
        """Whether nothing has come for much longer than a row takes."""
        age_s = 0.0 if self.has_ended else self.age_s or 0.0
        return age_s > max(LEAST_SILENCE_S, SILENCE * self.tally.slowest_s)


class Watched:
    """A run that is looked at again and again."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self._present = run, {record.CONFIG}
        self._config, self._config_problems = self._read_json(record.CONFIG)
        warmup = entry(self._config, "values", "measure", "warmup_updates")
        self._metrics = Follower(run.file(record.METRICS), warmup if isinstance(warmup, int) else 0)

    def look(self, at_most_bytes: int = sys.maxsize) -> Seen:
        """The run as it is now, after `at_most_bytes` more of a long file.

        Raises LabError if the folder has gone or its metrics cannot be read.
        """
        # The state first, so that all rows of a run that has ended are among those that are read after it.
        state, has_ended = self._state()
        summary, summary_problems = self._read_json(record.SUMMARY)
        wandb, wandb_problems = self._read_json(record.WANDB)
        metrics = self._metrics
        metrics.read(at_most_bytes)
        present = {name for name in (record.CONFIG, record.SUMMARY, record.METRICS) if self.run.file(name).exists()}
        if not self._present <= present:
            raise LabError(f"{self.run.path}: the folder, or a part of it, has gone")
        self._present = present
        problems = [*self._config_problems, *summary_problems, *wandb_problems, *metrics.problems()]
        failure = clean(entry(summary, "failure", "message"))
        if failure and not any(failure[:100] in text for text in metrics.tally.warnings):
            problems.append(failure)
        tokens_per_s, speed_of = speed(metrics.tally, summary)
        planned = entry(summary, "planned_updates") or entry(self._config, "values", "train", "updates")
        memory = metrics.tally.update.get("memory_bytes") or entry(summary, "last_process", "peak_memory", "bytes")
        return Seen(
            run_id=clean(self.run.run_id),
            folder=clean(str(self.run.path)),
            config=clean(entry(self._config, "name")),
            purpose=clean(entry(self._config, "values", "purpose")),
            state=clean(state),
            has_ended=has_ended and metrics.share_read == 1.0,
            planned_updates=planned if isinstance(planned, int) and 0 < planned < MOST_UPDATE else None,
            tally=metrics.tally,
            share_read=metrics.share_read,
            age_s=self._age_s(),
            tokens_per_s=tokens_per_s,
            speed_of=speed_of,
            memory_bytes=memory if finite(memory) else None,
            wandb=", ".join(dict.fromkeys(filter(None, (clean(wandb.get(key)) for key in ("mode", "state", "url"))))),
            problems=problems,
        )

    def _state(self) -> tuple[str, bool]:
        """What the run is doing, and whether it has ended: a process that still has the folder is closing it."""
        state, is_locked = self.run.state(), self.run.is_locked()
        if state == "killed":  # or it has said so between the looks at its summary and at its lock
            state = self.run.state()
        if state == "damaged" and not self.run.file(record.SUMMARY).exists():
            state = "starting" if is_locked else "killed"
        return state, not is_locked and state not in ("running", "starting")

    def _read_json(self, name: str) -> tuple[Row, list[str]]:
        """One of the folder's files as far as it is there and whole, and what is wrong with it."""
        try:
            return (self.run.read_json(name) if self.run.file(name).exists() else {}), []
        except LabError as error:
            return {}, [str(error)]

    def _age_s(self) -> float | None:
        try:
            return max(0.0, time.time() - self.run.file(record.METRICS).stat().st_mtime)
        except OSError:
            return None


def speed(tally: Tally, summary: Row) -> tuple[float | None, str]:
    """Target tokens per second and device, and over which updates: the summary's own if it is of now, else recent."""
    said = finite(entry(summary, "throughput", "target_tokens_per_s"))
    if said is not None and tally.update and entry(summary, "updates") == tally.update["update"]:
        measured = entry(summary, "throughput", "measured_updates")
        return said, f"{measured if finite(measured) is not None else 'the'} measured updates"
    if not tally.measured:
        return None, f"the first {tally.warmup_updates} updates of a process are left out"
    tokens, seconds = sum(tokens for tokens, _ in tally.measured), sum(seconds for _, seconds in tally.measured)
    return finite(tokens / seconds), f"last {len(tally.measured)} updates"


def entry(value: Any, *keys: str) -> Any:
    """What stands in nested objects under some keys; None if nothing does."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def finite(value: Any) -> float | None:
    """A number that can be reckoned with, or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < MOST_NUMBER else None


def clean(text: Any) -> str:
    """Text from the folder on one line, with control characters escaped; empty if it is no text."""
    if not isinstance(text, str):
        return ""
    text = text[:MOST_CHARACTERS]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
