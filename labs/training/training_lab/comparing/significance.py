"""What few repetitions can show: intervals, the smallest difference that could have been seen, how many runs it would
take, and the verdict in words. Pure.

A difference is that of the means, the second arm's minus the first's. Intervals are Student's: at n = 3 a percentile
bootstrap called 95 % covers 77 %, Student's 95 %. Two arms whose runs belong together in pairs (the same seed, and that
is verified) are compared by their differences; others by Welch's test, which does not take their spreads to be equal.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

CONFIDENCE = 0.95
POWER = 0.8
SIGN_FLIP_FROM = 6
"""From so many pairs on, the exact sign-flip test has to agree: below, it cannot reach 0.05."""
SIGN_FLIP_TO = 14
"""Up to so many pairs every way is tried."""
BOOTSTRAP_FROM = 8
"""From so many runs on, a bootstrap interval is shown beside Student's: of fewer it covers too little."""
RESAMPLES = 9999
FEW_RUNS = 200
MOST_RUNS = 10_000
EQUIVALENCE = 0.005
"""Of the first arm's mean: a difference that is surely smaller counts as none, unless another is given."""

DIFFERENT = ("better", "worse", "larger than seed noise")
"""Verdicts that say that there is a difference."""


class Interval(NamedTuple):
    """From where to where, at 95 %."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class Verdict(NamedTuple):
    """What the runs say about one figure."""

    word: str
    """`better`, `worse`, `equivalent`, `negligible`, `indistinguishable`, `larger than seed noise`, `identical` or `one
    run each`."""
    difference: float
    interval: Interval | None
    """None where there are too few runs for one."""
    method: str
    smallest: float | None
    """The smallest difference that so many runs show four times out of five."""
    needed: int | None
    """Runs in each arm that would show a difference of the size that counts."""
    sentence: str
    bootstrap: Interval | None = None
    """The bias-corrected and accelerated bootstrap's, where there are runs enough for it."""

    @property
    def is_different(self) -> bool:
        return self.word in DIFFERENT


def half_width(standard_error: float, degrees: float) -> float:
    """Half of Student's interval."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees)) * standard_error


def mean_interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean of at least two values."""
    mean, half = statistics.fmean(values), half_width(standard_error(values), len(values) - 1)
    return Interval(mean - half, mean + half)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def welch_interval(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Of the difference of two means, with Welch's and Satterthwaite's degrees of freedom; at least two values each."""
    difference = statistics.fmean(second) - statistics.fmean(first)
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    if not sum(parts):
        return Interval(difference, difference)
    degrees = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (first, second), strict=True))
    half = half_width(math.sqrt(sum(parts)), degrees)
    return Interval(difference - half, difference + half)


def prediction_interval(values: Sequence[float]) -> Interval:
    """Where one more run like these would fall; at least two values."""
    mean, spread = statistics.fmean(values), statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    half = half_width(spread, len(values) - 1)
    return Interval(mean - half, mean + half)


def sign_flip_p(differences: Sequence[float]) -> float:
    """The share of all ways to flip the signs that give a mean at least as far from 0; exact, and for very many pairs
    that of many random ways (Phipson and Smyth 2010)."""
    total = abs(math.fsum(differences))
    if len(differences) > SIGN_FLIP_TO:
        ways = np.random.default_rng(0).choice([-1.0, 1.0], (RESAMPLES, len(differences)))
        as_far = np.abs(ways @ np.array(differences)) >= total * (1 - 1e-12)
        return float((as_far.sum() + 1) / (RESAMPLES + 1))
    flips = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(math.fsum(sign * d for sign, d in zip(signs, differences, strict=True))) for signs in flips]
    return sum(found >= total * (1 - 1e-12) for found in sums) / len(sums)


def power_at(effect: float, runs: int, is_paired: bool) -> float:
    """The chance that so many runs (in each arm, or pairs) show a difference of `effect` standard deviations (of a run,
    or of a pair's difference)."""
    degrees = runs - 1 if is_paired else 2 * (runs - 1)
    centre = effect * math.sqrt(runs if is_paired else runs / 2)
    limit = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))
    above, below = float(stats.nct.sf(limit, degrees, centre)), float(stats.nct.cdf(-limit, degrees, centre))
    # Far out scipy's distribution gives up; the chance is then 1 above and 0 below.
    return (1.0 if math.isnan(above) else above) + (0.0 if math.isnan(below) else below)


@functools.cache
def smallest_effect(runs: int, is_paired: bool) -> float:
    """The smallest difference, in standard deviations, that so many runs show four times out of five."""
    return float(optimize.brentq(lambda effect: power_at(effect, runs, is_paired) - POWER, 0.01, 40.0))


def runs_needed(effect: float, is_paired: bool) -> int | None:
    """The fewest runs (in each arm, or pairs) that show so large a difference four times out of five; None for more
    than anybody makes."""
    if not effect:
        return None
    if power_at(effect, FEW_RUNS, is_paired) >= POWER:
        # The chance rises with the runs.
        return bisect_left(range(FEW_RUNS), POWER, lo=2, key=lambda runs: power_at(effect, runs, is_paired))
    # So many that Student's distribution is the normal one.
    both = float(stats.norm.ppf((1 + CONFIDENCE) / 2) + stats.norm.ppf(POWER))
    runs = math.ceil((1 if is_paired else 2) * (both / effect) ** 2)
    return runs if runs <= MOST_RUNS else None


def bootstrap_interval(first: Sequence[float], second: Sequence[float] | None = None) -> Interval | None:
    """The bias-corrected and accelerated bootstrap's interval of a mean, or of a difference of means (Efron 1987); None
    for fewer values than it is good for, or all the same."""
    samples = [np.array(values) for values in (first, second) if values is not None]
    if min(map(len, samples)) < BOOTSTRAP_FROM or any(np.ptp(values) == 0 for values in samples):
        return None

    def difference(*parts: np.ndarray, axis: int = -1) -> np.ndarray:
        means = [np.mean(part, axis=axis) for part in parts]
        found: np.ndarray = means[0] if len(means) == 1 else means[1] - means[0]
        return found

    found = stats.bootstrap(
        samples, difference, vectorized=True, method="BCa", n_resamples=RESAMPLES, confidence_level=CONFIDENCE,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return Interval(float(found.confidence_interval.low), float(found.confidence_interval.high))


def compare_values(
    first: Sequence[float],
    second: Sequence[float],
    *,
    is_paired: bool,
    lower_is_better: bool,
    delta: float | None = None,
    is_practical: bool = False,
    floor: Sequence[float] | None = None,
) -> Verdict:
    """The verdict on one figure of two arms.

    `delta` is the smallest difference that matters (half a percent); with `is_practical` a smaller one is never called
    better or worse. `floor` is what repetitions of the first arm gave, for arms of one run each. Pairs are given in the
    same order. Raises ValueError for an arm without runs.
    """
    if not first or not second:
        raise ValueError("an arm has no runs")
    difference = statistics.fmean(second) - statistics.fmean(first)
    delta = abs(statistics.fmean(first)) * EQUIVALENCE if delta is None else delta
    least = delta if is_practical else 0.0
    if len({*first, *second}) == 1:
        return Verdict(
            "identical", 0.0, Interval(0.0, 0.0), "every run is the same", None, None, "identical in every run"
        )
    if len(first) == len(second) == 1:
        return of_two_runs(first[0], second[0], floor)
    if min(len(first), len(second)) == 1:
        return against_spread(first, second, difference)
    if is_paired:
        return of_pairs([b - a for a, b in zip(first, second, strict=True)], lower_is_better, delta, least)
    spread = math.sqrt((statistics.variance(first) + statistics.variance(second)) / 2)
    runs = min(len(first), len(second))
    smallest, needed = detectable(spread, runs, delta, is_paired=False)
    interval = welch_interval(first, second)
    word = judge(interval, delta, lower_is_better, least)
    numbers = f"{len(first)}+{len(second)}"
    bootstrap = bootstrap_interval(first, second)
    sentence = in_words(word, difference, interval, spread, numbers, smallest, needed, delta, bootstrap)
    return Verdict(word, difference, interval, "Welch's t", smallest, needed, sentence, bootstrap)


def of_two_runs(first: float, second: float, floor: Sequence[float] | None) -> Verdict:
    """One run each: nothing can be told, but against a noise floor that was measured before, whether the difference is
    larger than that of two of its runs would be."""
    difference = second - first
    if floor is None or len(floor) < 2:
        sentence = f"Δ = {difference:+.4g} between one run and one run: how much of it is noise, nobody can tell"
        return Verdict("one run each", difference, None, "none", None, None, sentence)
    spread = statistics.stdev(floor)
    half = half_width(spread * math.sqrt(2), len(floor) - 1)
    interval = Interval(difference - half, difference + half)
    word = "indistinguishable" if interval.holds(0.0) else "larger than seed noise"
    sentence = (
        f"{word}: Δ = {difference:+.4g}; two runs that differ in the seed alone are within {half:.4g} of each other "
        f"(95 %, noise floor of {len(floor)} seeds, s = {spread:.3g})"
    )
    return Verdict(word, difference, interval, "noise floor", half, None, sentence)


def against_spread(first: Sequence[float], second: Sequence[float], difference: float) -> Verdict:
    """One run against several: whether it falls where one more of them would."""
    several, one = (first, second[0]) if len(second) == 1 else (second, first[0])
    interval = prediction_interval(several)
    around = Interval(interval.low - one, interval.high - one)
    word = "indistinguishable" if interval.holds(one) else "larger than seed noise"
    said = "falls where" if interval.holds(one) else "does not fall where"
    sentence = (
        f"{word}: Δ = {difference:+.4g}; the one run has {one:.4g} and {said} one more of the {len(several)} others "
        f"would, between {interval.low:.4g} and {interval.high:.4g} (95 %)"
    )
    return Verdict(word, difference, around, "prediction interval", None, None, sentence)


def of_pairs(differences: Sequence[float], lower_is_better: bool, delta: float, least: float = 0.0) -> Verdict:
    """The verdict on differences of runs that belong together."""
    runs, difference = len(differences), statistics.fmean(differences)
    spread, interval = statistics.stdev(differences), mean_interval(differences)
    smallest, needed = detectable(spread, runs, delta, is_paired=True)
    word, method = judge(interval, delta, lower_is_better, least), "t of the pairs"
    if runs >= SIGN_FLIP_FROM:
        chance = sign_flip_p(differences)
        method = f"t of the pairs, and exact sign flips (p = {chance:.3g})"
        if word in DIFFERENT and chance > 1 - CONFIDENCE:
            word = "indistinguishable"
    bootstrap = bootstrap_interval(differences)
    sentence = in_words(word, difference, interval, spread, f"{runs} pairs", smallest, needed, delta, bootstrap)
    return Verdict(word, difference, interval, method, smallest, needed, sentence, bootstrap)


def compare_divergence(first: Sequence[bool], second: Sequence[bool]) -> Verdict:
    """The verdict on how many runs of each arm diverged: Fisher's exact test."""
    counts = [sum(first), sum(second)]
    table = [[count, len(arm) - count] for count, arm in zip(counts, (first, second), strict=True)]
    chance = float(stats.fisher_exact(table).pvalue)
    shares = [count / len(arm) for count, arm in zip(counts, (first, second), strict=True)]
    word = "indistinguishable" if chance > 1 - CONFIDENCE else "worse" if shares[1] > shares[0] else "better"
    sentence = (
        f"{word}: {counts[0]} of {len(first)} runs diverged before the change, {counts[1]} of {len(second)} with it "
        f"(Fisher's exact p = {chance:.2g})"
    )
    return Verdict(word, shares[1] - shares[0], None, "Fisher's exact test", None, None, sentence)


def detectable(spread: float, runs: int, delta: float, is_paired: bool) -> tuple[float | None, int | None]:
    """The smallest difference that the runs could have shown, and how many would show `delta`."""
    if not spread:
        return 0.0, None
    return smallest_effect(runs, is_paired) * spread, runs_needed(delta / spread, is_paired)


def judge(interval: Interval, delta: float, lower_is_better: bool, least: float = 0.0) -> str:
    """The word for an interval. Within ±δ it is equivalent even if it leaves 0 out: a difference that is surely there,
    and surely too small to matter. One whose middle is below `least` is negligible."""
    if -delta < interval.low and interval.high < delta:
        return "equivalent"
    if interval.holds(0.0):
        return "indistinguishable"
    if abs(interval.low + interval.high) / 2 < least:
        return "negligible"
    return "better" if (interval.high < 0) == lower_is_better else "worse"


def in_words(
    word: str, difference: float, interval: Interval, spread: float, numbers: str, smallest: float | None,
    needed: int | None, delta: float, bootstrap: Interval | None = None,
) -> str:  # fmt: skip
    """The verdict as a sentence that a person can quote."""
    between = f"95 % CI {in_brackets(interval)}"
    if bootstrap:
        between += f" (BCa bootstrap {in_brackets(bootstrap)})"
    figures = f"Δ = {signed(difference)}, {between}, noise s = {plain(spread)}, n = {numbers}"
    if word == "equivalent":
        return f"equivalent within ±{plain(delta)}: {figures}"
    if word == "negligible":
        return f"there, and smaller than what matters, {plain(delta)}: {figures}"
    if word != "indistinguishable":
        return f"{word}: {figures}"
    could = f"; the smallest difference that these could have shown (80 % power): {plain(smallest)}" if smallest else ""
    takes = f"; for δ = {plain(delta)} it takes n ≈ {needed} each" if needed else ""
    return f"indistinguishable from noise with these n: {figures}{could}{takes}"


def in_brackets(interval: Interval) -> str:
    """An interval of differences."""
    return f"[{signed(interval.low)}, {signed(interval.high)}]"


def signed(value: float) -> str:
    """A difference as people read it."""
    return f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.4g}"


def plain(value: float) -> str:
    """A figure that is no difference."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
