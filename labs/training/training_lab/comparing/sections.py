"""The parts of a comparison's page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from training_lab import record
from training_lab.comparing.arms import Run, compared, show
from training_lab.comparing.code import code_diffs
from training_lab.comparing.comparability import LEARNING, NOTHING, SPEED, Aspect, last_process, short
from training_lab.comparing.compare import Comparison
from training_lab.comparing.effects import Effect
from training_lab.comparing.significance import DIFFERENT
from training_lab.comparing.words import arrow, headline, how_compared, said
from training_lab.report.html import (
    Html,
    block,
    code,
    details,
    foreign,
    join,
    paragraph,
    section,
    subsection,
    table,
    tag,
)

Figures = Mapping[str, Html]
MATTERS = {LEARNING: "losses", SPEED: "seconds, memory", NOTHING: "to know"}
MOST_DIFF = 400
"""Lines of a file's differences."""


def head(comparison: Comparison, title: str, question: str) -> Html:
    """Title, question, and the verdict on each pair."""
    items = []
    for pair in comparison.pairs:
        is_good = not pair.obstacles and len(pair.chosen) == 1
        mark = ("✓", "controlled") if is_good else ("✗", "not controlled")
        sign = tag(
            "span", tag("span", mark[0], aria_hidden="true"), tag("span", mark[1], class_="unseen"), class_="mark"
        )
        name = tag("strong", f"{pair.first.name} → {pair.second.name}")
        seen = paragraph(foreign(said(pair.effects[0]) if pair.effects else "no verdict"), class_="seen")
        rule = paragraph(foreign(headline(pair)), class_="rule")
        items.append(tag("li", sign, tag("div", name, seen, rule), class_="good" if is_good else "bad"))
    counts = f"{len(comparison.arms)} configs, {sum(len(arm.runs) for arm in comparison.arms)} runs"
    return tag(
        "header",
        paragraph("LLM Training Lab · comparison", class_="kind"),
        tag("h1", foreign(title)),
        paragraph(foreign(question), class_="purpose") if question else None,
        paragraph(counts, class_="state"),
        tag("ul", *items, class_="verdicts", aria_label="Verdicts") if items else None,
    )


def verdicts(comparison: Comparison, figures: Figures) -> Html:
    """What each change did, figure by figure, and where runs part that should be the same."""
    parts: list[Html | None] = [figures.get("endpoint")]
    for pair in comparison.pairs:
        name = f"{pair.first.name} → {pair.second.name}"
        if not pair.effects:
            reasons = [
                tag("li", tag("strong", one.name), ": ", foreign(one.detail), tag("br"), foreign(one.advice))
                for one in pair.obstacles
            ]
            heading = paragraph(tag("strong", "Not comparable."))
            parts.append(subsection(name, tag("div", heading, tag("ul", *reasons), class_="alarm", role="note")))
            continue
        rows = [effect_row(effect, is_endpoint=number == 0) for number, effect in enumerate(pair.effects)]
        remarks = [paragraph(foreign(pair.remark), class_="aside")] if pair.remark else []
        if pair.allowed:
            text = f"Allowed by hand: {', '.join(pair.allowed)}. The comparison is not controlled in this."
            remarks.append(tag("div", paragraph(text), class_="alarm", role="note"))
        parts.append(
            subsection(
                name,
                paragraph(f"{how_compared(pair)}. All but the endpoint is exploratory.", class_="aside"),
                *remarks,
                table(name, ("figure", "before → after", "verdict"), rows, is_titled=False),
            )
        )
    same = [
        (code(one.id), code(other.id), parting.cause, parting.detail) for one, other, parting in comparison.partings
    ]
    if same:
        part = table("Same config, same seeds", ("run", "and", "they part by", ""), same, is_titled=False)
        parts.append(subsection("Runs that should be the same", part))
    if not comparison.pairs and not same:
        parts.append(paragraph("One config with different seeds: nothing to compare.", class_="aside"))
    return section("verdicts", "Verdicts", *parts)


def effect_row(effect: Effect, *, is_endpoint: bool) -> tuple[Html, str, Html]:
    """A figure with its verdict."""
    name = join([tag("strong", "endpoint: ") if is_endpoint else None, effect.name])
    word = effect.verdict.word if effect.verdict else ""
    text = foreign(said(effect))
    return name, arrow(effect), tag("strong", text) if word in DIFFERENT else text


def curves(figures: Figures, choice: Html) -> Html:
    """The curves, laid over each other and as differences."""
    drawn = [figures.get(name) for name in ("val-loss", "val-loss-difference", "loss", "loss-difference")]
    if not any(drawn):
        return section("curves", "Curves", paragraph("Nothing was measured.", class_="aside"))
    text = (
        "Thin: each run; thick: the mean of a config's runs. A band is a 95 % interval over seeds at that point alone: "
        "updates are no repetitions, so it says nothing of the curve as a whole, and one run each has none."
    )
    return section("curves", "Curves", choice, paragraph(text, class_="aside"), tag("div", *drawn, class_="grid"))


def sameness(comparison: Comparison) -> Html:
    """What was held the same, pair by pair."""
    parts = []
    for pair in comparison.pairs:
        rows = [(one.name, mark(one), foreign(one.detail), MATTERS[one.matters_for]) for one in pair.judged.aspects]
        name = f"{pair.first.name} → {pair.second.name}"
        parts.append(subsection(name, table(name, ("what", "", "", "matters for"), rows, is_titled=False)))
    return section("same", "What was held the same", *parts)


def mark(aspect: Aspect) -> Html:
    """Whether it is the same."""
    if aspect.is_same:
        return Html("same")
    return tag("span", "differs", class_=None if aspect.matters_for == NOTHING else "bad")


def config(comparison: Comparison) -> Html:
    """Every setting that is not the same in all arms."""
    first = [compared(arm.runs[0].settings) for arm in comparison.arms]
    keys = sorted({key for settings in first for key in settings if any(s.get(key) != settings[key] for s in first)})
    rows = [(code(key), *(foreign(show(settings.get(key))) for settings in first)) for key in keys]
    if not rows:
        return section("config", "Config", paragraph("No setting differs.", class_="aside"))
    headings = ("setting", *(arm.name for arm in comparison.arms))
    return section("config", "Config", table("Settings that differ", headings, rows))


def source(comparison: Comparison) -> Html:
    """The files that are not the same, line by line where the runs hold them."""
    parts = []
    for pair in comparison.pairs:
        for name, lines in code_diffs(pair.first.runs[0], pair.second.runs[0]):
            text = "\n".join(lines[:MOST_DIFF]) or "the content is not in both runs' folders"
            rest = paragraph(f"{len(lines) - MOST_DIFF} more lines", class_="aside")
            more = [rest] if len(lines) > MOST_DIFF else []
            parts.append(details(f"{pair.first.name} → {pair.second.name}: {name}", block(text), *more))
    return section("code", "Code", *(parts or [paragraph("The same files ran in all of them.", class_="aside")]))


def environment(comparison: Comparison) -> Html:
    """Every fact of the machines that is not the same."""
    runs = [arm.runs[0] for arm in comparison.arms]
    facts = [dict(flat_facts(run)) for run in runs]
    keys = sorted({key for one in facts for key in one if any(other.get(key) != one[key] for other in facts)})
    if not keys:
        return section("environment", "Environment", paragraph("No fact of the machines differs.", class_="aside"))
    rows = [(code(key), *(foreign(short(one.get(key, "–"))) for one in facts)) for key in keys]
    headings = ("fact", *(arm.name for arm in comparison.arms))
    return section("environment", "Environment", table("Facts that differ, of each first run", headings, rows))


def flat_facts(run: Run) -> Iterator[tuple[str, Any]]:
    """What was recorded of the process that ended a run; each package a fact."""
    for key, value in last_process(run).items():
        if isinstance(value, Mapping):
            yield from ((f"{key}: {name}", one) for name, one in value.items())
        elif key != "segment":
            yield key, value


def runs(comparison: Comparison, links: Mapping[str, str]) -> Html:
    """Every run, with its report."""
    rows = []
    for arm in comparison.arms:
        for run in arm.runs:
            summary = run.found[record.SUMMARY]
            loss, speed = summary.get("val_loss", {}).get("last"), summary.get("throughput", {})
            tokens = speed.get("target_tokens_per_s") if isinstance(speed, Mapping) else None
            name = tag("a", code(run.id), href=links[run.id]) if run.id in links else code(run.id)
            rows.append((
                name, arm.name, ", ".join(map(show, dict.fromkeys(run.seeds))), foreign(str(run.found.state)),
                f"{loss:.6f}" if isinstance(loss, float) else "–",
                f"{tokens:,.0f}" if isinstance(tokens, (int, float)) else "–",
            ))  # fmt: skip
    headings = ("run", "config", "seed", "state", "validation loss", "tokens/s")
    return section("runs", "Runs", table("Runs", headings, rows, (4, 5), is_titled=False))
