"""`compare.html`: the comparison as a page in the report's look, of one file that needs no network."""

from __future__ import annotations

import os
from pathlib import Path

from experiment_runner.durable import json_text, write_atomically
from training_lab.comparing import sections
from training_lab.comparing.compare import Comparison, as_json
from training_lab.comparing.pictures import AXES, make_charts, standing_alone
from training_lab.record import REPORT
from training_lab.report.charts import render
from training_lab.report.drawn import figure
from training_lab.report.html import tag
from training_lab.report.page import document, footer, navigation
from training_lab.report.sections import axis_choice

PARTS = (
    ("verdicts", "Verdicts"), ("curves", "Curves"), ("same", "What was held the same"), ("config", "Config"),
    ("code", "Code"), ("environment", "Environment"), ("runs", "Runs"),
)  # fmt: skip


def write_page(comparison: Comparison, path: Path, title: str, question: str = "") -> None:
    """Writes the page, and its numbers as JSON beside it. Raises LabError if a chart cannot be drawn."""
    links = {
        run.id: os.path.relpath(run.folder.file(REPORT), path.parent)
        for arm in comparison.arms
        for run in arm.runs
        if run.folder is not None and run.folder.file(REPORT).exists()
    }
    charts = make_charts(comparison)
    figures = {name: figure(chart, render(chart)) for name, chart in charts.items()}
    main = tag(
        "main",
        sections.verdicts(comparison, figures),
        sections.curves(figures, axis_choice()),
        sections.sameness(comparison),
        sections.config(comparison),
        sections.source(comparison),
        sections.environment(comparison),
        sections.runs(comparison, links),
        id="main",
    )
    body = [sections.head(comparison, title, question), navigation(PARTS), main,
            footer("Made from the runs' folders alone.", path.with_suffix(".json").name)]  # fmt: skip
    page = document(f"{title} – comparison", body, list(charts.values()), AXES)
    write_atomically(path.with_suffix(".json"), json_text(as_json(comparison)).encode("utf-8"))
    write_atomically(path, page.encode("utf-8"))


def write_pictures(comparison: Comparison, folder: Path) -> list[str]:
    """Writes the charts as SVG files that stand alone, and gives their names."""
    charts = make_charts(comparison)
    for name, chart in charts.items():
        write_atomically(folder / f"{name}.svg", standing_alone(chart).encode("utf-8"))
    return [f"{name}.svg" for name in charts]
