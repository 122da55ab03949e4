"""The picture of an update's allocations."""

from __future__ import annotations

import numpy as np
import pytest

from training_lab.memory_events import MOST_POINTS, Change, Phase, memory_picture, thin

PHASES = [Phase("zero_grad", 10.0, 11.0), Phase("forward", 11.0, 13.0), Phase("backward", 13.0, 16.0)]


def test_what_is_held_follows_every_allocation_and_free() -> None:
    changes = [Change(12.0, 100), Change(10.5, -40), Change(14.0, 50), Change(15.0, -100)]
    picture = memory_picture(changes, PHASES, 1000)
    assert picture["base_bytes"] == 1000
    assert picture["curve"] == {"s": [0.0, 0.5, 2.0, 4.0, 5.0], "bytes": [1000, 960, 1060, 1110, 1010]}


def test_a_phases_peak_counts_what_it_began_with() -> None:
    changes = [Change(10.5, -40), Change(12.0, 100), Change(12.5, -90), Change(15.0, -5)]
    peaks = {phase["name"]: phase["peak_bytes"] for phase in memory_picture(changes, PHASES, 1000)["phases"]}
    assert peaks == {"zero_grad": 1000, "forward": 1060, "backward": 970}


def test_phases_begin_at_zero_and_keep_their_lengths() -> None:
    phases = memory_picture([], PHASES, 7)["phases"]
    assert [(one["begin_s"], one["end_s"], one["peak_bytes"]) for one in phases] == [(0, 1, 7), (1, 3, 7), (3, 6, 7)]


@pytest.mark.parametrize("number", [1, 2, MOST_POINTS, MOST_POINTS + 1, 5_003, 100_000])
def test_a_thinned_curve_keeps_its_ends_its_order_and_its_extremes(number: int) -> None:
    heights = np.random.default_rng(number).integers(-(10**6), 10**6, number).tolist()
    points = [(float(i), height) for i, height in enumerate(heights)]
    thinned = thin(points)
    assert len(thinned) <= MOST_POINTS
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert thinned == sorted(thinned)
    assert {max(heights), min(heights)} <= {height for _, height in thinned}
