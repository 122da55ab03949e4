"""The comparison as a whole: which arms there are, whether they may be compared, what the change did, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from training_lab.comparing.arms import Arm, Change, Run, as_run, changes, group
from training_lab.comparing.comparability import Aspect, Judged, judge
from training_lab.comparing.effects import Effect, effects
from training_lab.comparing.parting import Parting, find_parting
from training_lab.errors import LabError, UserError
from training_lab.record import CONFIG, RunFolder
from training_lab.report.gather import gather

DIFFERENT, INDISTINGUISHABLE, NOT_COMPARABLE = 0, 1, 2
"""The exit codes of `compare`."""
MOST_RUNS = 200


class Pair(NamedTuple):
    """The first arm and another one."""

    first: Arm
    second: Arm
    declared: list[Change]
    judged: Judged
    effects: list[Effect]
    """Empty where losses may not be compared."""
    allowed: tuple[str, ...]

    @property
    def obstacles(self) -> list[Aspect]:
        return self.judged.obstacles("learning", self.allowed)

    @property
    def exit_code(self) -> int:
        if self.obstacles:
            return NOT_COMPARABLE
        endpoint = self.effects[0].verdict
        return DIFFERENT if endpoint is not None and endpoint.is_different else INDISTINGUISHABLE


class Comparison(NamedTuple):
    """What `compare` found."""

    arms: list[Arm]
    pairs: list[Pair]
    partings: list[tuple[Run, Run, Parting]]
    """Of runs that should be the same: one config, the same seeds."""

    @property
    def exit_code(self) -> int:
        """Of several pairs: not comparable before different before indistinguishable. Of one arm: different if runs
        that should be the same are not."""
        codes = [pair.exit_code for pair in self.pairs]
        if not codes:
            return DIFFERENT if any(parting.cause != "nothing" for *_, parting in self.partings) else INDISTINGUISHABLE
        return NOT_COMPARABLE if NOT_COMPARABLE in codes else min(codes)


def compare_runs(folders: Sequence[RunFolder], allowed: tuple[str, ...] = (), delta: float | None = None) -> Comparison:
    """Compares runs from their folders alone. Raises UserError for what is no comparison, LabError for a folder that
    cannot be read."""
    paths = [folder.path.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        twice = next(folder for folder in folders if paths.count(folder.path.resolve()) > 1)
        raise UserError(f"{twice.path}: named twice; a run cannot be compared with itself")
    if len(folders) < 2:
        raise UserError("compare: needs at least two runs; `runs` lists them")
    if len(folders) > MOST_RUNS:
        raise UserError(f"compare: {len(folders)} runs are too many; at most {MOST_RUNS}")
    arms = group([read_run(folder) for folder in folders])
    pairs = [compare_arms(arms[0], other, allowed, delta) for other in arms[1:]]
    partings = [
        (one, other, find_parting(one, other))
        for arm in arms
        for number, one in enumerate(arm.runs)
        for other in arm.runs[number + 1 :]
        if one.seeds == other.seeds
    ]
    return Comparison(arms, pairs, partings)


def read_run(folder: RunFolder) -> Run:
    """A run from its folder. Raises LabError if what a comparison needs is missing or damaged."""
    found = gather(folder)
    try:
        return as_run(found)
    except (KeyError, TypeError, AttributeError) as error:
        damage = "; ".join(f"{one.file}: {one.message}" for one in found.damage[:3]) or f"{CONFIG}: {error} is missing"
        raise LabError(f"{folder.path}: cannot be compared: {damage}") from error


def compare_arms(first: Arm, second: Arm, allowed: tuple[str, ...], delta: float | None) -> Pair:
    """Two arms."""
    declared = changes(first, second)
    judged = judge(first, second, declared)
    obstacles = judged.obstacles("learning", allowed)
    found = [] if obstacles else effects(first, second, judged.is_paired, delta)
    stands_against_speed = judged.obstacles("speed", allowed)
    if stands_against_speed:
        names = ", ".join(aspect.name for aspect in stands_against_speed)
        why = f"not compared: {names} differ"
        found = [
            effect._replace(verdict=None, reason=why) if effect.matters_for == "speed" else effect for effect in found
        ]
    return Pair(first, second, declared, judged, found, allowed)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison for programs."""
    return {
        "arms": [
            {"name": arm.name, "config": arm.title, "runs": [run.id for run in arm.runs]} for arm in comparison.arms
        ],
        "pairs": [
            {
                "first": pair.first.name,
                "second": pair.second.name,
                "changes": [change._asdict() for change in pair.declared],
                "aspects": [aspect._asdict() for aspect in pair.judged.aspects],
                "is_paired": pair.judged.is_paired,
                "is_comparable": not pair.obstacles,
                "allowed": list(pair.allowed),
                "effects": [
                    {**effect._asdict(), "verdict": effect.verdict._asdict() if effect.verdict else None}
                    for effect in pair.effects
                ],
            }
            for pair in comparison.pairs
        ],
        "partings": [
            {"first": one.id, "second": other.id, **parting._asdict()} for one, other, parting in comparison.partings
        ],
        "exit_code": comparison.exit_code,
    }


def in_lines(comparison: Comparison) -> list[str]:
    """The comparison for people."""
    lines = ["Arms"]
    for arm in comparison.arms:
        runs = ", ".join(run.id for run in arm.runs[:6]) + (f", … {len(arm.runs)} in all" if len(arm.runs) > 6 else "")
        lines.append(f"  {arm.name}  {arm.title}: {runs}")
    for pair in comparison.pairs:
        lines += ["", *lines_of(pair)]
    for one, other, parting in comparison.partings:
        lines += ["", f"{one.id} and {other.id} have the same config and seeds: {parting.detail}"]
        if parting.cause != "nothing":
            lines.append(f"  they part at update {parting.update}, by {parting.cause}")
    if not comparison.pairs and not comparison.partings:
        lines += [
            "",
            "One config with different seeds: repetitions, and nothing to compare. Name runs of another config.",
        ]
    return lines


def lines_of(pair: Pair) -> list[str]:
    """Two arms for people."""
    chosen = [change for change in pair.declared if not change.is_consequence]
    follows = [change for change in pair.declared if change.is_consequence]
    lines = [f"{pair.first.name} → {pair.second.name}"]
    if pair.obstacles:
        lines.append("  NOT COMPARABLE")
        for aspect in pair.obstacles:
            lines += [f"    {aspect.name}: {aspect.detail}", f"      {aspect.advice}"]
    elif len(chosen) == 1:
        lines.append(f"  controlled: one change, {chosen[0]}")
    else:
        lines.append(f"  {len(chosen)} changes at once: what did it, cannot be told apart")
    if pair.obstacles or len(chosen) != 1:
        lines += [f"    {change}" for change in chosen[:12]]
    lines += [f"    follows from it: {change}" for change in follows]
    if pair.allowed:
        lines.append(f"  ALLOWED BY HAND: {', '.join(pair.allowed)}: the comparison is not controlled in this")
    same = [aspect.name for aspect in pair.judged.aspects if aspect.is_same]
    lines.append(f"  the same: {', '.join(dict.fromkeys(same))}")
    for aspect in pair.judged.aspects:
        if not aspect.is_same and aspect not in pair.obstacles:
            lines.append(f"  differs: {aspect.name}: {aspect.detail}")
    if pair.effects:
        how = "in pairs of the same seed" if pair.judged.is_paired else "as two groups"
        lines.append(f"  {len(pair.first.runs)} and {len(pair.second.runs)} runs, compared {how}")
    for effect in pair.effects:
        lines += lines_of_effect(effect)
    return lines


def lines_of_effect(effect: Effect) -> list[str]:
    """One figure for people."""
    if effect.verdict is None:
        return [f"    {effect.name}: {effect.reason}"]
    before, after = (sum(values) / len(values) for values in (effect.first, effect.second))
    head = f"    {effect.name}: {number(before)} → {number(after)} {effect.unit}"
    return [head, f"      {effect.verdict.sentence}"]


def number(value: float) -> str:
    """A figure as people read it."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"
