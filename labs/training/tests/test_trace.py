"""A timeline's figures, from traces made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from training_lab.trace import gaps_between, own_times, summarise_trace, union


def event(name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin, "pid": 1, "tid": tid}


def note(name: str, begin: float, end: float, cat: str = "user_annotation") -> dict[str, Any]:
    return event(name, begin, end, cat)


CPU = [
    note("update 7", 0, 100), note("forward", 0, 40), note("backward", 40, 90), note("optimizer", 90, 100),
    event("mm", 10, 30), event("inner", 15, 20), event("mm", 50, 80, tid=2), event("add", 75, 85),
    event("outside", 200, 300), note("forward", 200, 300), {"ph": "M", "name": "process_name", "ts": 0},
]  # fmt: skip


def test_only_what_happened_in_the_updates_counts() -> None:
    found = summarise_trace(CPU)
    assert found["updates"] == [7]
    assert found["seconds"] == pytest.approx(100e-6)
    assert found["busy"]["share"] == pytest.approx((20 + 35) / 100)
    assert {one["name"] for one in found["operators"]} == {"mm", "inner", "add"}
    assert [(one["name"], one["count"], one["share"]) for one in found["phases"]] == [
        ("forward", 1, 0.4), ("backward", 1, 0.5), ("optimizer", 1, 0.1),
    ]  # fmt: skip


def test_an_operators_own_time_leaves_out_those_that_it_called_on_its_thread() -> None:
    found = {one["name"]: one for one in summarise_trace(CPU)["operators"]}
    assert found["mm"]["seconds"] == pytest.approx((20 - 5 + 30) * 1e-6)
    assert found["inner"]["seconds"] == pytest.approx(5e-6)
    assert found["mm"]["count"] == 2


def test_gaps_and_busy_time_make_up_the_update() -> None:
    found = summarise_trace(CPU)
    assert found["gaps"]["count"] == 3
    assert found["gaps"]["longest_s"] == pytest.approx(20e-6)
    assert found["gaps"]["seconds"] + found["busy"]["share"] * found["seconds"] == pytest.approx(found["seconds"])
    assert sum(one["count"] for one in found["gaps"]["histogram"]) == 3


def test_on_a_gpu_its_kernels_count_and_phases_last_from_their_first_to_their_last() -> None:
    gpu = [*CPU, event("gemm", 20, 60, "kernel"), event("copy", 60, 70, "gpu_memcpy"), event("late", 95, 140, "kernel"),
           note("forward", 20, 60, "gpu_user_annotation")]  # fmt: skip
    found = summarise_trace(gpu)
    assert found["busy"]["share"] == pytest.approx((50 + 5) / 100)
    assert [one["name"] for one in found["operators"]] == ["late", "gemm", "copy"]
    assert [(one["name"], one["share"]) for one in found["phases"]] == [("forward", 0.4)]


def test_the_time_between_two_updates_is_nobodys() -> None:
    found = summarise_trace([note("update 1", 0, 10), note("update 2", 90, 100), event("mm", 5, 95)])
    assert found["updates"] == [1, 2]
    assert found["seconds"] == pytest.approx(20e-6)
    assert found["busy"]["share"] == pytest.approx(0.5)
    assert found["gaps"]["count"] == 2


def test_a_trace_without_an_update_is_refused() -> None:
    with pytest.raises(ValueError, match="no update"):
        summarise_trace([event("mm", 0, 1), note("update of something", 0, 1)])


def test_union_and_gaps_divide_a_window() -> None:
    joined = union([(5, 6), (0, 2), (1, 3), (3, 4)])
    assert joined == [(0, 4), (5, 6)]
    assert gaps_between(joined, (0, 8)) == [1, 2]
    assert gaps_between([], (0, 8)) == [8]
    assert own_times([event("a", 0, 10), event("b", 0, 10), event("c", 10, 12)]) == [0, 10, 2]
