"""The content of `report.json`, which is all that the page shows: one plain object of what was gathered. Pure."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from training_lab import record, wall_clock
from training_lab.report.curves import (
    MOST_POINTS,
    Columns,
    Progress,
    bands,
    curve_of,
    half_life,
    ranges,
    resumes,
    speed_of,
    thinned,
)
from training_lab.report.figures import key_figures, processes
from training_lab.report.files import about
from training_lab.report.gather import Gathered
from training_lab.report.reading import at, mapping, number, numbers, records, words
from training_lab.report.verdicts import STATES, verdicts

SCHEMA = "report-v1"
MOST_ROWS = 300
"""Of a list that only a damaged or very long run would make longer."""
MOST_DIFF_CHARACTERS = 200_000
LICENCE = ("licence", "licence_url", "attribution")


def contents(found: Gathered) -> dict[str, Any]:
    """Everything that the report says, numbers in full."""
    config = found[record.CONFIG]
    failure = mapping(found[record.SUMMARY].get("failure"))
    figures = key_figures(found)
    excluded = ranges([(one["update"], one["reason"]) for one in figures["throughput"].pop("excluded")])
    return {
        "schema": SCHEMA,
        "run": found.run_id,
        "name": words(config.get("name"), 200),
        "purpose": words(at(config, "values", "purpose")),
        "state": found.state,
        "state_in_words": STATES.get(found.state, found.state),
        "is_closed": found.is_closed,
        "failure": {key: words(failure.get(key), 20_000) for key in ("message", "traceback") if failure.get(key)},
        "damage": [one._asdict() for one in found.damage],
        "verdicts": verdicts(found),
        "figures": figures,
        "wall_clock": {
            "definition": words(at(found[record.SUMMARY], "wall_clock", "definition")) or wall_clock.DEFINITION,
            "processes": processes(found),
        },
        "excluded": excluded[:MOST_ROWS],
        "curves": curves(found, excluded),
        "memory_events": memory_events(found),
        "timeline": timeline(found),
        "data": data(found),
        "config": describe_config(config),
        "model": model(config),
        "provenance": provenance(found),
        "events": events(found),
        "files": files(found),
        "notes": found.notes,
        "wandb": {key: value for key, value in found[record.WANDB].items() if isinstance(value, (str, int, float))},
        "again": again(found),
    }


def curves(found: Gathered, excluded: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured update by update, thinned; and where the run was resumed and what the speed leaves out."""
    updates = found.updates
    progress = Progress(updates)
    figures: dict[str, Columns] = {
        "loss": curve_of(updates, progress, lambda row: number(row.get("loss")), "loss", with_mean=True),
        "val_loss": evaluated(found, progress),
        "lr": curve_of(updates, progress, lambda row: number(row.get("lr")), "lr"),
        "grad_norm": curve_of(updates, progress, lambda row: number(row.get("grad_norm")), "grad_norm"),
        "speed": curve_of(updates, progress, speed_of, "speed"),
        "memory": curve_of(updates, progress, lambda row: number(row.get("memory_bytes")), "memory"),
    }
    return {
        "updates": len(updates),
        "at_most_points": MOST_POINTS,
        "mean_half_life_updates": half_life(len(updates)),
        "grad_clip": number(at(found[record.CONFIG], "values", "optimizer", "grad_clip")),
        "excluded": bands(excluded[:MOST_ROWS], progress),
        "resumes": resumes(updates, progress),
        "figures": figures,
    }


def evaluated(found: Gathered, progress: Progress) -> Columns:
    """The validation losses, each at the update after which it was measured."""
    losses = [number(row.get("val_loss")) for row in found.evaluations]
    kept = thinned(losses)
    places = [progress.after(found.evaluations[i]["update"]) for i in kept]
    axes = {axis: [place[axis] for place in places] for axis in ("update", "tokens", "seconds")}
    return {**axes, "val_loss": [losses[i] for i in kept]}


def memory_events(found: Gathered) -> dict[str, Any] | None:
    """Memory over one update, thinned, with its phases; None if it was not recorded."""
    said = found[record.MEMORY_EVENTS]
    times, held = at(said, "curve", "s"), at(said, "curve", "bytes")
    if not isinstance(times, list) or not isinstance(held, list):
        return None
    points = [(t, b) for t, b in zip(times, held, strict=False) if number(t) is not None and number(b) is not None]
    kept = thinned([b for _, b in points])
    phases = [
        {"name": words(one.get("name"), 40), **numbers(one)}
        for one in records(said.get("phases"))[:50]
        if number(one.get("begin_s")) is not None and number(one.get("end_s")) is not None
    ]
    return {
        "update": number(said.get("update")),
        "device": words(said.get("device"), 100),
        "source": words(said.get("source")),
        "definition": words(said.get("definition")),
        "base_bytes": number(said.get("base_bytes")),
        "phases": phases,
        "curve": {"s": [points[i][0] for i in kept], "bytes": [points[i][1] for i in kept]},
    }


def timeline(found: Gathered) -> dict[str, Any] | None:
    """The summary of the recorded operations; None if there is none."""
    said = found[record.SUMMARY].get("timeline")
    if not isinstance(said, dict):
        return None
    gaps = mapping(said.get("gaps"))

    def named(key: str) -> list[dict[str, Any]]:
        return [{"name": words(one.get("name"), 300), **numbers(one)} for one in records(said.get(key))[:50]]

    updates = said.get("updates")
    return {
        "updates": [one for one in updates[:50] if number(one) is not None] if isinstance(updates, list) else [],
        "seconds": number(said.get("seconds")),
        "busy_share": number(at(said, "busy", "share")),
        "busy_definition": words(at(said, "busy", "definition")),
        "phases": named("phases"),
        "operators": named("operators"),
        "gaps": {**numbers(gaps), "histogram": [numbers(one) for one in records(gaps.get("histogram"))[:50]]},
    }


def data(found: Gathered) -> dict[str, Any]:
    """Where the text comes from, how long its documents are, how it is split and packed."""
    manifest, stats = found[record.DATA_MANIFEST], found[record.DATA_STATS]
    source, packing = mapping(manifest.get("source")), mapping(stats.get("packing"))
    licence = {**source, **mapping(stats.get("licence"))}
    leaks = mapping(at(stats, "split", "leaks"))
    facts = {key: one for key, one in source.items() if key not in LICENCE and isinstance(one, (str, int, float))}
    return {
        "identity": words(manifest.get("identity"), 64),
        "source": {words(key, 60): words(one, 300) if isinstance(one, str) else one for key, one in facts.items()},
        "licence": {key: words(licence[key], 500) for key in LICENCE if words(licence.get(key))},
        "files": [
            {"name": words(one.get("name"), 300), "sha256": words(one.get("sha256"), 64), **numbers(one)}
            for one in records(source.get("files"))[:MOST_ROWS]
        ],
        "num_files": len(records(source.get("files"))),
        "tokenizer": {"kind": words(at(manifest, "tokenizer", "kind"), 40), **numbers(manifest.get("tokenizer"))},
        **{key: number(stats.get(key)) for key in ("documents", "tokens", "text_bytes", "bytes_per_token")},
        "lengths": histogram_of(stats.get("lengths")),
        "pieces": histogram_of(stats.get("pieces")),
        "rejected": numbers(stats.get("rejected")),
        "duplicates": {
            **numbers(stats.get("duplicates")),
            "policy": words(at(stats, "duplicates", "policy"), 40),
            "definition": words(at(stats, "duplicates", "definition")),
        },
        "split": {
            "rule": words(at(manifest, "split", "rule"), 100),
            "val_fraction": number(at(manifest, "split", "val_fraction")),
            **{
                part: numbers(at(stats, "split", part) or at(manifest, "split", part))
                for part in ("train", "validation")
            },
        },
        "validation": {
            "identity": words(at(manifest, "validation", "identity"), 64),
            **numbers(manifest.get("validation")),
        },
        "order": {
            key: words(at(manifest, "plan", key), 100) for key in ("identity", "layout") if at(manifest, "plan", key)
        },
        "leaks": {
            words(name, 40): {"definition": words(mapping(one).get("definition")), **numbers(one)}
            for name, one in leaks.items()
        },
        "packing": {
            **numbers(packing),
            "definition": words(packing.get("definition")),
            "packing": words(packing.get("packing"), 40),
            "pieces_per_pack": numbers(packing.get("pieces_per_pack")),
            "fill_histogram": [numbers(one) for one in records(packing.get("fill_histogram"))[:100]],
        }
        if packing
        else None,
    }


def histogram_of(value: Any) -> dict[str, Any] | None:
    """Lengths: mean, quantiles and how many lie between powers of two; None if they are not recorded."""
    bins = [numbers(one) for one in records(at(value, "histogram"))[:64]]
    whole = [one for one in bins if {"from", "below", "number"} <= one.keys()]
    if not whole:
        return None
    definition, quantiles = words(mapping(value).get("definition")), numbers(mapping(value).get("quantiles"))
    return {**numbers(value), "definition": definition, "quantiles": quantiles, "histogram": whole}


def describe_config(config: dict[str, Any]) -> dict[str, Any]:
    """Every setting with its origin, and which of them are this experiment's own choice."""
    origins = {key: words(origin, 300) for key, origin in mapping(config.get("origins")).items()}
    settings = [
        {"key": key, "value": value, "origin": origins.get(key, "")}
        for key, value in flatten(mapping(config.get("values")))
        if key != "purpose"
    ]
    labels = [words(one.get("label"), 300) for one in records(config.get("files"))]
    own = {"--set", *labels[:1]}
    chosen = [one["key"] for one in settings if one["origin"] in own]
    is_remade = len(settings) > 1 and len(chosen) == len(
        settings
    )  # from the config.json of a run: all is written there
    return {
        "identity": words(config.get("identity"), 64),
        "files": [
            {"label": words(one.get("label"), 300), "sha256": words(one.get("sha256"), 64)}
            for one in records(config.get("files"))
        ],
        "is_remade": is_remade,
        "chosen": [key for key in chosen if not is_remade],
        "settings": settings,
    }


def flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings by dotted key, each as it is written in JSON."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += flatten(value, f"{prefix}{words(key, 100)}.")
        else:
            found.append((f"{prefix}{words(key, 100)}", words(json.dumps(value, ensure_ascii=False), 2000)))
    return found


def model(config: dict[str, Any]) -> dict[str, Any]:
    """Parameters and the groups of the optimizer."""
    said = mapping(config.get("model"))
    return {
        "parameters": number(said.get("parameters")),
        "initial_weights_sha256": words(said.get("initial_weights_sha256"), 64),
        "optimizer_groups": [
            {
                "name": words(one.get("name"), 60),
                "optimizer": words(one.get("optimizer"), 40),
                **numbers(one),
                "num_tensors": len(one["parameters"]) if isinstance(one.get("parameters"), list) else None,
            }
            for one in records(said.get("optimizer_groups"))[:50]
        ],
    }


def provenance(found: Gathered) -> dict[str, Any]:
    """What ran, in what, on what."""
    source = found[record.SOURCE]
    changes = source.get("uncommitted_changes")
    diff = source.get("uncommitted_diff")
    untracked = {words(name, 300): words(text, 20_000) for name, text in mapping(source.get("untracked_files")).items()}
    return {
        "commit": words(source.get("commit"), 64),
        "uncommitted_changes": [words(one, 300) for one in changes[:MOST_ROWS]] if isinstance(changes, list) else None,
        "uncommitted_diff": words(diff, MOST_DIFF_CHARACTERS),
        "untracked_files": dict(list(untracked.items())[:20]),
        "num_source_files": len(mapping(source.get("files"))),
        "sha256": {
            "source (all files that ran)": words(source.get("sha256"), 64),
            "config": words(found[record.CONFIG].get("identity"), 64),
            "data": words(found[record.DATA_MANIFEST].get("identity"), 64),
            "order of the data": words(at(found[record.DATA_MANIFEST], "plan", "identity"), 64),
            "validation set": words(at(found[record.DATA_MANIFEST], "validation", "identity"), 64),
            "weights before training": words(at(found[record.CONFIG], "model", "initial_weights_sha256"), 64),
            "weights at the end": words(found[record.SUMMARY].get("weights_sha256"), 64) if found.is_closed else "",
        },
        "processes": [describe_process(one) for one in records(found[record.ENVIRONMENT].get("processes"))[:20]],
    }


def describe_process(process: dict[str, Any]) -> dict[str, Any]:
    """What one process ran in and on."""
    plain = {
        words(key, 60): words(value, 500) if isinstance(value, str) else value
        for key, value in process.items()
        if isinstance(value, (str, int, float, bool))
    }
    texts = {
        key: {words(name, 100): words(one, 200) for name, one in mapping(process.get(key)).items()}
        for key in ("variables", "packages")
    }
    return {**plain, **texts}


def events(found: Gathered) -> list[dict[str, Any]]:
    """What happened besides updates and evaluations, each with its plain facts."""
    return [
        {
            key: words(value, 500) if isinstance(value, str) else value
            for key, value in row.items()
            if is_plain(key, value)
        }
        for row in found.events[:MOST_ROWS]
    ]


def is_plain(key: str, value: Any) -> bool:
    """Whether a fact of an event fits in a line."""
    return key != "kind" and isinstance(value, (str, int, float))


def files(found: Gathered) -> list[dict[str, Any]]:
    """Every file with what it is; not those of the report, nor the manifest, which change with it."""
    listed = []
    for file in found.files[: 2 * MOST_ROWS]:
        what, opened_with = about(file.name)
        listed.append({**file._asdict(), "what": what, "opened_with": opened_with})
    return listed


def again(found: Gathered) -> dict[str, str]:
    """The commands that make the run once more, or look into it."""
    arguments = found[record.CONFIG].get("arguments")
    typed = [one for one in arguments if isinstance(one, str)] if isinstance(arguments, list) else []
    run = shlex.quote(found.run_id)
    python = "python -m training_lab"
    commands = {"Check that it is as recorded": f"{python} verify {run}"}
    if typed:
        goes_on = (
            "Go on with it" if found.state in ("stopped", "interrupted", "killed") else "Train the config once more"
        )
        new = [] if goes_on == "Go on with it" else ["--new"]
        commands[goes_on] = words(shlex.join(["python", "-m", "training_lab", "train", *typed, *new]))
    commands["Make the run once more from its folder alone"] = (
        f"{python} train --config {shlex.quote(f'.runs/{found.run_id}/config.json')} --new"
    )
    commands["Compare bit for bit: train its first updates again"] = f"{python} verify {run} --replay 2"
    return commands


def is_link(url: str) -> bool:
    """Whether a text is an address that a page may lead to."""
    return re.fullmatch(r"https?://[^\s<>\"'`\\\x00-\x20\x7f]+", url) is not None
