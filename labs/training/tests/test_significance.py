"""The statistics: against scipy's own tests, by simulation, and in the wording."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from scipy import stats

from training_lab.comparing.significance import (
    Interval,
    compare_values,
    judge,
    mean_interval,
    power_at,
    prediction_interval,
    runs_needed,
    sign_flip_p,
    smallest_effect,
    welch_interval,
)  # fmt: skip

A, B = [2.74, 2.71, 2.76, 2.73, 2.75], [2.70, 2.72, 2.69, 2.71, 2.66]


def test_intervals_are_those_of_scipy() -> None:
    expected = stats.ttest_ind(B, A, equal_var=False).confidence_interval()
    assert welch_interval(A, B) == pytest.approx((expected.low, expected.high))
    differences = [b - a for a, b in zip(A, B, strict=True)]
    expected = stats.ttest_1samp(differences, 0).confidence_interval()
    assert mean_interval(differences) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize("size", [6, 7, 9])
def test_sign_flips_are_those_of_scipys_exact_permutation_test(size: int) -> None:
    values = np.random.default_rng(size).normal(0.4, 1, size)
    expected = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(values.tolist()) == pytest.approx(expected.pvalue)


@pytest.mark.parametrize(
    ("runs", "two_arms", "pairs"),
    [(2, 5.65, 11.6), (3, 3.07, 3.26), (4, 2.38, 2.13), (5, 2.02, 1.68), (6, 1.80, 1.43), (8, 1.51, 1.16),
     (10, 1.32, 1.00), (20, 0.91, 0.66)],
)  # fmt: skip
def test_the_smallest_difference_that_can_be_seen(runs: int, two_arms: float, pairs: float) -> None:
    assert smallest_effect(runs, is_paired=False) == pytest.approx(two_arms, rel=0.01)
    assert smallest_effect(runs, is_paired=True) == pytest.approx(pairs, rel=0.01)
    assert power_at(smallest_effect(runs, False), runs, False) == pytest.approx(0.8)


@pytest.mark.parametrize(("runs", "factor"), [(3, 4.97), (5, 3.04), (8, 2.51), (10, 2.37)])
def test_where_one_more_run_would_fall(runs: int, factor: float) -> None:
    values = stats.norm.ppf((np.arange(runs) + 0.5) / runs).tolist()
    interval = prediction_interval(values)
    assert (interval.high - np.mean(values)) / np.std(values, ddof=1) == pytest.approx(factor, rel=0.005)


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("effect", [0.1, 0.3, 0.5, 1.0, 2.0, 4.0])
def test_so_many_runs_are_needed_and_one_less_is_not_enough(effect: float, is_paired: bool) -> None:
    runs = runs_needed(effect, is_paired)
    assert runs is not None
    assert power_at(effect, runs, is_paired) >= 0.8 or runs > 200
    assert runs == 2 or power_at(effect, runs - 1, is_paired) < 0.801
    assert runs_needed(1e-6, is_paired) is None


@pytest.mark.parametrize("runs", [3, 5, 10])
def test_an_interval_called_95_percent_covers_95_percent(runs: int) -> None:
    generator = np.random.default_rng(runs)
    covered = paired = 0
    for _ in range(2000):
        first, second = generator.normal(0, 1, runs).tolist(), generator.normal(0.7, 2, runs).tolist()
        covered += welch_interval(first, second).holds(0.7)
        paired += mean_interval([b - a for a, b in zip(first, second, strict=True)]).holds(0.7)
    assert 0.93 <= covered / 2000 <= 0.97
    assert 0.93 <= paired / 2000 <= 0.97


def test_an_a_a_comparison_ends_indistinguishable_and_three_sigma_are_found() -> None:
    generator = np.random.default_rng(7)
    false, found = 0, 0
    for _ in range(500):
        first = generator.normal(3, 0.01, 5).tolist()
        same, other = generator.normal(3, 0.01, 5).tolist(), generator.normal(2.97, 0.01, 5).tolist()
        false += compare_values(first, same, is_paired=False, lower_is_better=True, delta=0.004).is_different
        verdict = compare_values(first, other, is_paired=False, lower_is_better=True, delta=0.004)
        found += verdict.word == "better"
    assert false <= 35, "at least 93 of 100 end without a difference"
    assert found >= 475, "at least 95 of 100 find it"


@pytest.mark.parametrize(
    ("interval", "lower_is_better", "word"),
    [
        (Interval(-2, -1), True, "better"),
        (Interval(-2, -1), False, "worse"),
        (Interval(1, 2), True, "worse"),
        (Interval(1, 2), False, "better"),
        (Interval(-2, 1), True, "indistinguishable"),
        (Interval(-0.4, 0.4), True, "equivalent"),
        (Interval(0.1, 0.4), True, "equivalent"),
        (Interval(0.1, 0.6), True, "worse"),
    ],
)
def test_the_word_for_an_interval(interval: Interval, lower_is_better: bool, word: str) -> None:
    assert judge(interval, 0.5, lower_is_better) == word


def test_what_cannot_be_told_apart_says_what_it_would_take() -> None:
    runs = ([3.31, 3.30, 3.32], [3.30, 3.31, 3.33])
    verdict = compare_values(*runs, is_paired=False, lower_is_better=True, delta=0.004)
    assert verdict.word == "indistinguishable"
    assert re.fullmatch(
        r"indistinguishable from noise with these n: Δ = \+0\.003333, 95 % CI \[-0\.\d+, \+0\.\d+\], "
        r"noise s = 0\.0129, n = 3\+3; the smallest difference that these could have shown \(80 % power\): 0\.0396; "
        r"for δ = 0\.004 it takes n ≈ \d+ each",
        verdict.sentence,
    ), verdict.sentence


def test_one_run_each_says_nothing_about_noise_and_one_against_five_something() -> None:
    lone = compare_values([2.7], [2.6], is_paired=True, lower_is_better=True)
    assert (lone.word, lone.interval, lone.is_different) == ("one run each", None, False)
    assert "nobody can tell" in lone.sentence
    inside = compare_values(A, [2.74], is_paired=False, lower_is_better=True)
    outside = compare_values(A, [2.2], is_paired=False, lower_is_better=True)
    assert (inside.word, outside.word) == ("indistinguishable", "larger than seed noise")
    assert compare_values([2.2], A, is_paired=False, lower_is_better=True).word == "larger than seed noise"


def test_the_same_values_are_identical_and_no_statistics() -> None:
    assert compare_values([1.5], [1.5], is_paired=True, lower_is_better=True).word == "identical"
    assert compare_values([1.5, 1.5], [1.5, 1.5], is_paired=False, lower_is_better=True).word == "identical"


def test_exact_differences_without_any_spread_are_differences() -> None:
    verdict = compare_values([100.0, 100.0], [90.0, 90.0], is_paired=False, lower_is_better=True)
    assert verdict.word == "better"
    assert verdict.interval == Interval(-10, -10)


def test_sign_flips_have_to_agree() -> None:
    # Five small gains and one large: Student's interval leaves 0 out only where the flips do, too.
    for differences in itertools.product((-0.01, -0.02, -0.3), repeat=6):
        first = [1.0] * 6
        second = [1 + d for d in differences]
        if len(set(second)) == 1:
            continue
        verdict = compare_values(first, second, is_paired=True, lower_is_better=True, delta=1e-9)
        assert math.isfinite(verdict.difference)
        assert "exact sign flips" in verdict.method
        break


def test_an_arm_without_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="no runs"):
        compare_values([], [1.0], is_paired=False, lower_is_better=True)
