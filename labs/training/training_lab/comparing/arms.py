"""Runs as they are compared: grouped into arms, which are repetitions of one config with other seeds. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from training_lab.config import fields_by_key
from training_lab.record import RunFolder
from training_lab.report.gather import Gathered
from training_lab.settings import Derived

SEEDS = ("train.seed", "data.order_seed")
UNCOMPARED = (
    "purpose", "tracking", "remote", "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_best",
    "data.cache_dir",
)  # fmt: skip
"""Settings that change nothing that is compared: words, mirrors, the machine's name, what is saved and where."""
DERIVED = "derived: "
DEFAULTS = {key: one.default for key, one in fields_by_key().items() if not isinstance(one.default, Derived)}
"""What a setting was that an earlier version did not have yet."""


ONLY = {key: one.metadata["only"] for key, one in fields_by_key().items() if one.metadata.get("only")}
"""Settings that have an effect only where another one has one of some values."""


class Run(NamedTuple):
    """One run, read from its folder."""

    id: str
    found: Gathered
    settings: dict[str, Any]
    """The config's values by dotted name."""
    derived: frozenset[str]
    """The settings that followed from others."""
    folder: RunFolder | None = None

    @property
    def seeds(self) -> tuple[Any, ...]:
        return tuple(self.settings.get(key) for key in SEEDS)

    @property
    def has_diverged(self) -> bool:
        """Whether its loss or gradient became infinite or no number: an outcome, not an accident."""
        return str(self.found.state) == "failed: non-finite"


class Arm(NamedTuple):
    """Repetitions of one config."""

    name: str
    """A letter, or what a study calls it."""
    runs: list[Run]

    @property
    def title(self) -> str:
        """The config's name, which two arms may share."""
        return str(self.runs[0].found["config.json"].get("name", "?"))


class Change(NamedTuple):
    """A setting that two arms do not share."""

    key: str
    first: Any
    second: Any
    is_consequence: bool
    """It follows from another setting in both, or has an effect only with another one that was changed."""

    def __str__(self) -> str:
        return f"{self.key}: {show(self.first)} → {show(self.second)}"


def as_run(found: Gathered, folder: RunFolder | None = None) -> Run:
    """A run for comparing. Raises KeyError where its config is not there."""
    config = found["config.json"]
    origins = config["origins"]
    derived = frozenset(key for key, origin in origins.items() if str(origin).startswith(DERIVED))
    return Run(found.run_id, found, {**DEFAULTS, **dict(flatten(config["values"]))}, derived, folder)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by dotted name."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make an arm: all but seeds, what changes nothing, and what has no effect beside the others."""

    def is_part(key: str) -> bool:
        only = ONLY.get(key)
        has_effect = only is None or settings.get(only[0]) in only[1:]
        is_named = any(key == name or key.startswith(f"{name}.") for name in UNCOMPARED)
        return key not in SEEDS and not is_named and has_effect

    return {key: value for key, value in settings.items() if is_part(key)}


def group(runs: list[Run], names: Mapping[str, str]) -> list[Arm]:
    """The arms, in the order in which their first runs were named; the first is what the others are compared with.
    `names` gives an arm's name by the id of its first run; the others are called by letters."""
    arms: list[list[Run]] = []
    for run in runs:
        mine = compared(run.settings)
        for others in arms:
            if compared(others[0].settings) == mine:
                others.append(run)
                break
        else:
            arms.append([run])
    return [
        Arm(names.get(found[0].id) or (chr(ord("A") + number) if number < 26 else f"#{number + 1}"), found)
        for number, found in enumerate(arms)
    ]


def changes(first: Arm, second: Arm) -> list[Change]:
    """What the second arm changes; what follows from it comes last."""
    one, other = first.runs[0], second.runs[0]
    mine, theirs = compared(one.settings), compared(other.settings)
    keys = {key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)}

    def follows(key: str) -> bool:
        return (key in one.derived and key in other.derived) or ONLY.get(key, ("",))[0] in keys

    found = [Change(key, mine.get(key), theirs.get(key), follows(key)) for key in sorted(keys)]
    return sorted(found, key=lambda change: change.is_consequence)


def one_per_seed(arm: Arm) -> Arm:
    """The arm with one run of each seed, a finished one if there is one: a run that is made again with the same seed
    says nothing new of learning, and counted twice would make the noise look smaller than it is."""
    chosen: dict[tuple[Any, ...], Run] = {}
    for run in sorted(arm.runs, key=lambda run: run.found.state != "finished"):
        chosen.setdefault(run.seeds, run)
    kept = {run.id for run in chosen.values()}
    return arm._replace(runs=[run for run in arm.runs if run.id in kept])


def pairs(first: Arm, second: Arm) -> list[tuple[Run, Run]] | None:
    """The runs that belong together by their seeds, where both arms have the same seeds; else None."""
    ours, theirs = ({run.seeds: run for run in one_per_seed(arm).runs} for arm in (first, second))
    if ours.keys() != theirs.keys():
        return None
    return [(ours[seeds], theirs[seeds]) for seeds in sorted(ours, key=str)]


def show(value: Any) -> str:
    """A value of a setting in a sentence."""
    return str(value) if value is not None else "none"
