"""A study's `notes.md`: the question, what was expected, the tables, the verdict, and a line for a person's own words,
which is kept when the rest is written anew."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from training_lab.comparing.compare import Comparison
from training_lab.comparing.words import arrow, headline, how_compared, said
from training_lab.errors import LabError
from training_lab.record import SUMMARY
from training_lab.studying.declaration import Study
from training_lab.studying.making import Made

INTERPRETATION = "## Interpretation"
EMPTY = "*(one line of yours)*"
FIGURES = {"loss": ("loss", ".4f"), "val_loss": ("validation loss", ".4f"), "lr": ("lr", ".3g"),
           "grad_norm": ("grad norm", ".3f")}  # fmt: skip


def make_notes(
    study: Study, declared: dict[str, Any], made: Sequence[Made], comparison: Comparison | None, remark: str,
    pictures: Sequence[str], path: Path,
) -> str:  # fmt: skip
    """The text. `pictures` are files beside it. What stands under Interpretation in the file that is there stays."""
    parts = [
        f"# {study.name}",
        f"## Question\n\n{study.question}",
        f"## Expected\n\n{study.expected}",
        f"## Declared\n\n{declaration(study, declared)}",
        f"## Runs\n\n{runs_table(made)}",
        f"## On the way\n\nMeans over the seeds of each arm.\n\n{milestones_table(study, made)}",
        f"## Verdict\n\n{verdict(comparison, remark)}",
        *([f"## Pictures\n\n{images(pictures)}"] if pictures else []),
        f"{INTERPRETATION}\n\n{interpretation(path)}",
    ]
    return "\n\n".join(parts) + "\n"


def declaration(study: Study, declared: dict[str, Any]) -> str:
    """What was fixed before the first run."""
    what = "at equal target tokens" if study.endpoint == "tokens" else "after equal seconds of updates"
    matters = f"; a difference matters from {study.delta:g} on" if study.delta else "; half a percent of it matters"
    lines = [
        f"On {declared['declared_utc']}, before the first run (`{study.identity[:12]}`):",
        "",
        f"- base: `{study.base if isinstance(study.base, str) else json.dumps(study.base)}`, called "
        f"{study.arms[0].name}",
    ]
    for arm in study.arms:
        stop = f", stopped once after update {arm.stop_after}" if arm.stop_after else ""
        if arm.settings or stop:
            what_changes = f"`{json.dumps(arm.settings)}`" if arm.settings else "no setting"
            lines.append(f"- {arm.name}: {what_changes}{stop}")
    lines += [
        f"- seeds: {', '.join(map(str, study.seeds))}",
        f"- endpoint: validation loss {what}{matters}",
    ]
    lines += [f"- seeds added on {one['utc']}: {', '.join(map(str, one['seeds']))}" for one in declared["seeds_added"]]
    return "\n".join(lines)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def runs_table(made: Sequence[Made]) -> str:
    """Every run, failures included."""
    rows = []
    for one in made:
        figures = summary_of(one)
        loss, speed = figures.get("val_loss", {}).get("last"), figures.get("throughput", {}).get("target_tokens_per_s")
        rows.append([
            f"`{one.folder.run_id}`", one.planned.arm, str(one.planned.seed), one.state,
            f"{loss:.4f}" if isinstance(loss, float) else "–", f"{speed:,.0f}" if isinstance(speed, float) else "–",
            one.message,
        ])  # fmt: skip
    return table(["run", "arm", "seed", "state", "validation loss", "tokens/s", ""], rows)


def summary_of(one: Made) -> dict[str, Any]:
    """A run's summary; empty where it has none."""
    try:
        return one.folder.read_json(SUMMARY)
    except LabError:
        return {}


def milestones_table(study: Study, made: Sequence[Made]) -> str:
    """Losses, learning rate and gradient norm at some updates."""
    rows = []
    for arm in study.arms:
        found = [summary_of(one).get("milestones") or [] for one in made if one.planned.arm == arm.name]
        by_update: dict[int, list[dict[str, Any]]] = {}
        for milestones in found:
            for milestone in milestones:
                by_update.setdefault(milestone["update"], []).append(milestone)
        for update in quarters(sorted(by_update)):
            milestones = by_update[update]
            cells = []
            for key, (_, form) in FIGURES.items():
                values = [m[key] for m in milestones if isinstance(m.get(key), (int, float))]
                cells.append(f"{statistics.fmean(values):{form}}" if values else "–")
            rows.append([arm.name, str(update), *cells])
    return table(["arm", "update", *(heading for heading, _ in FIGURES.values())], rows)


def quarters(updates: Sequence[int]) -> list[int]:
    """Of some updates the first, the last, and those nearest to a quarter and to half of the way."""
    goals = (0, updates[-1] / 4, updates[-1] / 2, updates[-1]) if updates else ()
    return sorted({min(updates, key=lambda update, goal=goal: abs(update - goal)) for goal in goals})  # type: ignore[misc]


def verdict(comparison: Comparison | None, remark: str) -> str:
    """What came out, in sentences and tables."""
    if comparison is None:
        return f"None: {remark}."
    parts = []
    for pair in comparison.pairs:
        lines = [f"**{pair.first.name} → {pair.second.name}.** {headline(pair)}."]
        if pair.effects:
            endpoint, *others = pair.effects
            lines.append(f"{how_compared(pair)}. {endpoint.name}: {arrow(endpoint)}; **{said(endpoint)}**.")
            if others:
                rows = [[one.name, arrow(one), said(one)] for one in others]
                lines.append(table(["exploratory", "", "verdict"], rows))
        parts.append("\n\n".join(lines))
    for one, other, parting in comparison.partings:
        parts.append(f"`{one.id}` and `{other.id}` have the same config and seed: {parting.detail}.")
    return "\n\n".join(parts) or "One arm: there is nothing to compare; the table above is the result."


def images(pictures: Sequence[str]) -> str:
    """The charts."""
    return "\n\n".join(f"![{Path(name).stem.replace('-', ' ')}]({name})" for name in pictures)


def interpretation(path: Path) -> str:
    """A person's own words from the file that is there."""
    try:
        text = path.read_text("utf-8")
    except OSError:
        return EMPTY
    return text.partition(f"{INTERPRETATION}\n")[2].strip() or EMPTY
