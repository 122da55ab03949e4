"""The comparison as a whole: which arms there are, whether they may be compared, what the change did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training_lab.comparing.arms import Arm, Change, Run, as_run, changes, group, one_per_seed
from training_lab.comparing.comparability import LEARNING, SPEED, Aspect, Judged, judge
from training_lab.comparing.effects import Effect, Question, effects
from training_lab.comparing.noise_floor import find_floor
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
    remark: str = ""
    """What there is to say about the noise floor."""

    @property
    def obstacles(self) -> list[Aspect]:
        """What forbids to compare losses."""
        return self.judged.obstacles(LEARNING, self.allowed)

    @property
    def chosen(self) -> list[Change]:
        """What was changed by hand; the rest follows from it."""
        return [change for change in self.declared if not change.is_consequence]

    @property
    def exit_code(self) -> int:
        if not self.effects:
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
            return DIFFERENT if any(not parting.is_same for *_, parting in self.partings) else INDISTINGUISHABLE
        return NOT_COMPARABLE if NOT_COMPARABLE in codes else min(codes)


def compare_runs(
    folders: Sequence[RunFolder],
    allowed: tuple[str, ...] = (),
    question: Question | None = None,
    runs_dir: Path | None = None,
    names: Mapping[str, str] | None = None,
) -> Comparison:
    """Compares runs from their folders alone; noise floors are looked for in `runs_dir`. `names` calls an arm by the id
    of its first run. Raises UserError for what is
    no comparison, LabError for a folder that cannot be read."""
    paths = [folder.path.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        twice = next(folder for folder in folders if paths.count(folder.path.resolve()) > 1)
        raise UserError(f"{twice.path}: named twice; a run cannot be compared with itself")
    if len(folders) < 2:
        raise UserError("compare: needs at least two runs; `runs` lists them")
    if len(folders) > MOST_RUNS:
        raise UserError(f"compare: {len(folders)} runs are too many; at most {MOST_RUNS}")
    arms = group([read_run(folder) for folder in folders], names or {})
    pairs = [compare_arms(arms[0], other, allowed, question or Question(), runs_dir) for other in arms[1:]]
    partings = [
        (one, other, find_parting(one, other))
        for arm in arms
        for number, one in enumerate(arm.runs)
        for other in arm.runs[number + 1 :]
        if one.seeds == other.seeds
    ]
    return Comparison(arms, pairs, partings)


def read_run(folder: RunFolder) -> Run:
    """A run from its folder. Raises LabError if its config is missing or damaged."""
    found = gather(folder)
    try:
        return as_run(found, folder)
    except (KeyError, TypeError, AttributeError) as error:
        damage = "; ".join(f"{one.file}: {one.message}" for one in found.damage[:3]) or f"{CONFIG}: {error} is missing"
        raise LabError(f"{folder.path}: cannot be compared: {damage}") from error


def compare_arms(
    first: Arm, second: Arm, allowed: tuple[str, ...], question: Question, runs_dir: Path | None
) -> Pair:  # fmt: skip
    """Two arms."""
    declared = changes(first, second)
    judged = judge(first, second, declared)
    if judged.obstacles(LEARNING, allowed):
        return Pair(first, second, declared, judged, [], allowed)
    remark = ""
    if all(len(one_per_seed(arm).runs) == 1 for arm in (first, second)) and runs_dir is not None:
        floor = find_floor(runs_dir, first.runs[0])
        question, remark = question._replace(floor=floor.values if floor else None), floor.remark if floor else ""
    found = effects(first, second, judged.is_paired, question)
    against_speed = judged.obstacles(SPEED, allowed)
    if against_speed:
        why = f"not compared: {', '.join(aspect.name for aspect in against_speed)} differ"
        found = [one._replace(verdict=None, reason=why) if one.matters_for == SPEED else one for one in found]
    return Pair(first, second, declared, judged, found, allowed, remark)


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
                "remark": pair.remark,
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
