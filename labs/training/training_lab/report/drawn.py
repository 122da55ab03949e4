"""Which charts a report has, made from its numbers, and how a chart stands in the page. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from training_lab.report.charts import Chart, Columns, Key, colour, curve_chart, histogram, memory_chart, stacked_bars
from training_lab.report.html import Html, details, shown, table, tag
from training_lab.report.units import GIB, MIB, count, duration, loss, percent, significant, size

Contents = dict[str, Any]

CLOCK_COLOURS = {
    "update": colour(1), "evaluation": colour(2), "checkpoint": colour(3), "profile": colour(4), "data": colour(5),
    "setup": colour(6), "other": "var(--c0)",
}  # fmt: skip
PART_COLOURS = (colour(1), colour(5), colour(3), colour(6), colour(2), colour(4), colour(7), "var(--c0)")
MEASURED = "measured"
SCOPE_FIGURES = {"allocated_bytes": "allocated", "active_bytes": "active", "reserved_bytes": "reserved"}
BAND_COLOURS = (colour(6), colour(4), colour(3), colour(5), colour(2))
TIME_UNITS = (("s", 1.0, 600.0), ("min", 60.0, 4 * 3600.0), ("h", 3600.0, float("inf")))
"""Name, seconds, and up to how many seconds in all a time is told in it."""


def make_charts(contents: Contents) -> dict[str, Chart]:
    """Every chart that the report's numbers make, by name."""
    made = [
        *clock_chart(contents["wall_clock"]),
        *curve_charts(contents),
        *memory_charts(contents),
        *timeline_charts(contents["timeline"]),
        *data_charts(contents["data"]),
    ]
    return {chart.name: chart._replace(data=rounded(chart.data)) for chart in made}


def rounded(data: dict[str, Columns]) -> dict[str, Columns]:
    """Numbers as a picture needs them: six digits. The full ones are in report.json."""
    return {
        name: {key: [short(value) for value in values] for key, values in columns.items()}
        for name, columns in data.items()
    }


def short(value: Any) -> Any:
    """A fraction with six significant digits; anything else as it is."""
    if not isinstance(value, float):
        return value
    cut = float(f"{value:.6g}")
    return int(cut) if cut.is_integer() and abs(cut) < 1e15 else cut


def clock_chart(wall_clock: dict[str, Any]) -> Iterator[Chart]:
    """Where the time of each process went."""
    rows = [
        (f"process {process['segment'] or number}", name.removesuffix("_s"), seconds)
        for number, process in enumerate(wall_clock["processes"], start=1)
        for name, seconds in sorted(process["parts"].items(), key=lambda part: clock_place(part[0]))
        if seconds > 0
    ]
    total = sum(seconds for _, _, seconds in rows)
    if total <= 0:
        return
    colours = {**CLOCK_COLOURS, **{part: "var(--c0)" for _, part, _ in rows if part not in CLOCK_COLOURS}}
    shares = {part: sum(s for _, p, s in rows if p == part) / total for part in colours}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
    said = ", ".join(f"{percent(share)} {part}" for part, share in largest if share)
    unit, unit_s = time_unit(total)
    scaled = [(bar, part, seconds / unit_s) for bar, part, seconds in rows]
    summary = f"{duration(total)} in all: {said}."
    headings = {"bar": "process", "part": "part", "value": f"time, {unit}"}
    yield stacked_bars("wall-clock", "Wall clock by part of the work", summary, scaled, colours, unit, headings)


def time_unit(total_s: float) -> tuple[str, float]:
    """The unit that suits a time, and how many seconds it has."""
    return next((name, seconds) for name, seconds, below in TIME_UNITS if total_s < below)


def axes_of(contents: Contents) -> dict[str, str]:
    """The horizontal axes that curves can have, in words."""
    unit, _ = time_unit(max(contents["curves"]["figures"]["loss"]["seconds"], default=0.0))
    return {"update": "update", "tokens": "target tokens", "seconds": f"training time, {unit}"}


def in_unit(columns: Columns, unit_s: float) -> Columns:
    """Columns with their times in another unit."""
    return {
        key: [value / unit_s for value in values] if key in ("seconds", "seconds_end") else values
        for key, values in columns.items()
    }


def clock_place(name: str) -> int:
    """Where a part of the wall clock stands in its bar."""
    order = [f"{part}_s" for part in CLOCK_COLOURS]
    return order.index(name) if name in order else len(order)


def curve_charts(contents: Contents) -> Iterator[Chart]:
    """What was measured update by update."""
    curves, figures, axes = contents["curves"], contents["figures"], axes_of(contents)
    _, unit_s = time_unit(max(curves["figures"]["loss"]["seconds"], default=0.0))
    drawn = {name: in_unit(columns, unit_s) for name, columns in curves["figures"].items()}
    excluded, resumes = in_unit(curves["excluded"], unit_s), in_unit(curves["resumes"], unit_s)
    marks = {"excluded": {**excluded, "reason": [shown(one) for one in excluded["reason"]]}, "resumes": resumes}
    none: dict[str, Columns] = {"excluded": {"update": []}, "resumes": resumes}
    resumed = [Key("resumed", "var(--muted)", "dashed")] if resumes["update"] else []

    if drawn["loss"]["loss"]:
        life = curves["mean_half_life_updates"]
        mean = Key(f"running mean (EMA, half-life {life:,} updates)", colour(2), "line")
        has_mean = "mean" in drawn["loss"]
        yield curve_chart(
            "loss", "Training loss", curve_summary("Training loss", drawn["loss"], "loss", loss), "nats",
            drawn["loss"], "loss", none,
            [Key("each update (raw)", colour(1), "thin"), *([mean] if has_mean else []), *resumed],
            mean=mean if has_mean else None, is_wide=True,
            headings={**axes, "loss": "loss, nats", **({"mean": "running mean"} if has_mean else {})},
        )  # fmt: skip
    if drawn["val_loss"]["val_loss"]:
        yield curve_chart(
            "val-loss", "Validation loss", curve_summary("Validation loss", drawn["val_loss"], "val_loss", loss),
            "nats", drawn["val_loss"], "val_loss", none, resumed,
            headings={**axes, "val_loss": "validation loss, nats"},
        )  # fmt: skip
    if drawn["lr"]["lr"]:
        yield curve_chart(
            "lr", "Learning rate", curve_summary("Learning rate", drawn["lr"], "lr", significant), "per update",
            drawn["lr"], "lr", none, resumed, from_zero=True, number_format="~e",
            headings={**axes, "lr": "learning rate"},
        )  # fmt: skip
    if drawn["grad_norm"]["grad_norm"]:
        clip = curves["grad_clip"]
        limit = (Key(f"scaled down to {clip:g} above it", colour(2), "dashed"), clip) if clip else None
        yield curve_chart(
            "grad-norm", "Gradient norm before clipping",
            curve_summary("Gradient norm", drawn["grad_norm"], "grad_norm", significant), "norm",
            drawn["grad_norm"], "grad_norm", none, [*([limit[0]] if limit else []), *resumed],
            limit=limit, from_zero=True,
            headings={**axes, "grad_norm": "gradient norm"},
        )  # fmt: skip
    if drawn["speed"]["speed"]:
        reasons = list(dict.fromkeys(marks["excluded"]["reason"]))
        colours = dict(zip(reasons, itertools.cycle(BAND_COLOURS), strict=False))
        average = figures["throughput"].get("target_tokens_per_s")
        limit = (Key(f"measured: {average:,.0f} tokens/s", colour(2), "dashed"), average) if average else None
        keys = [*([limit[0]] if limit else []), *(Key(f"left out: {one}", colours[one], "area") for one in reasons)]
        yield curve_chart(
            "speed", "Speed of each update", curve_summary("Speed", drawn["speed"], "speed", count, "tokens/s"),
            "target tokens/s", drawn["speed"], "speed", marks, [*keys, *resumed],
            limit=limit, colours=colours, from_zero=True, number_format="~s", is_wide=True,
            headings={**axes, "speed": "target tokens/s"},
        )  # fmt: skip
    if drawn["memory"]["memory"]:
        held = drawn["memory"]["memory"]
        unit, scale = ("GiB", GIB) if max(held) >= GIB else ("MiB", MIB)
        points = {**drawn["memory"], "memory": [one / scale for one in held]}
        yield curve_chart(
            "memory", "Memory at each update", curve_summary("Memory", drawn["memory"], "memory", size), unit,
            points, "memory", none, resumed, from_zero=True, headings={**axes, "memory": f"memory, {unit}"},
        )  # fmt: skip


def curve_summary(what: str, points: Columns, name: str, form: Any, unit: str = "") -> str:
    """A curve in a sentence."""
    values, updates = points[name], points["update"]
    low, high = min(values), max(values)
    lowest, highest = updates[values.index(low)], updates[values.index(high)]
    unit = f" {unit}" if unit else ""
    return (
        f"{what}: {form(values[0])}{unit} at update {updates[0]:,}, {form(values[-1])}{unit} at {updates[-1]:,}; "
        f"lowest {form(low)} at {lowest:,}, highest {form(high)} at {highest:,}."
    )


def memory_charts(contents: Contents) -> Iterator[Chart]:
    """What was predicted beside what was measured, and memory over one update."""
    said = contents["figures"]["memory"]
    predicted = said["predicted"]
    measured = [
        (f"{scope}: {word}", MEASURED, float(figures[key]))
        for scope, figures in said["scopes"].items()
        for key, word in SCOPE_FIGURES.items()
        if key in figures
    ]
    if not measured and said["process_peak_bytes"]:
        measured = [("process: peak", MEASURED, float(said["process_peak_bytes"]))]
    parts = list(predicted["parts"].items()) if predicted else []
    rows = [*(("predicted", part, float(number)) for part, number in parts if number > 0), *measured]
    if rows:
        unit, scale = ("GiB", GIB) if max(value for _, _, value in rows) >= GIB else ("MiB", MIB)
        colours = dict(zip([part for part, _ in parts], itertools.cycle(PART_COLOURS), strict=False))
        colours[MEASURED] = "var(--measured)"
        total = f"Predicted {size(sum(number for _, number in parts))}. " if parts else ""
        measures = ", ".join(f"{bar.replace(': ', ' ')} {size(value)}" for bar, _, value in measured)
        summary = f"{total}Measured: {measures or 'nothing'}."
        scaled = [(bar, part, value / scale) for bar, part, value in rows]
        headings = {"bar": "bar", "part": "part", "value": f"memory, {unit}"}
        yield stacked_bars("memory-parts", "Memory, predicted and measured", summary, scaled, colours, unit, headings)
    events = contents["memory_events"]
    if events and events["curve"]["s"]:
        top = max(events["curve"]["bytes"])
        at_update = f" {events['update']:,}" if events["update"] is not None else ""
        yield memory_chart(f"Memory held over update{at_update}, at most {size(top)}.", events)


def timeline_charts(timeline: dict[str, Any] | None) -> Iterator[Chart]:
    """How long the device idled at a time."""
    bins = timeline["gaps"]["histogram"] if timeline else []
    named = [(gap_name(one), one["count"]) for one in bins if "count" in one and "from_s" in one]
    if named and sum(number for _, number in named):
        gaps = f"{sum(number for _, number in named):,.0f} gaps in which nothing ran, by how long they were."
        yield histogram("gaps", "Gaps by length", gaps, named, "length of the gap", "gaps")


def gap_name(one: dict[str, Any]) -> str:
    """A bin of the gaps in words."""
    begin, end = one["from_s"], one.get("below_s")
    if end is None:
        return f"≥ {duration(begin)}"
    return f"< {duration(end)}" if not begin else f"{duration(begin)}–{duration(end)}"


def data_charts(data: dict[str, Any]) -> Iterator[Chart]:
    """How long documents and pieces are, and how full packs are."""
    for name, title, unit in (
        ("lengths", "Documents by length", "documents"),
        ("pieces", "Pieces by length", "pieces"),
    ):
        said = data[name]
        if said:
            bins = [(f"{one['from']:,.0f}", one["number"]) for one in said["histogram"]]
            total = sum(number for _, number in bins)
            summary = f"{count(total)} {unit}, {significant(said.get('mean'))} tokens on average."
            yield histogram(f"{name}-histogram", title, summary, bins, "tokens, from", unit)
    packing = data["packing"]
    if packing and packing["fill_histogram"]:
        whole = [one for one in packing["fill_histogram"] if {"from", "packs"} <= one.keys()]
        bins = [(percent(one["from"], 0), one["packs"]) for one in whole]
        summary = f"{count(packing.get('packs'))} packs, {percent(packing.get('fill'), 2)} of their slots filled."
        yield histogram("fill-histogram", "Packs by fill", summary, bins, "share of slots filled, from", "packs")


def figure(chart: Chart, picture: Html) -> Html:
    """A chart as it stands in the page: title and legend, picture with its text, and its numbers on demand."""
    legend = (
        tag("ul", *(tag("li", swatch(key), key.label) for key in chart.keys), class_="legend") if chart.keys else None
    )
    points = chart.data["points"]
    rows = zip(*([cell(value) for value in points[key]] for key in chart.headings), strict=True)
    numeric = [index for index, key in enumerate(chart.headings) if not isinstance(first(points[key]), str)]
    return tag(
        "figure",
        tag("figcaption", tag("strong", chart.title), legend),
        tag("div", picture, class_="plot", role="img", aria_label=shown(chart.summary), data_chart=chart.name),
        details("Numbers", table(chart.title, list(chart.headings.values()), rows, numeric, is_headed=False)),
        class_="wide" if chart.is_wide else None,
        id=f"figure-{chart.name}",
    )


def first(values: Sequence[Any]) -> Any:
    """The first of some values, or None."""
    return values[0] if values else None


def cell(value: Any) -> Html:
    """A value in the table of a chart."""
    return Html(escape(f"{value:,}" if isinstance(value, (int, float)) else NO_VALUE if value is None else str(value)))


NO_VALUE = "–"


def swatch(key: Key) -> Html:
    """The sample of a line or area in a legend."""
    shapes = {
        "line": '<path d="M1 6h20" stroke-width="2.4"/>',
        "thin": '<path d="M1 6h20" stroke-width="1.2" opacity=".7"/>',
        "dashed": '<path d="M1 6h20" stroke-width="1.6" stroke-dasharray="5 3"/>',
        "area": '<path d="M1 1h20v10H1z" stroke="none" opacity=".35"/>',
        "bar": '<path d="M5 0h12v12H5z" stroke="none"/>',
        "dot": '<circle cx="11" cy="6" r="4" stroke="none" opacity=".6"/>',
        "tick": '<path d="M11 0v12" stroke-width="2"/>',
    }
    fill, stroke = (key.colour, "none") if key.kind in ("area", "bar", "dot") else ("none", key.colour)
    return Html(
        f'<svg class="swatch" viewBox="0 0 22 12" width="22" height="12" aria-hidden="true" fill="{fill}" '
        f'stroke="{stroke}">{shapes[key.kind]}</svg>'
    )


def pictures_for_page(charts: Iterable[Chart]) -> dict[str, Any]:
    """What scripts need to draw the charts, by name: specs without what is the same in all, and data by column."""
    return {
        chart.name: {
            "spec": {key: value for key, value in chart.spec.items() if key != "config"},
            "data": chart.data,
            "has_axes": chart.has_axes,
        }
        for chart in charts
    }
