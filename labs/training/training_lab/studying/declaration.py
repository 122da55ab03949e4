"""A study's file: the question, the base config, the changes, the seeds, the endpoint, where it runs, and its budget.

Everything is checked before anything runs: each arm with each seed is resolved as a config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training_lab.config_files import label_of, read_mapping, show
from training_lab.errors import UserError
from training_lab.identity import identity_of
from training_lab.resolve import SUFFIXES, Resolved, nearest, resolve_config

STUDIES = Path(__file__).resolve().parents[2] / "studies"
"""The studies that ship."""
WHERE = ("local", "ssh", "runpod")
ENDPOINTS = ("tokens", "seconds")
KINDS: dict[Any, str] = {
    str: "a text",
    dict: "an object",
    list: "a list",
    (int, float): "a number",
    (str, dict): "a config's name, or an object",
}
KEYS: dict[str, type | tuple[type, ...]] = {
    "question": str, "expected": str, "base": (str, dict), "base_name": str, "changes": dict, "seeds": list,
    "endpoint": str, "delta": (int, float), "stop_after": dict, "where": str, "remote": dict, "budget": dict,
}  # fmt: skip
REQUIRED = ("question", "expected", "base", "seeds")
BUDGET = ("hours", "usd")
MOST_RUNS = 200
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


class Arm(NamedTuple):
    """One config of a study."""

    name: str
    settings: dict[str, Any] | str
    """What it changes of the base, or the file that does; empty for the base itself."""
    stop_after: int | None
    """The update after which each run is stopped once, and goes on in another process."""


class Study(NamedTuple):
    """A question and how it will be answered."""

    name: str
    question: str
    expected: str
    base: str | dict[str, Any]
    """A config's name or file, or one that is written out, such as `{"extends": "small", "train": {"updates": 50}}`."""
    arms: list[Arm]
    """The base first."""
    seeds: list[int]
    endpoint: str
    delta: float | None
    where: str
    remote: dict[str, Any]
    hours: float | None
    usd: float | None

    @property
    def declared(self) -> dict[str, Any]:
        """What was fixed before the first run: another one is another study. Seeds may be added, and that is told."""
        arms = {arm.name: [arm.settings, arm.stop_after] for arm in self.arms}
        return {
            "question": self.question, "expected": self.expected, "base": self.base, "arms": arms,
            "endpoint": self.endpoint, "delta": self.delta,
        }  # fmt: skip

    @property
    def identity(self) -> str:
        return identity_of(self.declared)


def find_study(name_or_file: str) -> Path:
    """The file that a name or path stands for."""
    direct = Path(name_or_file)
    if direct.is_file():
        return direct
    candidate = STUDIES / f"{name_or_file}.json"
    if candidate.is_file():
        return candidate
    known = sorted(path.stem for path in STUDIES.glob("*.json"))
    raise UserError(f"{name_or_file}: no such study{nearest(name_or_file, known)}; there are: {', '.join(known)}")


def read_study(path: Path) -> Study:
    """The study in a file. Raises UserError, with the key, for anything that is wrong with it."""
    label = label_of(path)
    _, said = read_mapping(path)
    check_keys(said, label)
    base = relative_to(path, said["base"]) if isinstance(said["base"], str) else said["base"]
    stops = said.get("stop_after", {})
    changes = said.get("changes", {})
    base_name = said.get("base_name", "base")
    arms = [Arm(base_name, {}, stops.get(base_name))]
    for name, change in changes.items():
        settings = relative_to(path, change) if isinstance(change, str) else change
        arms.append(Arm(name, settings, stops.get(name)))
    budget = said.get("budget", {})
    study = Study(
        path.stem, said["question"].strip(), said["expected"].strip(), base, arms, said["seeds"],
        said.get("endpoint", "tokens"), said.get("delta"), said.get("where", "local"), said.get("remote", {}),
        budget.get("hours"), budget.get("usd"),
    )  # fmt: skip
    for problem in problems(study, stops):
        raise UserError(f"{label}: {problem}")
    return study


def check_keys(said: Mapping[str, Any], label: str) -> None:
    """Raises UserError for a key that is missing, unknown, or of another type."""
    for key in said:
        if key not in KEYS:
            raise UserError(f"{label}: {key}: unknown key{nearest(key, list(KEYS))}")
        if not isinstance(said[key], KEYS[key]) or isinstance(said[key], bool):
            raise UserError(f"{label}: {key}: must be {KINDS[KEYS[key]]}, got {show(said[key])}")
    for key in REQUIRED:
        if not said.get(key):
            raise UserError(f"{label}: {key}: missing; a study says it before anything runs")


def problems(study: Study, stops: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with what it says."""
    names = [arm.name for arm in study.arms]
    for name in names:
        if not NAME.fullmatch(name):
            yield f"changes: {show(name)}: a change's name is made of a-z, 0-9 and -, and has at most 40 of them"
    if len(set(names)) < len(names):
        yield f"changes: {names[0]!r} is the base's own name; give it another with base_name"
    for name, update in stops.items():
        if name not in names:
            yield f"stop_after: {name}: no such arm; there are {', '.join(names)}"
        if not isinstance(update, int) or isinstance(update, bool) or update < 1:
            yield f"stop_after: {name}: must be the number of an update, got {show(update)}"
    wrong = [seed for seed in study.seeds if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0]
    if wrong:
        yield f"seeds: must be whole numbers, got {show(wrong[0])}"
    if len(set(study.seeds)) < len(study.seeds):
        yield "seeds: one is named twice"
    if len(study.seeds) * len(study.arms) > MOST_RUNS:
        yield f"seeds: {len(study.seeds)} seeds of {len(study.arms)} arms are more than {MOST_RUNS} runs"
    if study.endpoint not in ENDPOINTS:
        yield f"endpoint: must be one of {', '.join(ENDPOINTS)}, got {show(study.endpoint)}"
    if study.delta is not None and not study.delta > 0:
        yield f"delta: must be above 0, got {show(study.delta)}"
    if study.where not in WHERE:
        yield f"where: must be one of {', '.join(WHERE)}, got {show(study.where)}"
    for key, limit in (("hours", study.hours), ("usd", study.usd)):
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
            yield f"budget.{key}: must be a number above 0, got {show(limit)}"
    if study.where == "runpod" and study.usd is None:
        yield "budget.usd: a study on rented machines needs a budget"
    if study.where != "local" and any(arm.stop_after for arm in study.arms):
        yield "stop_after: works with where = local only"


def relative_to(path: Path, name: str) -> str:
    """A config's name, or its file, which is looked for beside the study."""
    beside = path.parent / name
    return str(beside) if name.endswith(SUFFIXES) and beside.is_file() else name


def config_of(study: Study, arm: Arm) -> dict[str, Any]:
    """The arm as a config file, which stands beside that of the base: the base, and the one change."""
    if isinstance(arm.settings, str):
        return {"extends": str(Path(arm.settings).resolve())}
    if arm is not study.arms[0]:
        return {"extends": f"{study.name}-{study.arms[0].name}.json", **arm.settings}
    if isinstance(study.base, dict):
        return study.base
    return {"extends": str(Path(study.base).resolve()) if study.base.endswith(SUFFIXES) else study.base}


def resolve_arm(path: Path, seed: int, more: tuple[str, ...] = ()) -> Resolved:
    """The config of an arm's file with a seed."""
    return resolve_config(str(path), [f"train.seed={seed}", *more])
