"""The page: one file that needs no network, reads without scripts, and runs nothing but the lab's own two scripts."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from training_lab.report import sections, sections_record
from training_lab.report.charts import CONFIG, Chart, render
from training_lab.report.drawn import axes_of, figure, make_charts, pictures_for_page
from training_lab.report.html import Html, join, shown, tag

CONTENTS = (
    ("figures", "Key figures"), ("curves", "Curves"), ("memory", "Memory"), ("timeline", "Timeline"), ("data", "Data"),
    ("config", "Config"), ("provenance", "Provenance"), ("events", "Events"), ("files", "Files"), ("notes", "Notes"),
    ("wandb", "Weights & Biases"), ("again", "Run it again"),
)  # fmt: skip


def make_page(contents: dict[str, Any]) -> str:
    """The page that shows `report.json`. Raises LabError if a chart cannot be drawn."""
    charts = make_charts(contents)
    figures = {name: figure(chart, render(chart)) for name, chart in charts.items()}
    main = tag(
        "main",
        sections.key_figures(contents, figures),
        sections.curves(contents, figures),
        sections.memory(contents, figures),
        sections.timeline(contents, figures),
        sections_record.data(contents, figures),
        sections_record.config(contents),
        sections_record.provenance(contents),
        sections_record.events(contents),
        sections_record.files(contents),
        sections_record.notes(contents),
        sections_record.mirror(contents),
        sections_record.again(contents),
        id="main",
    )
    body = [
        sections.head(contents),
        navigation(CONTENTS),
        main,
        footer("Made from the run's folder alone.", "report.json"),
    ]
    return document(f"{shown(contents['run'])} – report", body, list(charts.values()), axes_of(contents))


def document(title: str, body: list[Html], charts: list[Chart], axes: dict[str, str]) -> str:
    """The whole file. `axes` are the horizontal axes that curves can have, in words."""
    scripts = [chart_library(), package_text("page.js")] if charts else []
    skip = tag("a", "Skip to the contents", href="#main", class_="skip")
    data = (
        Html(f'<script type="application/json" id="charts">{json_for_script(axes, charts)}</script>')
        if scripts
        else None
    )
    tags = [Html(f"<script>{script}</script>") for script in scripts]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(scripts))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>\n{package_text('style.css')}</style>\n</head>\n<body>\n"
        f"{join([skip, tag('div', *body, class_='page'), data, *tags])}\n</body>\n</html>\n"
    )


def policy(scripts: list[str]) -> str:
    """What the page may do: its own styles, and scripts of exactly these bytes. No address is asked for anything."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in scripts)
    script = f"script-src {hashes}; " if hashes else ""
    return f"default-src 'none'; {script}style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def json_for_script(axes: dict[str, str], charts: list[Chart]) -> str:
    """The charts as JSON that ends no script element: `<`, `>`, `&` and all beyond ASCII are escaped."""
    pictures = {"config": CONFIG, "axes": axes, "charts": pictures_for_page(charts)}
    text = json.dumps(pictures, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache  # the bundle takes a second to make
def chart_library() -> str:
    """The offline bundle of Vega, Vega-Lite and their embedding."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    assert "</script" not in bundle.lower(), "the bundle would end its own element"
    return bundle


def package_text(name: str) -> str:
    """A file of this package."""
    return resources.files("training_lab.report").joinpath(name).read_text("utf-8")


def navigation(parts: Sequence[tuple[str, str]]) -> Html:
    """The parts of the page."""
    items = [tag("li", tag("a", title, href=f"#{name}")) for name, title in parts]
    return tag("nav", tag("ol", *items), aria_label="Contents")


def footer(text: str, numbers: str = "") -> Html:
    """What the page is made from, and the file beside it that has its numbers."""
    return tag("footer", tag("p", f"{text} Every number in full: {numbers}, beside this page." if numbers else text))
