"""`index.html` of a folder of runs: every study with its verdicts, every run with its figures and a link."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from experiment_runner.durable import write_atomically
from training_lab.record import REPORT
from training_lab.report.html import Html, code, foreign, join, paragraph, section, table, tag
from training_lab.report.page import document, footer, navigation
from training_lab.report.units import count, loss

INDEX = "index.html"
PARTS = (("studies", "Studies"), ("runs", "Runs"))
MARKED = {"keep": "good", "discard": "", "crash": "bad"}


def write_index(runs_dir: Path, studies: list[dict[str, Any]], runs: list[dict[str, Any]]) -> Path:
    """Writes the page into the folder of the runs and gives its path."""
    path = runs_dir / INDEX
    header = tag(
        "header",
        paragraph("LLM Training Lab · index", class_="kind"),
        tag("h1", foreign(runs_dir.resolve().parent.name or "Runs")),
        paragraph(f"{len(studies)} studies, {len(runs)} runs", class_="state"),
    )
    main = tag("main", study_section(studies, runs_dir), run_section(runs, runs_dir), id="main")
    body = [header, navigation(PARTS), main, footer("Made from the runs' folders alone; `runs --html` makes it anew.")]
    write_atomically(path, document("Runs – index", body, [], {}).encode("utf-8"))
    return path


def study_section(studies: list[dict[str, Any]], runs_dir: Path) -> Html:
    """The studies."""
    if not studies:
        return section("studies", "Studies", paragraph("None yet.", class_="aside"))
    rows = [
        (
            link(Path(study["folder"]) / "compare.html", runs_dir, study["study"]),
            join(
                [foreign(study["question"]), *(tag("span", foreign(one), class_="with") for one in study["verdicts"])]
            ),
            f"{study['state']}, {study['with_outcome']} of {len(study['runs'])} runs",
            link(Path(study["folder"]) / "notes.md", runs_dir, "notes"),
        )
        for study in studies
    ]
    headings = ("study", "question, verdicts", "state", "")
    return section("studies", "Studies", table("Studies", headings, rows, is_titled=False, class_="ledger"))


def run_section(runs: list[dict[str, Any]], runs_dir: Path) -> Html:
    """The runs."""
    if not runs:
        return section("runs", "Runs", paragraph("None yet.", class_="aside"))
    rows = []
    for run in runs:
        words = [foreign(run["question"]), *(tag("span", foreign(note), class_="with") for note in run["notes"])]
        mark = tag("span", run["mark"], class_=MARKED.get(run["mark"]) or None)
        updates = f"{count(run['updates'])} of {count(run['planned_updates'])}"
        rows.append((
            link(Path(run["folder"]) / REPORT, runs_dir, run["run"]), foreign(str(run["state"])), mark, updates,
            loss(run["val_loss"]), count(run["target_tokens_per_s"]), join(words),
        ))  # fmt: skip
    headings = ("run", "state", "mark", "updates", "validation loss", "tokens/s", "question, notes")
    return section("runs", "Runs", table("Runs", headings, rows, (4, 5), is_titled=False, class_="ledger"))


def link(target: Path, runs_dir: Path, text: str) -> Html:
    """A link to a file, if it is there."""
    if not target.exists():
        return code(text)
    return tag("a", code(text), href=os.path.relpath(target, runs_dir))
