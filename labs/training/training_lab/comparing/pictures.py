"""The charts of a comparison, in the report's look, and as pictures that stand alone. Pure but for rendering."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from textwrap import wrap
from typing import Any

from training_lab.comparing.compare import Comparison
from training_lab.comparing.curves import differences, of_arms, of_runs, train_losses, val_losses
from training_lab.comparing.words import number, said
from training_lab.report.charts import (
    FULL_WIDTH,
    HALF_WIDTH,
    MANY_POINTS,
    Chart,
    Columns,
    Key,
    chart_spec,
    colour,
    hover,
    labels,
    layer,
    quantity,
    render,
)
from training_lab.report.drawn import rounded

AXES = {"update": "update", "tokens": "target tokens", "seconds": "training time, s"}
CURVES = (("val-loss", "Validation loss", val_losses), ("loss", "Training loss, running mean", train_losses))
COLOURS = 7
LETTER_WIDTH = 7.0
TITLE_LETTERS = 52


def make_charts(comparison: Comparison) -> dict[str, Chart]:
    """Every chart of the page, by name."""
    charts = [*overlays(comparison), *endpoints(comparison)]
    return {chart.name: chart._replace(data=rounded(chart.data)) for chart in charts}


def colours_of(comparison: Comparison) -> dict[str, str]:
    """A colour for each arm."""
    return {arm.name: colour(index % COLOURS + 1) for index, arm in enumerate(comparison.arms)}


def by_arm(colours: dict[str, str]) -> dict[str, Any]:
    """The channel that colours by arm."""
    scale = {"domain": list(colours), "range": list(colours.values())}
    return {"field": "arm", "type": "nominal", "scale": scale, "legend": None}


def overlays(comparison: Comparison) -> Iterator[Chart]:
    """The curves laid over each other, then what they differ by."""
    colours = colours_of(comparison)
    compared = [pair for pair in comparison.pairs if not pair.obstacles]
    for name, title, curve_of in CURVES:
        means = of_arms(comparison.arms, curve_of)
        if means["update"]:
            yield overlay(name, title, of_runs(comparison.arms, curve_of), means, colours)
        changed = differences(compared, curve_of)
        if changed["update"]:
            chosen = {pair.second.name: colours[pair.second.name] for pair in compared}
            yield difference(f"{name}-difference", title, comparison.arms[0].name, changed, chosen)


def overlay(name: str, title: str, runs: Columns, means: Columns, colours: dict[str, str]) -> Chart:
    """Every run thin, the mean of every arm thick."""
    x, y = axis_x(), quantity("value", "nats", scale={"zero": False})
    thin = {"type": "line", "strokeWidth": 1, "opacity": 0.35}
    few = len(means["update"]) <= MANY_POINTS * len(colours)
    thick = {"type": "line", "strokeWidth": 2, "point": {"size": 22, "filled": True} if few else False}
    arm = by_arm(colours)
    detail = {"field": "run", "type": "nominal"}
    has_repetitions = len(set(runs["run"])) > len(colours)
    layers = [layer("runs", thin, {"x": x, "y": y, "color": arm, "detail": detail})] if has_repetitions else []
    layers.append(layer("points", thick, {"x": x, "y": y, "color": arm}))
    layers += hover(x, y, tooltip({"value": title}))
    summary = "; ".join(f"{one}: {number(last(means, one))} nats at the end" for one in colours if one in means["arm"])
    headings = {"arm": "arm", **AXES, "value": title}
    keys = [Key(one, chosen, "line") for one, chosen in colours.items()]
    data = {"points": means, **({"runs": runs} if has_repetitions else {})}
    wide = name == "val-loss"
    spec = chart_spec(layers, FULL_WIDTH if wide else HALF_WIDTH, 280 if wide else 200)
    return Chart(name, title, f"{title}. {summary}.", spec, data, keys, headings, is_wide=wide, has_axes=True)


def difference(name: str, title: str, first: str, changed: Columns, colours: dict[str, str]) -> Chart:
    """What the arms differ by from the first, with the interval over repetitions, and a rule at no difference."""
    x, y = axis_x(), quantity("value", "nats", scale={"zero": True})
    arm = by_arm(colours)
    has_band = changed["low"] != changed["high"]
    band = {"type": "area", "opacity": 0.18}
    layers = [layer("zero", {"type": "rule", "color": "var(--rule)"}, {"y": quantity("value", "nats")})]
    if has_band:
        across = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": arm}
        layers.append(layer("points", band, across))
    layers.append(layer("points", {"type": "line", "strokeWidth": 2}, {"x": x, "y": y, "color": arm}))
    layers += hover(x, y, tooltip({"value": "difference", **({"low": "from", "high": "to"} if has_band else {})}))
    words = "; ".join(f"{one}: {last(changed, one):+.4f} nats at the end" for one in colours if one in changed["arm"])
    text = f"{title}: difference from {first}"
    headings = {"arm": "arm", **AXES, "value": "difference"}
    headings |= {"low": "95 % from", "high": "to"} if has_band else {}
    keys = [Key(f"{one} − {first}", chosen, "line") for one, chosen in colours.items()]
    keys += [Key("95 % over seeds, point by point", next(iter(colours.values())), "area")] if has_band else []
    spec = chart_spec(layers, HALF_WIDTH, 200)
    data = {"points": changed, "zero": {"value": [0]}}
    return Chart(name, text, f"{text}. {words}.", spec, data, keys, headings, has_axes=True)


def endpoints(comparison: Comparison) -> Iterator[Chart]:
    """The endpoint of every run, arm by arm: what the verdict is made of."""
    colours = colours_of(comparison)
    compared = [pair for pair in comparison.pairs if pair.effects]
    if not compared:
        return
    effect = compared[0].effects[0]
    values = {compared[0].first.name: effect.first, **{pair.second.name: pair.effects[0].second for pair in compared}}
    rows = [(name, value) for name, found in values.items() for value in found]
    points: Columns = {"arm": [name for name, _ in rows], "value": [value for _, value in rows]}
    means: Columns = {"arm": list(values), "value": [sum(found) / len(found) for found in values.values()]}
    x = quantity("value", effect.unit, scale={"zero": False}, axis={"grid": True, **labels(".4~f")})
    extent = max(90.0, LETTER_WIDTH * max(map(len, values)))  # said, since fonts differ from machine to machine
    y = {
        "field": "arm",
        "type": "nominal",
        "title": None,
        "sort": None,
        "axis": {"minExtent": extent, "labelLimit": 220},
    }
    dot = {"type": "point", "filled": True, "size": 45, "opacity": 0.6}
    tick = {"type": "tick", "thickness": 2, "size": 18, "color": "var(--ink)"}
    spec = chart_spec(
        [layer("points", dot, {"x": x, "y": y, "color": by_arm(colours)}), layer("means", tick, {"x": x, "y": y})],
        HALF_WIDTH, 50 + 34 * len(values),
    )  # fmt: skip
    text = "; ".join(f"{pair.second.name}: {said(pair.effects[0])}" for pair in compared)
    keys = [Key("one run", colour(1), "dot"), Key("mean", "var(--ink)", "tick")]
    title = effect.name[0].upper() + effect.name[1:]
    headings = {"arm": "arm", "value": effect.unit}
    yield Chart("endpoint", title, f"{effect.name}. {text}.", spec, {"points": points, "means": means}, keys, headings)


def axis_x() -> dict[str, Any]:
    """The horizontal axis, which scripts can change."""
    return quantity("update", "update", scale={"nice": False, "zero": False}, axis=labels("~s"))


def tooltip(figures: dict[str, str]) -> list[dict[str, Any]]:
    """What is seen under the pointer."""
    return [
        {"field": "arm", "type": "nominal", "title": "arm"},
        quantity("update", "update", format=",d"),
        *(quantity(name, heading, format=".5~f") for name, heading in figures.items()),
    ]


def last(columns: Columns, arm: str) -> float:
    """The last value of an arm."""
    return float([value for value, name in zip(columns["value"], columns["arm"], strict=True) if name == arm][-1])


def standing_alone(chart: Chart) -> str:
    """A chart as a picture for any page: light, with the palette's own colours."""
    style = resources.files("training_lab.report").joinpath("style.css").read_text("utf-8")
    palette = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", style.partition("@media")[0]))
    spec = {
        **with_legend(chart.spec),
        "title": {"text": wrap(chart.title, TITLE_LETTERS, break_on_hyphens=False), "anchor": "start", "fontSize": 13},
    }
    svg = re.sub(r"var\((--[\w-]+)\)", lambda found: palette[found[1]], str(render(chart._replace(spec=spec))))
    return svg.replace(">", f' style="background: {palette["--paper"]}">', 1)


def with_legend(part: Any) -> Any:
    """A specification whose colours are explained in it: in the page, the page does that."""
    if isinstance(part, dict):
        shown = {"orient": "top", "title": None, "labelLimit": 300} if part.get("field") == "arm" else None
        return {key: shown if key == "legend" else with_legend(value) for key, value in part.items()}
    return [with_legend(one) for one in part] if isinstance(part, list) else part
