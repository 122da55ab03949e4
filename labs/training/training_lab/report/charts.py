"""The charts as Vega-Lite specifications, from the numbers of `report.json`. Pure but for `render`.

One specification makes the still picture that stands in the page and the chart that scripts put in its place. Colours
are names of the page's style sheet, so that both follow it into the dark and onto paper.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from training_lab.errors import LabError
from training_lab.report.html import Html, shown
from training_lab.report.units import GIB, MIB

Spec = dict[str, Any]
Columns = dict[str, list[Any]]

HALF_WIDTH, FULL_WIDTH = 436, 900
AXIS_ROOM = 46
"""For the labels of every vertical axis, so that the plots of figures below each other line up."""
HOVER = "hover"
"""How the names of layers begin that are there for scripts alone."""
MANY_POINTS = 40
"""With fewer, each is drawn."""

CONFIG: Spec = {
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
    "background": None,
    "aria": False,
    "padding": {"left": 0, "right": 8, "top": 6, "bottom": 5},
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)", "titleColor": "var(--muted)", "gridColor": "var(--grid)",
        "domainColor": "var(--rule)", "tickColor": "var(--rule)", "labelFontSize": 11, "titleFontSize": 11,
        "titleFontWeight": "normal", "tickSize": 4, "labelPadding": 4,
    },
    "axisX": {"grid": False, "tickCount": 6, "labelOverlap": True},
    "axisY": {"domain": False, "ticks": False, "tickCount": 5, "minExtent": AXIS_ROOM, "titleAnchor": "end",
              "titleAngle": 0, "titleAlign": "left", "titleX": 0, "titleY": -9},
    "text": {"color": "var(--muted)", "fontSize": 11},
}  # fmt: skip


class Key(NamedTuple):
    """An entry of a chart's legend."""

    label: str
    colour: str
    kind: str
    """`line`, `thin`, `dashed`, `dot`, `tick`, `area` or `bar`."""


class Chart(NamedTuple):
    """A chart, and what stands for it where it is not seen."""

    name: str
    title: str
    summary: str
    """What it shows, in a sentence with numbers."""
    spec: Spec
    """Without its data."""
    data: dict[str, Columns]
    """Columns of equal length, by the names that the spec uses."""
    keys: Sequence[Key]
    headings: dict[str, str]
    """The columns of the data `points` that its table shows."""
    is_wide: bool = False
    has_axes: bool = False
    """Whether its horizontal axis can be another one."""


def colour(number: int) -> str:
    """One of the palette's colours, from 1."""
    return f"var(--c{number})"


def layer(data: str, mark: Spec, encoding: Spec, **more: Any) -> Spec:
    """A layer of a chart."""
    return {"data": {"name": data}, "mark": mark, "encoding": encoding, **more}


def quantity(field: str, title: str | None, **more: Any) -> Spec:
    """A channel of numbers."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def labels(number_format: str) -> Spec:
    """An axis with its numbers in a format of d3's, and a plain 0."""
    return {"labelExpr": f"datum.value === 0 ? '0' : format(datum.value, '{number_format}')"}


def hover(x: Spec, y: Spec, tooltip: list[Spec]) -> list[Spec]:
    """A rule and a dot that follow the pointer, with the values there. Layers for scripts alone."""
    near = {"type": "point", "nearest": True, "on": "pointerover", "clear": "pointerout", "encodings": ["x"]}
    seen = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    follow = {"x": x, "opacity": seen, "tooltip": tooltip}
    rule = {"type": "rule", "color": "var(--muted)", "strokeWidth": 1}
    dot = {"type": "point", "color": "var(--ink)", "fill": "var(--paper)", "size": 36, "strokeWidth": 1.5, "opacity": 1}
    return [
        layer("points", rule, follow, name=f"{HOVER}-rule", params=[{"name": "near", "select": near}]),
        layer("points", dot, {"x": x, "y": y, "opacity": seen}, name=f"{HOVER}-dot"),
    ]


def chart_spec(layers: Iterable[Spec], width: int, height: int) -> Spec:
    """A chart of layers."""
    fit = {"type": "fit", "contains": "padding"}
    return {"width": width, "height": height, "autosize": fit, "config": CONFIG, "layer": list(layers)}


def marked(marks: dict[str, Columns], x: Spec, colours: dict[str, str]) -> list[Spec]:
    """What lies behind a curve: stretches by their reason, and rules where the run was resumed."""
    layers = []
    if marks["excluded"]["update"]:
        shading = {"domain": list(colours), "range": list(colours.values())}
        reason = {"field": "reason", "type": "nominal", "scale": shading, "legend": None}
        across = {"x": x, "x2": {"field": "update_end"}, "fill": reason, "stroke": reason}
        layers.append(layer("excluded", {"type": "rect", "opacity": 0.22, "strokeWidth": 1, "clip": True}, across))
    if marks["resumes"]["update"]:
        layers.append(layer("resumes", {"type": "rule", "color": "var(--muted)", "strokeDash": [3, 3]}, {"x": x}))
    return layers


def curve_chart(
    name: str,
    title: str,
    summary: str,
    unit: str,
    points: Columns,
    field: str,
    marks: dict[str, Columns],
    keys: Sequence[Key] = (),
    *,
    mean: Key | None = None,
    limit: tuple[Key, float] | None = None,
    colours: dict[str, str] | None = None,
    is_wide: bool = False,
    from_zero: bool = False,
    number_format: str = "",
    headings: dict[str, str],
) -> Chart:
    """A curve over updates, with what is marked on it: stretches left out by reason, resumes, a limit."""
    few = len(points[field]) <= MANY_POINTS
    x = quantity("update", "update", scale={"nice": False, "zero": False}, axis=labels("~s"))
    y = quantity(field, unit, scale={"zero": from_zero}, axis=labels(number_format) if number_format else {})
    raw = {"type": "line", "color": colour(1), "strokeWidth": 1 if mean else 1.6, "opacity": 0.55 if mean else 1}
    layers = marked(marks, x, colours or {})
    layers.append(
        layer(
            "points",
            {**raw, "point": {"size": 22, "filled": True, "color": colour(1)} if few else False},
            {"x": x, "y": y},
        )
    )
    if mean:
        running = {"type": "line", "color": mean.colour, "strokeWidth": 2}
        layers.append(layer("points", running, {"x": x, "y": {**y, "field": "mean"}}))
    if limit:
        dashes = {"type": "rule", "color": limit[0].colour, "strokeDash": [6, 4], "strokeWidth": 1.4}
        layers.append(layer("limit", dashes, {"y": quantity("value", unit)}))
    tooltip = [
        quantity(key, heading, **({"format": ",.6~g"} if key != "update" else {"format": ",d"}))
        for key, heading in headings.items()
    ]
    layers += hover(x, y, tooltip)
    data = {"points": points, **{key: columns for key, columns in marks.items() if columns["update"]}}
    if limit:
        data["limit"] = {"value": [limit[1]]}
    spec = chart_spec(layers, FULL_WIDTH if is_wide else HALF_WIDTH, 250 if is_wide else 190)
    return Chart(name, title, summary, spec, data, keys, headings, is_wide, has_axes=True)


def label_room(labels: Iterable[str]) -> int:
    """Pixels for labels of bars, whatever font the reader has."""
    return min(170, 12 + 6 * max((len(label) for label in labels), default=0))


def stacked_bars(
    name: str,
    title: str,
    summary: str,
    rows: list[tuple[str, str, float]],
    colours: dict[str, str],
    unit: str,
    headings: dict[str, str],
) -> Chart:
    """Bars made of parts that lie one behind the other: (bar, part, number)."""
    bars = list(dict.fromkeys(bar for bar, _, _ in rows))
    points: Columns = {
        "bar": [shown(bar) for bar, _, _ in rows],
        "part": [shown(part) for _, part, _ in rows],
        "value": [value for _, _, value in rows],
        "order": list(range(len(rows))),
    }
    encoding = {
        "y": {
            "field": "bar",
            "type": "nominal",
            "title": None,
            "sort": None,
            "axis": {"labelLimit": 170, "minExtent": label_room(bars)},
        },
        "x": quantity("value", unit, stack="zero", axis={"grid": True}),
        "color": {
            "field": "part",
            "type": "nominal",
            "scale": {"domain": list(colours), "range": list(colours.values())},
            "legend": None,
        },
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": [
            {"field": "bar", "type": "nominal"},
            {"field": "part", "type": "nominal"},
            quantity("value", unit, format=",.5~g"),
        ],
    }
    mark = {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 1.5, "height": {"band": 0.72}}
    spec = chart_spec([layer("points", mark, encoding)], FULL_WIDTH, 44 + 30 * len(bars))
    used = {part for _, part, _ in rows}
    keys = [Key(part, chosen, "bar") for part, chosen in colours.items() if part in used]
    return Chart(name, title, summary, spec, {"points": points}, keys, headings, is_wide=True)


def histogram(name: str, title: str, summary: str, bins: list[tuple[str, float]], x: str, y: str) -> Chart:
    """How many are in each bin: (the bin in words, number)."""
    points: Columns = {"bin": [label for label, _ in bins], "number": [number for _, number in bins]}
    across = {
        "field": "bin", "type": "ordinal", "sort": None, "title": x,
        "axis": {"labelAngle": 0, "labelOverlap": "greedy"},
    }  # fmt: skip
    encoding = {"x": across, "y": quantity("number", y, axis=labels("~s"))}
    tooltip = [{"field": "bin", "type": "ordinal", "title": x}, quantity("number", y, format=",")]
    mark = {"type": "bar", "color": colour(1), "width": {"band": 0.86}}
    spec = chart_spec([layer("points", mark, {**encoding, "tooltip": tooltip})], HALF_WIDTH, 190)
    return Chart(name, title, summary, spec, {"points": points}, (), {"bin": x, "number": y})


def memory_chart(summary: str, said: dict[str, Any]) -> Chart:
    """Memory over one update, with its phases as bands."""
    times, held = said["curve"]["s"], said["curve"]["bytes"]
    unit, scale = ("GiB", GIB) if max(held, default=0) >= GIB else ("MiB", MIB)
    milliseconds = max(times, default=0) < 10
    clock, factor = ("ms", 1e3) if milliseconds else ("s", 1.0)
    points: Columns = {"time": [one * factor for one in times], "held": [one / scale for one in held]}
    phases: Columns = {
        "time": [phase["begin_s"] * factor for phase in said["phases"]],
        "end": [phase["end_s"] * factor for phase in said["phases"]],
        "name": [shown(phase["name"]) for phase in said["phases"]],
        "middle": [(phase["begin_s"] + phase["end_s"]) / 2 * factor for phase in said["phases"]],
        "parity": [index % 2 for index in range(len(said["phases"]))],
    }
    longest = max((end - begin for begin, end in zip(phases["time"], phases["end"], strict=True)), default=0.0)
    phases["label"] = [
        name if end - begin >= longest / 8 else ""
        for name, begin, end in zip(phases["name"], phases["time"], phases["end"], strict=True)
    ]
    x = quantity("time", clock, scale={"nice": False})
    y = quantity("held", unit, scale={"zero": True}, stack=None)  # two points may have the same time
    area = {
        "type": "area",
        "interpolate": "step-after",
        "color": colour(1),
        "fillOpacity": 0.25,
        "line": {"color": colour(1), "strokeWidth": 1.2},
    }
    shades = {
        "field": "parity",
        "type": "nominal",
        "scale": {"domain": [0, 1], "range": ["var(--band-a)", "var(--band-b)"]},
        "legend": None,
    }
    layers = [
        layer("points", area, {"x": x, "y": y}),
        *hover(x, y, [quantity("time", clock, format=",.4~g"), quantity("held", f"held, {unit}", format=",.4~f")]),
    ]
    data = {"points": points}
    if phases["time"]:
        about = [{"field": "name", "type": "nominal", "title": "phase"}]
        label = {"type": "text", "y": 8, "clip": True}
        bands = [
            layer("phases", {"type": "rect"}, {"x": x, "x2": {"field": "end"}, "color": shades, "tooltip": about}),
            layer("phases", label, {"x": quantity("middle", clock), "text": {"field": "label", "type": "nominal"}}),
        ]
        layers, data = [*bands, *layers], {**data, "phases": phases}
    headings = {"time": f"time, {clock}", "held": f"held, {unit}"}
    spec = chart_spec(layers, FULL_WIDTH, 240)
    return Chart("memory-events", "Memory over one update", summary, spec, data, (), headings, is_wide=True)


def still(spec: Spec) -> Spec:
    """A spec without the layers that only a pointer shows."""
    return {**spec, "layer": [one for one in spec["layer"] if not str(one.get("name")).startswith(HOVER)]}


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """Columns as rows, as a spec takes them."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def render(chart: Chart) -> Html:
    """The still picture. Raises LabError if it cannot be drawn."""
    import vl_convert

    spec = {**still(chart.spec), "datasets": {name: rows_of(columns) for name, columns in chart.data.items()}}
    try:
        svg: str = vl_convert.vegalite_to_svg(spec)
    except ValueError as error:
        raise LabError(f"the chart {chart.name} cannot be drawn: {error}") from error
    # Clip paths are numbered on through the process, so the same picture would have other names each time.
    names: dict[str, str] = {}
    svg = re.sub(
        r'(?<=id=")clip\d+|(?<=url\(#)clip\d+', lambda m: names.setdefault(m[0], f"{chart.name}-{len(names)}"), svg
    )
    return Html(svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', ""))
