"""`metrics.jsonl`: nothing is lost, nothing is doubled, and damage is told. And the speed that its rows say."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from training_lab.errors import LabError
from training_lab.measurement import throughput
from training_lab.tracking import MetricsWriter, Recorder, Row, count_processes, read_metrics, rows_of_kind

METRICS = Path("metrics.jsonl")


def update_row(update: int, segment: int = 1, seconds: float = 1.0, target_tokens: int = 100) -> Row:
    return {
        "kind": "update",
        "update": update,
        "loss": 1 / update,
        "segment": segment,
        "input_tokens": 2 * target_tokens,
        "seconds": seconds,
        "target_tokens": target_tokens,
    }


def event(name: str, **facts: object) -> Row:
    return {"kind": "event", "event": name, **facts}


def resume(supersedes_from_line: int) -> Row:
    return event("resume", supersedes_from_line=supersedes_from_line)


def line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def write_lines(*lines: Row | str) -> None:
    """Writes rows as lines, and texts as they are."""
    METRICS.write_text("".join(one if isinstance(one, str) else line(one) for one in lines), encoding="utf-8")


def damage_error() -> str:
    with pytest.raises(LabError) as caught:
        read_metrics(METRICS)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


class Process:
    """One process of a run, as it appends to the metrics. It ends in the middle of a row, if that is said."""

    def __init__(self, segment: int, unfinished: str = "") -> None:
        self.segment, self.unfinished = segment, unfinished
        self.writer = MetricsWriter(METRICS)
        self.log = Recorder(self.writer, lambda row: None)

    def __enter__(self) -> Process:
        self.writer.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.__exit__(None, None, None)
        with open(METRICS, "a", encoding="utf-8") as file:
            file.write(self.unfinished)

    def resume(self, checkpoint: int) -> None:
        """Says that the process goes on from the state with so many lines."""
        self.log.log({**resume(checkpoint), "segment": self.segment})

    def train(self, first: int, last: int) -> int:
        """Makes updates, saves, and returns how many lines the checkpoint knows of."""
        for update in range(first, last + 1):
            self.log.log(update_row(update, self.segment))
        return self.log.sync()


@contextlib.contextmanager
def disk_with_room_for(num_bytes: int) -> Iterator[None]:
    """Lets no file grow beyond so many bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def updates_and_segments() -> list[tuple[int, int]]:
    return [(row["update"], row["segment"]) for row in rows_of_kind(read_metrics(METRICS), "update")]


# --- writing ---


def test_rows_are_read_back_as_they_were_written_in_order() -> None:
    rows = [
        event("start", text="한글 \u2028 \n \r \x85"),
        update_row(1),
        {"kind": "evaluation", "update": 1, "val_loss": None},
    ]
    with MetricsWriter(METRICS) as writer:
        for row in rows:
            writer.write(row)
    assert read_metrics(METRICS) == rows
    assert METRICS.read_bytes().count(b"\n") == 3


def test_a_row_is_in_the_file_as_soon_as_it_is_written() -> None:
    with MetricsWriter(METRICS) as writer:
        for number in range(1, 4):
            writer.write(update_row(number))
            assert len(read_metrics(METRICS)) == number


def test_the_number_of_lines_counts_those_of_earlier_processes() -> None:
    for segment in range(1, 4):
        with MetricsWriter(METRICS) as writer:
            writer.write(update_row(segment))
            assert writer.sync() == segment


def test_a_line_is_on_the_disk_before_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    with MetricsWriter(METRICS) as writer:
        writer.write(update_row(1))
        assert synced == []
        assert writer.sync() == 1
        assert synced == [len(line(update_row(1)))]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_refused_and_leaves_no_part_of_its_row(value: float) -> None:
    with MetricsWriter(METRICS) as writer:
        writer.write(update_row(1))
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.write({**update_row(2), "loss": value})
        writer.write(update_row(2))
        assert writer.sync() == 2
    assert read_metrics(METRICS) == [update_row(1), update_row(2)]


def test_a_row_is_in_the_file_before_it_is_shown() -> None:
    seen: list[tuple[Row, int]] = []
    with MetricsWriter(METRICS) as writer:
        recorder = Recorder(writer, lambda row: seen.append((row, len(read_metrics(METRICS)))))
        recorder.log(update_row(1))
        recorder.event("checkpoint", update=1)
    assert seen == [(update_row(1), 1), (event("checkpoint", update=1), 2)]


def test_a_full_disk_is_told_by_name_and_the_rows_before_it_are_read() -> None:
    size = len(line(update_row(1)))
    with disk_with_room_for(size + 20), contextlib.suppress(OSError), MetricsWriter(METRICS) as writer:
        writer.write(update_row(1))
        with pytest.raises(LabError, match=r"^metrics\.jsonl: cannot be appended to: File too large$"):
            writer.write(update_row(2))
    assert METRICS.stat().st_size == size + 20
    assert read_metrics(METRICS) == [update_row(1)]


def test_a_full_disk_that_ends_a_run_is_told_and_not_hidden_by_the_closing_of_the_file() -> None:
    with (
        disk_with_room_for(20),
        pytest.raises(LabError, match=r"^metrics\.jsonl: cannot be appended to: File too large$"),
        MetricsWriter(METRICS) as writer,
    ):
        writer.write(update_row(1))


def test_a_disk_that_refuses_to_keep_the_rows_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with (
        MetricsWriter(METRICS) as writer,
        pytest.raises(LabError, match=r"^metrics\.jsonl: .*No space left on device$"),
    ):
        writer.sync()


# --- resuming ---


def test_rows_after_the_checkpoint_are_left_out_once_the_run_goes_on_from_it() -> None:
    with Process(1) as first:
        first.log.event("start")
        checkpoint = first.train(1, 3)
        first.train(4, 5)
    assert updates_and_segments() == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]
    with Process(2) as second:
        second.resume(checkpoint)
        assert updates_and_segments() == [(1, 1), (2, 1), (3, 1)]
        second.train(4, 6)
    assert updates_and_segments() == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert [row["event"] for row in rows_of_kind(read_metrics(METRICS), "event")] == ["start", "resume"]
    assert METRICS.read_text("utf-8").count("\n") == 10


def test_nothing_is_doubled_after_several_resumes() -> None:
    with Process(1) as first:
        at_2 = first.train(1, 2)
        first.train(3, 5)
    with Process(2) as second:
        second.resume(at_2)
        at_4 = second.train(3, 4)
        second.train(5, 7)
    with Process(3) as third:
        third.resume(at_4)
        third.train(5, 8)
    expected = [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (7, 3), (8, 3)]
    assert updates_and_segments() == expected


def test_going_back_further_than_an_earlier_resume_leaves_that_one_out_too() -> None:
    with Process(1) as first:
        at_2 = first.train(1, 2)
        at_4 = first.train(3, 4)
        first.train(5, 6)
    with Process(2) as second:
        second.resume(at_4)
        second.train(5, 7)
    with Process(3) as third:  # the newer checkpoints turned out to be damaged
        third.resume(at_2)
        at_5 = third.train(3, 5)
        third.train(6, 6)
    with Process(4) as fourth:
        fourth.resume(at_5)
        fourth.train(6, 7)
    expected = [(1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (6, 4), (7, 4)]
    assert updates_and_segments() == expected
    resumes = [row["segment"] for row in rows_of_kind(read_metrics(METRICS), "event")]
    assert resumes == [2, 3, 4]  # that a process went on is never superseded: it happened


def test_going_on_from_the_same_checkpoint_again_and_again_leaves_the_last_only() -> None:
    with Process(1) as first:
        at_3 = first.train(1, 3)
    for segment in range(2, 6):
        with Process(segment) as process:
            process.resume(at_3)
            process.train(4, 4 + segment)
    expected = [(1, 1), (2, 1), (3, 1), *((update, 5) for update in range(4, 10))]
    assert updates_and_segments() == expected
    assert count_processes(METRICS) == 4  # the first one said nothing here


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew() -> None:
    with Process(1, unfinished='{"kind": "upd') as first:
        first.log.event("start")
        first.train(1, 2)
    with Process(2) as second:
        second.resume(0)
        second.train(1, 3)
    assert updates_and_segments() == [(1, 2), (2, 2), (3, 2)]
    assert [row.get("event") for row in read_metrics(METRICS)][:2] == ["start", "resume"]
    assert count_processes(METRICS) == 2


def test_a_run_that_stopped_right_at_a_checkpoint_supersedes_nothing() -> None:
    with Process(1) as first:
        at_3 = first.train(1, 3)
    with Process(2) as second:
        second.resume(at_3)
        second.train(4, 4)
    assert updates_and_segments() == [(1, 1), (2, 1), (3, 1), (4, 2)]


def test_events_are_never_superseded_because_they_happened() -> None:
    write_lines(update_row(1), event("checkpoint", update=1), update_row(2), resume(1), update_row(2, 2))
    assert updates_and_segments() == [(1, 1), (2, 2)]
    assert [row["event"] for row in rows_of_kind(read_metrics(METRICS), "event")] == ["checkpoint", "resume"]


# --- unfinished and damaged lines ---

UNFINISHED = ["{", '{"kind": "update", "update": 3', line(update_row(3))[:-2], '{"kind": "업', '"', "nul"]


@pytest.mark.parametrize("text", UNFINISHED)
def test_a_last_line_that_a_killed_process_left_unfinished_is_passed_over(text: str) -> None:
    write_lines(update_row(1), update_row(2), text)
    assert updates_and_segments() == [(1, 1), (2, 1)]


def test_a_last_line_that_was_cut_inside_a_character_is_passed_over() -> None:
    write_lines(update_row(1))
    with open(METRICS, "ab") as file:
        file.write(b'{"kind": "event", "text": "' + "값".encode()[:2])
    assert updates_and_segments() == [(1, 1)]


@pytest.mark.parametrize("text", UNFINISHED)
def test_an_unfinished_line_before_a_resume_is_passed_over_and_the_count_of_lines_holds(text: str) -> None:
    with Process(1, unfinished=text) as first:
        at_1 = first.train(1, 1)
        first.train(2, 2)
    with Process(2, unfinished=text) as second:
        second.resume(at_1)
        at_3 = second.train(2, 3)
        second.train(4, 4)
    with Process(3) as third:
        third.resume(at_3)
        third.train(4, 5)
    assert updates_and_segments() == [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)]


def test_processes_that_were_killed_while_they_said_that_they_go_on_are_passed_over() -> None:
    with Process(1, unfinished='{"kind": "upd') as first:
        at_2 = first.train(1, 2)
    with Process(2, unfinished='{"kind": "event", "event": "resu'):
        pass
    with Process(3, unfinished='{"kind": "ev'):
        pass
    with Process(4) as fourth:
        fourth.resume(at_2)
        fourth.train(3, 4)
    assert updates_and_segments() == [(1, 1), (2, 1), (3, 4), (4, 4)]


@pytest.mark.parametrize("damaged", ["{\n", "\n", "nonsense\n", "[]\n", "3\n", "{}\n", '{"update": 2}\n', "\x00\n"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_line_anywhere_else_is_refused_with_its_number(damaged: str, place: int) -> None:
    lines: list[Row | str] = [update_row(1), update_row(2), update_row(3)]
    lines.insert(place, damaged)
    write_lines(*lines)
    assert damage_error() == f"metrics.jsonl:{place + 1}: damaged line"


def test_a_damaged_line_is_refused_even_where_a_later_resume_would_supersede_it() -> None:
    write_lines(update_row(1), "{\n", update_row(2), resume(1), update_row(2, 2))
    assert damage_error() == "metrics.jsonl:2: damaged line"


def test_a_resume_that_does_not_say_from_where_is_refused_with_its_number() -> None:
    write_lines(update_row(1), event("resume"), update_row(2))
    assert damage_error().startswith("metrics.jsonl:2: ")


def test_a_missing_file_is_told_by_name() -> None:
    assert damage_error() == "metrics.jsonl: cannot be read: No such file or directory"


def test_an_empty_file_has_no_rows() -> None:
    write_lines()
    assert read_metrics(METRICS) == []


# --- speed ---


def test_speed_is_all_tokens_over_all_seconds_and_not_a_mean_of_ratios() -> None:
    rows = [update_row(1, seconds=1.0, target_tokens=100), update_row(2, seconds=9.0, target_tokens=100)]
    measured = throughput(rows, 0)
    assert measured["target_tokens_per_s"] == 20.0  # the mean of 100/s and 11.1/s would be 55.6
    assert (measured["measured_updates"], measured["measured_target_tokens"]) == (2, 200)
    assert measured["measured_seconds"] == 10.0
    assert measured["excluded"] == []
    assert "ratio of sums" in measured["definition"]


def test_the_first_updates_of_every_process_are_left_out_and_named() -> None:
    slow = 100.0
    rows = [
        *(update_row(u, 1, seconds=slow if u <= 2 else 1.0) for u in range(1, 6)),
        *(update_row(u, 2, seconds=slow if u <= 7 else 1.0) for u in range(6, 9)),
        *(update_row(u, 3, seconds=slow) for u in range(9, 11)),
    ]
    measured = throughput(rows, 2)
    assert measured["target_tokens_per_s"] == 100.0
    assert measured["measured_updates"] == 4
    assert [entry["update"] for entry in measured["excluded"]] == [1, 2, 6, 7, 9, 10]
    assert all(entry["reason"] == "one of the first 2 of its process" for entry in measured["excluded"])
    assert measured["measured_updates"] + len(measured["excluded"]) == len(rows)


def test_the_first_updates_of_a_process_are_left_out_even_where_rows_of_it_were_superseded() -> None:
    write_lines(
        *(update_row(u, 1, seconds=50.0 if u == 1 else 1.0) for u in range(1, 5)),
        resume(2),
        *(update_row(u, 2, seconds=50.0 if u == 3 else 1.0) for u in range(3, 6)),
    )
    measured = throughput(rows_of_kind(read_metrics(METRICS), "update"), 1)
    assert measured["target_tokens_per_s"] == 100.0
    assert [entry["update"] for entry in measured["excluded"]] == [1, 3]


@pytest.mark.parametrize(("num_rows", "warmup"), [(0, 0), (0, 5), (3, 3), (3, 10)])
def test_without_a_measured_update_there_is_no_speed(num_rows: int, warmup: int) -> None:
    measured = throughput([update_row(u) for u in range(1, num_rows + 1)], warmup)
    assert measured["target_tokens_per_s"] is None
    assert measured["measured_updates"] == 0
    assert len(measured["excluded"]) == num_rows
