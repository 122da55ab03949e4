"""What counts as measured, and where the time of a process goes."""

from __future__ import annotations

import pytest

from training_lab.measurement import OBSERVED, exclusions, measured_rows, throughput
from training_lab.tracking import Row
from training_lab.wall_clock import PARTS, WallClock


def rows_of(updates: range, segment: int = 1, observed: dict[int, str] | None = None) -> list[Row]:
    """Updates that take as many seconds as their number, with 100 targets each."""
    marks = observed or {}
    return [
        {"update": k, "segment": segment, "seconds": float(k), "target_tokens": 100, "input_tokens": 110,
         **({"observed": marks[k]} if k in marks else {})}
        for k in updates
    ]  # fmt: skip


def test_the_seed_documents_settings_exclude_what_they_say_and_the_profilers_own_warm_up() -> None:
    """100 updates, the first 10, the timeline at 21 and 22, the memory at 100: 87 by the seed; and update 20, on which
    the profiler is set up, so 86."""
    observed = {20: "timeline warm-up", 21: "timeline", 22: "timeline", 100: "memory"}
    found = throughput(rows_of(range(1, 101), observed=observed), 10)
    assert [one["update"] for one in found["excluded"]] == [*range(1, 11), 20, 21, 22, 100]
    assert found["measured_updates"] == 86
    assert {one["reason"] for one in found["excluded"]} == {"one of the first 10 of its process", *OBSERVED.values()}


def test_tokens_per_second_is_a_ratio_of_sums_over_what_is_left() -> None:
    found = throughput(rows_of(range(1, 5), observed={3: "memory"}), 1)
    assert found["measured_seconds"] == 2 + 4
    assert found["target_tokens_per_s"] == pytest.approx(200 / 6)
    assert found["input_tokens_per_s"] == pytest.approx(220 / 6)
    assert throughput(rows_of(range(1, 5)), 0, devices=4)["target_tokens_per_s"] == pytest.approx(400 / 10 / 4)


def test_a_process_that_goes_on_is_slow_again_at_first() -> None:
    rows = [*rows_of(range(1, 6), 1), *rows_of(range(6, 11), 2)]
    assert list(exclusions(rows, 2)) == [1, 2, 6, 7]
    assert [row["update"] for row in measured_rows(rows, 2)] == [3, 4, 5, 8, 9, 10]


def test_an_update_is_excluded_once_for_the_first_reason() -> None:
    found = throughput(rows_of(range(1, 4), observed={1: "timeline"}), 2)
    assert [one["update"] for one in found["excluded"]] == [1, 2]
    assert found["excluded"][0]["reason"] == "one of the first 2 of its process"


def test_nothing_measured_is_no_speed() -> None:
    found = throughput(rows_of(range(1, 4)), 3)
    assert found["target_tokens_per_s"] is found["input_tokens_per_s"] is None


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time

    def pass_(self, seconds: float) -> None:
        self.time += seconds


def test_every_second_belongs_to_exactly_one_part_and_they_add_up() -> None:
    now = Clock()
    clock = WallClock(now.time, now)
    now.pass_(3)
    with clock.part("data"):
        now.pass_(5)
    now.pass_(1)
    clock.switch("other")
    for _ in range(2):
        with clock.part("profile"):
            now.pass_(0.25)
            with clock.part("update") as span:
                now.pass_(2)
            now.pass_(0.5)
        assert span.seconds == 2
        now.pass_(0.125)
    parts = clock.parts_s()
    assert parts == {"setup_s": 4, "data_s": 5, "update_s": 4, "evaluation_s": 0, "checkpoint_s": 0, "profile_s": 1.5,
                     "other_s": 0.25}  # fmt: skip
    assert sum(parts.values()) == clock.elapsed_s() == 14.75
    assert list(parts) == [f"{name}_s" for name in PARTS]


def test_a_part_that_fails_is_counted_and_left() -> None:
    now = Clock()
    clock = WallClock(now.time, now)

    def fail() -> None:
        with clock.part("evaluation"):
            now.pass_(2)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    now.pass_(1)
    assert (clock.parts_s()["evaluation_s"], clock.parts_s()["setup_s"]) == (2, 1)
