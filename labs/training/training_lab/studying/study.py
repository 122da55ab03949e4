"""The command `study`: makes the runs that are missing, compares the arms, and writes the study's folder.

`<runs>/studies/<name>/` holds `study.json` (what was declared, when, and what came out), the arms' configs,
`compare.json`, `compare.html`, pictures, and `notes.md`.
"""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiment_runner.durable import json_text, write_atomically
from training_lab.comparing.compare import Comparison, compare_runs
from training_lab.comparing.effects import Question
from training_lab.comparing.page import write_page, write_pictures
from training_lab.comparing.words import headline, in_lines, said
from training_lab.errors import LabError, UserError
from training_lab.ledger import STUDIES, STUDY
from training_lab.progress import Progress
from training_lab.record import list_runs
from training_lab.studying.declaration import Study, config_of, resolve_arm
from training_lab.studying.making import Made, Where, make_runs
from training_lab.studying.notes import make_notes
from training_lab.studying.planned import Planned, describe_here, find_place, interleaved, state_of

DECLARED = ("name", "identity", "declared_utc", "declared", "seeds", "seeds_added")
"""What a study's file keeps from one time to the next; the rest is written anew."""
PAGE, NOTES = "compare.html", "notes.md"


class Result(NamedTuple):
    """A study as it stands."""

    folder: Path
    made: list[Made]
    comparison: Comparison | None
    """None while there are fewer than two runs to compare."""
    remark: str
    """Why there is none."""

    @property
    def is_complete(self) -> bool:
        """Whether every run has an outcome."""
        return all(one.is_outcome for one in self.made)

    def lines(self) -> list[str]:
        """It, for people."""
        missing = sum(not one.is_outcome for one in self.made)
        said = in_lines(self.comparison) if self.comparison is not None else [f"nothing compared: {self.remark}"]
        more = [f"{missing} of {len(self.made)} runs have no outcome yet; the same command goes on"] if missing else []
        page = [f"  page        {(self.folder / PAGE).resolve().as_uri()}"] if self.comparison is not None else []
        return ["", *said, "", *more, f"  notes       {self.folder / NOTES}", *page]


def conduct(study: Study, runs_dir: Path, show: Progress, say: Callable[[str], None]) -> Result:
    """Makes what is missing, and writes what came out. A study that was declared otherwise is refused."""
    folder = runs_dir / STUDIES / study.name
    check(study)
    declared = declare(study, folder)
    plan = plan_runs(study, folder)
    planned = [{"arm": one.arm, "seed": one.seed, "run": one.stem, "state": "planned"} for one in plan]
    write_atomically(folder / STUDY, json_text({**declared, "runs": planned}).encode("utf-8"))
    where = Where(runs_dir, study.where, study.remote, study.hours, study.usd)
    made = make_runs(plan, where, show, say)
    return write_result(study, folder, declared, made, runs_dir)


def describe_plan(study: Study, runs_dir: Path) -> list[str]:
    """What would run, and what is there already."""
    plan = check(study)
    here = describe_here()
    lines = [study.question, ""]
    for planned in plan:
        place = find_place(planned, runs_dir, here, study.where != "local", list_runs(runs_dir))
        lines.append(f"  {planned.arm:<24} seed {planned.seed:<6} {state_of(place):<20} {place.path}")
    return lines


def check(study: Study) -> list[Planned]:
    """The runs, with nothing written where it stays. Raises UserError if an arm is no valid config."""
    with tempfile.TemporaryDirectory() as nowhere:
        return plan_runs(study, Path(nowhere))


def declare(study: Study, folder: Path) -> dict[str, Any]:
    """What was declared, and when: the first time now, later as it was then. Raises UserError if the question, an arm
    or the endpoint is another one now: that would be choosing the question by its answer."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path = folder / STUDY
    if not path.exists():
        said: dict[str, Any] = {
            "name": study.name, "identity": study.identity, "declared_utc": now, "declared": study.declared,
            "seeds": study.seeds, "seeds_added": [],
        }  # fmt: skip
    else:
        said = read_declared(path)
        if said["identity"] != study.identity:
            before, after = said["declared"], study.declared
            changed = ", ".join(key for key in after if before.get(key) != after[key])
            raise UserError(
                f"{path}: was declared on {said['declared_utc']} with another {changed}; give the new study a name of "
                "its own, and this one stays what it was"
            )
        added = [seed for seed in study.seeds if seed not in said["seeds"]]
        if added:
            said["seeds"] += added
            said["seeds_added"].append({"utc": now, "seeds": added})
    return said


def read_declared(path: Path) -> dict[str, Any]:
    """A study's own file. Raises LabError if it is damaged."""
    try:
        said = json.loads(path.read_text("utf-8"))
        assert isinstance(said["declared"], dict)
        assert isinstance(said["seeds"], list)
        return {key: said[key] for key in DECLARED}
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise LabError(f"{path}: damaged: {error}; move the study's folder away to begin it again") from error


def plan_runs(study: Study, folder: Path) -> list[Planned]:
    """Every run, in the order in which they are made. Raises UserError if an arm is no valid config, or no change."""
    arms = {arm.name: arm for arm in study.arms}
    files = {}
    for arm in study.arms:
        path = folder / "arms" / f"{study.name}-{arm.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json_text(config_of(study, arm)).encode("utf-8"))
        files[arm.name] = path
    plan: list[Planned] = []
    seen: set[str] = set()
    for name, seed in interleaved(list(arms), study.seeds):
        resolved = resolve_arm(files[name], seed)
        stop_after = arms[name].stop_after
        if stop_after is not None and stop_after >= resolved.config.train.updates:
            raise UserError(f"stop_after: {name}: {stop_after} is not before the last update of the run")
        plan.append(
            Planned(name, seed, f"{study.name}-{name}-s{seed}", files[name], (f"train.seed={seed}",), resolved,
                    stop_after, resolved.identity in seen)
        )  # fmt: skip
        if stop_after is None:
            seen.add(resolved.identity)
    return plan


def write_result(
    study: Study, folder: Path, declared: dict[str, Any], made: list[Made], runs_dir: Path
) -> Result:  # fmt: skip
    """Compares what is there, and writes the study's folder."""
    order = [arm.name for arm in study.arms]
    there = sorted((one for one in made if one.state != "missing"), key=lambda one: order.index(one.planned.arm))
    comparison, remark, pictures = None, "fewer than two runs are there", []
    if len(there) >= 2:
        names = {one.folder.run_id: one.planned.arm for one in there}
        try:
            question = Question(study.endpoint, study.delta)
            comparison, remark = compare_runs([one.folder for one in there], (), question, runs_dir, names), ""
        except LabError as error:
            remark = str(error)
    if comparison is not None:
        write_page(comparison, folder / PAGE, f"Study: {study.name}", study.question)
        pictures = write_pictures(comparison, folder)
    runs = [
        {"arm": one.planned.arm, "seed": one.planned.seed, "run": one.folder.run_id, "state": one.state,
         "is_reused": one.is_reused, "message": one.message}
        for one in made
    ]  # fmt: skip
    result = Result(folder, made, comparison, remark)
    notes = make_notes(study, declared, result.made, comparison, remark, pictures, folder / NOTES)
    write_atomically(folder / NOTES, notes.encode("utf-8"))
    exit_code = comparison.exit_code if comparison is not None else None
    whole = {**declared, "runs": runs, "is_complete": result.is_complete, "exit_code": exit_code, "remark": remark,
            "verdicts": verdicts_of(comparison)}  # fmt: skip
    write_atomically(folder / STUDY, json_text(whole).encode("utf-8"))
    return result


def verdicts_of(comparison: Comparison | None) -> list[str]:
    """The verdict on each change, in a line."""
    if comparison is None:
        return []
    return [
        f"{pair.first.name} → {pair.second.name}: {said(pair.effects[0]) if pair.effects else headline(pair)}"
        for pair in comparison.pairs
    ]
