"""The parts of the page that say what came out: verdicts, key figures, curves, memory, timeline, data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training_lab.report.html import (
    Html,
    bar,
    block,
    code,
    details,
    facts,
    foreign,
    join,
    paragraph,
    prose,
    section,
    subsection,
    table,
    tag,
)
from training_lab.report.units import count, duration, exact, loss, percent, significant, size
from training_lab.report.verdicts import BAD, GOOD, STATES

Contents = dict[str, Any]
Figures = Mapping[str, Html]
"""The charts by name, as they stand in the page; those that the record has numbers for."""

MARKS = {GOOD: ("✓", "yes"), BAD: ("✗", "no")}
UNKNOWN_MARK = ("–", "not known")


# --- the head of the page ---


def head(contents: Contents) -> Html:
    """Name, state, what is wrong with the record, and the verdicts."""
    name = contents["name"] or contents["run"]
    is_good = contents["state"] == "finished"
    state = foreign(contents["state_in_words"]) if contents["state"] not in STATES else contents["state_in_words"]
    updates = contents["figures"]["updates"], contents["figures"]["planned_updates"]
    done = f" after {count(updates[0] or 0)} of {count(updates[1])} updates" if updates[1] is not None else ""
    return tag(
        "header",
        paragraph("LLM Training Lab · report of a run", class_="kind"),
        tag("h1", foreign(name)),
        paragraph(foreign(contents["purpose"]), class_="purpose") if contents["purpose"] else None,
        paragraph(
            "Run ", code(contents["run"]), ": ", tag("strong", state), done, class_="state good" if is_good else "state"
        ),
        failure(contents["failure"]),
        damage(contents["damage"]),
        strip(contents["verdicts"]),
    )


def failure(said: dict[str, str]) -> Html | None:
    """Why a run failed."""
    if not said.get("message"):
        return None
    trace = details("Traceback", block(said["traceback"])) if said.get("traceback") else None
    return tag("div", paragraph(foreign(said["message"])), trace, class_="alarm", role="note")


def damage(found: list[dict[str, str]]) -> Html | None:
    """What is missing or damaged, before anything else is read."""
    if not found:
        return None
    items = [tag("li", code(one["file"]), ": ", foreign(one["message"])) for one in found]
    shown, more = items[:6], items[6:]
    rest = details(f"and {len(more)} more", tag("ul", *more)) if more else None
    text = "This record is not whole. The report shows what there is."
    return tag("div", paragraph(tag("strong", text)), tag("ul", *shown), rest, class_="alarm", role="note")


def strip(verdicts: list[dict[str, str]]) -> Html:
    """Each verdict with what was seen and its rule."""
    items = []
    for one in verdicts:
        mark, word = MARKS.get(one["verdict"], UNKNOWN_MARK)
        sign = tag("span", tag("span", mark, aria_hidden="true"), tag("span", word, class_="unseen"), class_="mark")
        name = tag("strong", one["name"])
        seen, rule = tag("p", foreign(one["seen"]), class_="seen"), tag("p", prose(one["rule"]), class_="rule")
        items.append(tag("li", sign, tag("div", name, seen, rule), class_=one["verdict"]))
    return tag("ul", *items, class_="verdicts", aria_label="Verdicts")


# --- key figures ---


def key_figures(contents: Contents, figures: Figures) -> Html:
    """The numbers that a run is remembered by, each with its definition, and where the time went."""
    said = contents["figures"]
    tiles = [
        loss_tile(said["val_loss"]),
        ("Training loss", arrow(said["loss"]), "of the first update and of the last"),
        tokens_tile(said),
        speed_tile(said["throughput"]),
        mfu_tile(said["utilisation"]),
        share_tile(said["utilisation"]),
        memory_tile(said["memory"]),
        ("Wall clock", exact(said["wall_clock_s"], duration(said["wall_clock_s"])), "all processes of the run"),
        ("Parameters", exact(said["parameters"], count(said["parameters"])), None),
    ]
    shown = [
        tag("div", tag("dt", word), tag("dd", value, class_="value"), tag("dd", more, class_="more") if more else None)
        for word, value, more in tiles
    ]
    origin = None
    if not contents["is_closed"]:
        is_lost = contents["state"] == "damaged"
        why = "There is no summary that can be read" if is_lost else "The run was not closed"
        origin = paragraph(f"{why}: these are figures of the rows in metrics.jsonl, as far as they go.", class_="aside")
    return section(
        "figures",
        "Key figures",
        origin,
        tag("dl", *shown, class_="tiles"),
        figures.get("wall-clock"),
        definitions(contents),
    )


def arrow(said: dict[str, Any]) -> Html:
    """From the first to the last."""
    parts = [exact(said[name], loss(said[name])) for name in ("first", "last")]
    return join([parts[0], Html(' <span class="to">→</span> '), parts[1]])


def loss_tile(said: dict[str, Any]) -> tuple[str, Html, Html]:
    """The validation loss."""
    before, after = (
        exact(said["perplexity"][name], significant(said["perplexity"][name])) for name in ("first", "last")
    )
    best = (
        join([f"; best {loss(said['best'])} at update ", count(said["best_update"])])
        if said["best"] is not None
        else ""
    )
    return "Validation loss", arrow(said), join(["perplexity ", before, " → ", after, best])


def tokens_tile(said: dict[str, Any]) -> tuple[str, Html, str]:
    """How much was trained on."""
    tokens = exact(said["target_tokens"], count(said["target_tokens"]))
    return "Target tokens", tokens, f"{count(said['updates'])} of {count(said['planned_updates'])} updates"


def speed_tile(said: dict[str, Any]) -> tuple[str, Html, Html | str]:
    """Tokens per second."""
    speed, devices = said.get("target_tokens_per_s"), said.get("devices", 1)
    value = join([exact(speed, count(speed)), tag("span", " tokens/s", class_="unit")])
    if speed is None:
        return "Speed", Html("–"), "not measured: no update of the steady state"
    measured = said.get("measured_updates")
    inputs = f"; input tokens {count(said['input_tokens_per_s'])}/s" if "input_tokens_per_s" in said else ""
    updates = exact(measured, count(measured))
    return (
        "Speed per device",
        value,
        join(
            [f"target tokens, over {'' if devices == 1 else f'{devices} devices and '}", updates, f" updates{inputs}"]
        ),
    )


def mfu_tile(said: dict[str, Any]) -> tuple[str, Html, Html | str]:
    """Model FLOPs utilisation by both counts, or why there is none."""
    mfu, peak = said["mfu"], said["peak"]
    if "causal" not in mfu or not peak:
        rates = said["tflops_per_s"]
        rate = f"{significant(rates['causal'], 3)} TFLOP/s reached; " if "causal" in rates else ""
        return "MFU", Html("none"), join([rate, foreign(said["reason"] or "the record does not say why")])
    full = join([exact(mfu.get("full"), percent(mfu.get("full"), 2)), " by full squares"])
    of = f"; of {peak['tflops']:g} TFLOP/s {peak['dtype']} ({peak['source']})"
    return "MFU (causal)", exact(mfu["causal"], percent(mfu["causal"], 2)), join([full, foreign(of)])


def share_tile(said: dict[str, Any]) -> tuple[str, Html, Html | str]:
    """The share of the rate of matrix products that was measured on this device."""
    share, probe = said["matmul_share"], said["matmul_probe"]
    if "causal" not in share or not probe:
        return "Share of measured matmul peak", Html("none"), "not measured (measure.matmul_probe)"
    shape = " × ".join(count(one) for one in probe["shape"])
    full = (
        f"{percent(share.get('full'))} by full squares; of {significant(probe['tflops'], 3)} TFLOP/s {probe['dtype']}"
    )
    return (
        "Share of measured matmul peak",
        exact(share["causal"], percent(share["causal"])),
        foreign(f"{full}, shape {shape}"),
    )


def memory_tile(said: dict[str, Any]) -> tuple[str, Html, Html]:
    """Peaks by scope on a GPU, that of the updates first; else the peak of the process."""
    scopes = list(said["scopes"].items())
    if not scopes:
        peak = said["process_peak_bytes"]
        return "Peak memory", exact(peak, size(peak)), Html("resident, of the process")
    scope, figures = scopes[0]
    allocated = figures.get("allocated_bytes")
    known = {key: figures[key] for key in ("active_bytes", "reserved_bytes", "device_used_bytes") if key in figures}
    others = [f"{key.removesuffix('_bytes').replace('_', ' ')} {size(number)}" for key, number in known.items()]
    other_scopes = [f"in {name} {size(other.get('allocated_bytes'))} allocated" for name, other in scopes[1:4]]
    more = "; ".join(part for part in (", ".join(["allocated", *others]), *other_scopes) if part)
    return f"Peak memory, {scope}", exact(allocated, size(allocated)), foreign(more)


def definitions(contents: Contents) -> Html:
    """What each figure is, in full."""
    said = contents["figures"]
    formulas = [
        part
        for name, text in said["utilisation"]["formulas"].items()
        for part in (Html("<br>"), f"{name}: ", code(text))
    ]
    utilisation = text_of(said["utilisation"])
    pairs = [
        ("Training loss", text_of(said["loss"])),
        ("Validation loss", text_of(said["val_loss"])),
        ("Perplexity", "e to the validation loss"),
        ("Speed", text_of(said["throughput"])),
        ("MFU and shares", join([utilisation, *formulas]) if utilisation else None),
        ("Memory", text_of(said["memory"])),
        ("Wall clock", text_of(contents["wall_clock"])),
    ]
    return tag("div", tag("h3", "Definitions"), facts(pairs, "definitions"), class_="part small")


def text_of(said: dict[str, Any]) -> Html | None:
    """A definition from the record."""
    return prose(said["definition"]) if said["definition"] else None


# --- curves ---


def curves(contents: Contents, figures: Figures) -> Html:
    """What was measured update by update."""
    said = contents["curves"]
    drawn = [figures.get(name) for name in ("loss", "val-loss", "grad-norm", "lr", "memory", "speed")]
    if not any(drawn):
        return section("curves", "Curves", paragraph("No update was recorded.", class_="aside"))
    notes = [
        "Loss, gradient norm and learning rate of update k are those that its step is made from; "
        "the validation loss is measured after it. "
    ]
    if said["updates"] > said["at_most_points"]:
        notes.append(
            f"Of {said['updates']:,} updates at most {said['at_most_points']:,} points a curve are drawn: the lowest "
            "and the highest of each stretch, so that no peak is lost. All of them are in metrics.jsonl. "
        )
    notes.append("Training time is that of the updates alone; what lies between them is left out.")
    if figures.get("memory") is None:
        notes.append(" Memory at each update is not in this record.")
    return section(
        "curves", "Curves", axis_choice(), paragraph(*notes, class_="aside"), tag("div", *drawn, class_="grid")
    )


def axis_choice() -> Html:
    """Which horizontal axis the curves have. Works with scripts, and is seen only with them."""
    choices = [("update", "update"), ("tokens", "target tokens"), ("seconds", "training time")]
    buttons = [
        tag(
            "label",
            Html(f'<input type="radio" name="axis" value="{value}"{" checked" if value == "update" else ""}>'),
            text,
        )
        for value, text in choices
    ]
    return tag("fieldset", tag("legend", "Horizontal axis"), *buttons, class_="axis")


# --- memory and timeline ---


def memory(contents: Contents, figures: Figures) -> Html:
    """What was predicted, what was measured, and one update allocation by allocation."""
    said, events = contents["figures"]["memory"], contents["memory_events"]
    parts: list[Html | None] = []
    if figures.get("memory-parts") is None:
        parts.append(paragraph("No memory was recorded.", class_="aside"))
    else:
        predicted = said["predicted"]
        text = (
            join(["The prediction is of: ", foreign(predicted["of"]), "."]) if predicted else "There is no prediction."
        )
        parts += [figures["memory-parts"], paragraph(text, class_="aside")]
    if figures.get("memory-events") is not None and events:
        parts += [
            figures["memory-events"],
            memory_phases(events),
            paragraph("Recorded from: ", foreign(events["source"]), ".", class_="aside"),
        ]
    else:
        parts.append(paragraph("Allocations were not recorded one by one (measure.memory_update).", class_="aside"))
    return section("memory", "Memory", *parts)


def memory_phases(events: Contents) -> Html | None:
    """The most that was held in each phase."""
    phases = events["phases"]
    if not phases:
        return None
    rows = [
        (
            foreign(one["name"]),
            duration(one["begin_s"]),
            duration(one["end_s"] - one["begin_s"]),
            size(one.get("peak_bytes")),
        )
        for one in phases
    ]
    return table("Phases of the update", ("phase", "begins", "takes", "most held"), rows, (1, 2, 3))


def timeline(contents: Contents, figures: Figures) -> Html:
    """What an update consists of, and how to look closer."""
    said = contents["timeline"]
    names = {one["name"] for one in contents["files"] if one["bytes"] is not None}
    if said is None:
        text = "Operations were not recorded one by one (measure.timeline_from)."
        return section("timeline", "Timeline", paragraph(text, class_="aside"), how_to_open(names))
    updates = ", ".join(count(update) for update in said["updates"])
    gaps = said["gaps"]
    pairs = [
        ("Updates", f"{updates}: {duration(said['seconds'])}"),
        (
            "Busy",
            join([exact(said["busy_share"], percent(said["busy_share"])), " – ", foreign(said["busy_definition"])]),
        ),
        (
            "Gaps",
            f"{count(gaps.get('count'))}, {duration(gaps.get('seconds'))} in all; "
            f"the longest {duration(gaps.get('longest_s'))}",
        ),
    ]
    phases = shares_table("Phases", "phase", said["phases"]) if said["phases"] else None
    operators = (
        shares_table("What took the most time itself", "operator", said["operators"]) if said["operators"] else None
    )
    beside = tag("div", phases, figures.get("gaps"), class_="grid")
    return section("timeline", "Timeline", facts(pairs), beside, operators, how_to_open(names))


def shares_table(caption: str, what: str, rows: list[dict[str, Any]]) -> Html:
    """Parts of the recorded updates, with their shares as bars."""
    lines = [
        (
            foreign(one["name"]),
            count(one.get("count")),
            duration(one.get("seconds")),
            percent(one.get("share")),
            bar(one.get("share") or 0.0),
        )
        for one in rows
    ]
    return table(caption, (what, "count", "time", "share", ""), lines, (1, 2, 3), class_="shares")


def how_to_open(names: set[str]) -> Html | None:
    """What to do with the recordings that the folder has."""
    steps = []
    if "timeline.json" in names:
        steps.append(
            tag("li", code("timeline.json"), ": open ", code("https://ui.perfetto.dev"), " and drop the file there; it "
                "stays in the browser. The updates are named, and their phases inside them.")
        )  # fmt: skip
    if "memory-snapshot.pickle" in names:
        steps.append(
            tag("li", code("memory-snapshot.pickle"), ": open ", code("https://docs.pytorch.org/memory_viz"), " and "
                "drop the file there. It is a pickle: open only those that you made.")
        )  # fmt: skip
    return subsection("Looking closer", tag("ul", *steps)) if steps else None
