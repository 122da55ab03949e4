"""The comparison in lines for a terminal, and its parts as sentences. Pure."""

from __future__ import annotations

from training_lab.comparing.arms import Arm, one_per_seed
from training_lab.comparing.compare import Comparison, Pair
from training_lab.comparing.effects import Effect

MOST_NAMED = 6


def in_lines(comparison: Comparison) -> list[str]:
    """The comparison for people."""
    lines = ["Arms"]
    lines += [f"  {arm.name}  {arm.title}: {named_runs(arm)}" for arm in comparison.arms]
    for pair in comparison.pairs:
        lines += ["", *lines_of(pair)]
    for one, other, parting in comparison.partings:
        lines += ["", f"{one.id} and {other.id} have the same config and seeds: {parting.detail}"]
    if not comparison.pairs and not comparison.partings:
        text = "One config with different seeds: repetitions, and nothing to compare. Name runs of another config."
        lines += ["", text]
    return lines


def named_runs(arm: Arm) -> str:
    """The runs of an arm."""
    more = f", … {len(arm.runs)} in all" if len(arm.runs) > MOST_NAMED else ""
    return ", ".join(run.id for run in arm.runs[:MOST_NAMED]) + more


def lines_of(pair: Pair) -> list[str]:
    """Two arms for people."""
    lines = [f"{pair.first.name} → {pair.second.name}  {headline(pair)}"]
    for aspect in pair.obstacles:
        lines.append(f"    {aspect.advice}")
    if pair.obstacles or len(pair.chosen) != 1:
        lines += [f"    changed: {change}" for change in pair.chosen[:12]]
    lines += [f"    comes with it: {change}" for change in pair.declared if change.is_consequence]
    if pair.allowed:
        lines.append(f"  ALLOWED BY HAND: {', '.join(pair.allowed)}: the comparison is not controlled in this")
    same = [aspect.name for aspect in pair.judged.aspects if aspect.is_same]
    lines.append(f"  the same: {', '.join(same)}")
    for aspect in pair.judged.aspects:
        if not aspect.is_same and aspect not in pair.obstacles:
            lines.append(f"  differs: {aspect.name}: {aspect.detail}")
    if pair.effects:
        lines.append(f"  {how_compared(pair)}")
        endpoint = pair.effects[0].verdict
        if endpoint is not None and endpoint.word == "one run each":
            lines.append("  to learn more: run both with other train.seed, or `noise --config ...` once for the first")
    if pair.remark:
        lines.append(f"  {pair.remark}")
    for number, effect in enumerate(pair.effects):
        if number == 1:
            lines.append("  exploratory: not corrected for looking at several figures")
        lines += [f"    {effect.name}: {arrow(effect)}", f"      {said(effect)}"]
    return lines


def headline(pair: Pair) -> str:
    """Whether the comparison is controlled, in a sentence."""
    if pair.obstacles:
        return f"Not comparable: {'; '.join(f'{one.name}: {one.detail}' for one in pair.obstacles)}"
    if len(pair.chosen) == 1:
        return f"Controlled: one change, {pair.chosen[0]}"
    if not pair.chosen:
        return "No setting was changed by hand; what differs comes with others"
    return f"{len(pair.chosen)} changes at once: which of them did it, cannot be told"


def how_compared(pair: Pair) -> str:
    """Runs and method, in a sentence."""
    how = "in pairs of the same seed, initial weights and batches" if pair.judged.is_paired else "as two groups"
    counts = [len(one_per_seed(arm).runs) for arm in (pair.first, pair.second)]
    repeats = len(pair.first.runs) + len(pair.second.runs) - sum(counts)
    more = f"; {repeats} more with a seed that is among them, which count for speed alone" if repeats else ""
    return f"{counts[0]} and {counts[1]} runs, compared {how}{more}"


def arrow(effect: Effect) -> str:
    """Before and after, as means."""
    if not effect.first or not effect.second:
        return "–"
    before, after = (sum(values) / len(values) for values in (effect.first, effect.second))
    return f"{number(before)} → {number(after)} {effect.unit}"


def said(effect: Effect) -> str:
    """The verdict, or why there is none."""
    return effect.verdict.sentence if effect.verdict else effect.reason


def number(value: float) -> str:
    """A figure as people read it."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.4f}"
