"""The parts of the page that say how it came about: data, config, provenance, events, files, notes, mirror. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training_lab.report.contents import is_link
from training_lab.report.html import (
    Html,
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
from training_lab.report.notes import set_notes
from training_lab.report.units import count, duration, exact, loss, percent, significant, size

Contents = dict[str, Any]
Figures = Mapping[str, Html]

MANY_ROWS = 15
"""A table that is longer is shown on demand."""
MANY_PROCESSES = 4
FACT_WORDS = {"seconds": "took", "elapsed_s": "after", "segment": "process", "from_update": "from update"}
PROCESS_FACTS = (
    ("Python", ("python", "implementation")),
    ("System", ("system",)),
    ("Processor", ("processor", "machine")),
    ("Usable CPUs", ("usable_cpus",)),
    ("Threads", ("num_threads",)),
    ("Device", ("device", "device_reason")),
    ("GPU", ("gpu",)),
    ("torch", ("torch",)),
    ("CUDA", ("cuda",)),
    ("Arithmetic", ("compute", "compute_reason")),
    ("Attention", ("attention", "attention_reason")),
    ("Loss", ("loss", "loss_reason")),
    ("Compiling", ("compile", "compile_reason", "compile_state")),
)


def data(contents: Contents, figures: Figures) -> Html:
    """Where the text comes from, and what became of it."""
    said = contents["data"]
    drawn = [figures.get(name) for name in ("lengths-histogram", "pieces-histogram", "fill-histogram")]
    grid = tag("div", *drawn, split_table(said), class_="grid")
    if not said["identity"] and said["lengths"] is None:
        return section("data", "Data", paragraph("The record says nothing of the data.", class_="aside"))
    return section("data", "Data", facts(data_facts(said)), grid, leaks(said), source_files(said))


def data_facts(said: dict[str, Any]) -> list[tuple[str, Html | str | None]]:
    """The data in words and numbers."""
    source = ", ".join(f"{key} {value}" if key != "source" else str(value) for key, value in said["source"].items())
    licence = [part for text in said["licence"].values() for part in (link_or_text(text), "; ")][:-1]
    tokenizer, packing, duplicates = said["tokenizer"], said["packing"], said["duplicates"]
    same = f" ({duplicates['definition']})" if duplicates["definition"] else ""
    rejected = ", ".join(f"{count(number)} {why}" for why, number in said["rejected"].items())
    vocabulary = f", vocabulary {count(tokenizer['vocab_size'])}" if "vocab_size" in tokenizer else ""
    each = significant(said["bytes_per_token"])
    text = f"{count(said['documents'])} documents, {count(said['tokens'])} tokens ({each} bytes each)"
    return [
        ("Source", foreign(source) if source else None),
        ("Licence", join(licence) if licence else None),
        ("Text", text if said["documents"] is not None else None),
        ("Tokenizer", foreign(f"{tokenizer['kind']}{vocabulary}") if tokenizer["kind"] else None),
        ("Left out", foreign(rejected) if rejected else None),
        ("Duplicates", foreign(f"{count(duplicates.get('found'))}, policy: {duplicates['policy']}{same}")),
        ("Document lengths", quantiles(said["lengths"])),
        ("Piece lengths", quantiles(said["pieces"])),
        ("Packs", packs(packing) if packing else None),
    ]


def quantiles(said: dict[str, Any] | None) -> Html | None:
    """Lengths in a few numbers."""
    if said is None:
        return None
    named = (("median", "50"), ("95 %", "95"), ("99 %", "99"), ("longest", "100"))
    parts = [f"mean {count(said.get('mean'))}"]
    parts += [f"{word} {count(said['quantiles'][q])}" for word, q in named if q in said["quantiles"]]
    if "token_weighted_mean" in said:
        parts.append(f"token-weighted mean {count(said['token_weighted_mean'])}")
    definition = f" ({said['definition']})" if said["definition"] else ""
    return foreign(f"{', '.join(parts)}{definition}")


def packs(said: dict[str, Any]) -> Html:
    """Packing in a few numbers."""
    pieces, cut = said["pieces_per_pack"], said.get("documents_cut_share")
    return join([
        f"{count(said.get('packs'))} of {count(said.get('pack_length'))} slots, ",
        exact(said.get("fill"), percent(said.get("fill"), 2)), " filled (", foreign(said["packing"]), "); ",
        f"{significant(pieces.get('mean'))} pieces each, at most {count(pieces.get('max'))}; ",
        f"{percent(cut)} of the documents cut (", foreign(said["definition"]), ")",
    ])  # fmt: skip


def split_table(said: dict[str, Any]) -> Html:
    """The two sides of the split."""
    split = said["split"]
    rows = [
        (part, count(split[part].get("documents")), count(split[part].get("tokens")))
        for part in ("train", "validation")
    ]
    held_back = f"{count(said['validation'].get('target_tokens'))} target tokens are measured on"
    share = f"; rule {split['rule']}, {percent(split['val_fraction'])} held back" if split["rule"] else ""
    listing = table("Split", ("part", "documents", "tokens"), rows, (1, 2))
    return tag("div", listing, paragraph(foreign(f"{held_back}{share}."), class_="aside"))


def leaks(said: dict[str, Any]) -> Html | None:
    """Validation text that is found in the training text."""
    rows = []
    for name, one in said["leaks"].items():
        of = one.get("documents_with_a_sampled_run", one.get("validation_documents"))
        found = f"{count(one.get('documents'))}" + (f" of {count(of)}" if of is not None else "")
        rows.append((foreign(name), found, foreign(one["definition"])))
    return table("Leaks across the split", ("kind", "documents", "what is counted"), rows, (1,)) if rows else None


def source_files(said: dict[str, Any]) -> Html | None:
    """The files that the text is in."""
    if not said["files"]:
        return None
    rows = [(code(one["name"]), count(one.get("bytes")), code(one["sha256"])) for one in said["files"]]
    total, shown = said["num_files"], len(said["files"])
    title = f"Source files: {total:,}" + (f", the first {shown:,} of them" if shown < total else "")
    return details(title, table("Source files", ("file", "bytes", "SHA-256"), rows, (1,)))


def link_or_text(text: str) -> Html:
    """A link for an address on the web, else the text."""
    return tag("a", foreign(text), href=text, rel="noreferrer noopener") if is_link(text) else foreign(text)


# --- config ---


def config(contents: Contents) -> Html:
    """What is this experiment's own first, then every setting."""
    said = contents["config"]
    settings = said["settings"]
    if not settings:
        return section("config", "Config", paragraph("The record has no config.", class_="aside"))
    by_key = {one["key"]: one for one in settings}
    files = said["files"]
    base = foreign(f"{files[1]['label']} and the defaults") if len(files) > 1 else Html("the defaults")
    if said["is_remade"]:
        own = paragraph("Made from the config of a recorded run, in which every value is written.", class_="aside")
    elif not said["chosen"]:
        own = paragraph("Nothing: every value is the base's.", class_="aside")
    else:
        own = settings_table("Values over the base", [by_key[key] for key in said["chosen"]])
    chain = join([part for one in files for part in (Html(" ← "), code(one["label"]))][1:])
    whole = details(f"All {len(settings)} settings", settings_table("All settings", settings), class_="long")
    return section(
        "config", "Config",
        subsection("What differs from its base", paragraph("Base: ", base, ".", class_="aside"), own),
        subsection("The whole config", facts([("Files", chain), ("Identity", code(said["identity"]))]), whole),
        optimizer_groups(contents["model"]),
    )  # fmt: skip


def settings_table(caption: str, settings: list[dict[str, str]]) -> Html:
    """Settings with their values and origins."""
    rows = [(code(one["key"]), code(one["value"]), foreign(one["origin"])) for one in settings]
    return table(caption, ("setting", "value", "origin"), rows, is_titled=False)


def optimizer_groups(said: dict[str, Any]) -> Html | None:
    """Which parameters are trained how."""
    rows = [
        (
            foreign(one["name"]), foreign(one["optimizer"]), significant(one.get("weight_decay")),
            significant(one.get("lr_ratio")), count(one.get("num_tensors")), count(one.get("values")),
        )
        for one in said["optimizer_groups"]
    ]  # fmt: skip
    headings = ("group", "optimizer", "weight decay", "learning rate ×", "tensors", "values")
    return (
        subsection("Parameters", table("Parameters", headings, rows, (2, 3, 4, 5), is_titled=False)) if rows else None
    )


# --- provenance ---


def provenance(contents: Contents) -> Html:
    """Which code ran, in what, on what."""
    said = contents["provenance"]
    changes, untracked = said["uncommitted_changes"], said["untracked_files"]
    if changes is None:
        state = "not known: not run from a git checkout"
    else:
        state = f"uncommitted changes: {len(changes)}" if changes else "nothing uncommitted"
    pairs = [("Commit", code(said["commit"]) if said["commit"] else "none"), ("State", state),
             ("Files that ran", f"{said['num_source_files']:,}, each with its SHA-256 in source.json")]  # fmt: skip
    changed = details("Uncommitted changes", block("\n".join(changes))) if changes else None
    diff = details("The uncommitted diff", block(said["uncommitted_diff"])) if said["uncommitted_diff"] else None
    new = [details(f"Untracked: {name}", block(text)) for name, text in untracked.items()]
    hashes = [(name, code(value)) for name, value in said["sha256"].items() if value]
    return section(
        "provenance", "Provenance",
        subsection("Code", facts(pairs), changed, diff, *new),
        subsection("Hashes", table("Hashes", ("of", "SHA-256"), hashes, is_titled=False)) if hashes else None,
        processes(said["processes"]),
    )  # fmt: skip


def processes(described: list[dict[str, Any]]) -> Html | None:
    """What each process of the run had."""
    if not described:
        return None
    shown = described[-MANY_PROCESSES:]
    rows = [
        (word, *(foreign(fact(one, keys)) for one in shown))
        for word, keys in PROCESS_FACTS
        if any(fact(one, keys) for one in shown)
    ]
    variables = sorted({name for one in shown for name in one["variables"]})
    rows += [(code(name), *(foreign(one["variables"].get(name, "")) for one in shown)) for name in variables]
    headings = (
        "",
        *(
            f"process {one.get('segment', number)}"
            for number, one in enumerate(shown, start=len(described) - len(shown) + 1)
        ),
    )
    earlier = f" (the last {len(shown)} of {len(described)})" if len(shown) < len(described) else ""
    packages = described[-1]["packages"]
    listing = [(code(name), code(version)) for name, version in packages.items()]
    installed = table("Packages of the last process", ("package", "version"), listing)
    return subsection(
        f"Processes{earlier}",
        table("Processes", headings, rows, is_titled=False),
        details(f"{len(packages)} packages", installed) if packages else None,
    )  # fmt: skip


def fact(process: dict[str, Any], keys: tuple[str, ...]) -> str:
    """A fact of a process, and in parentheses what is said with it."""
    values = [process[key] for key in keys if process.get(key) not in (None, "")]
    texts = [("on" if value else "off") if isinstance(value, bool) else str(value) for value in values]
    return texts[0] + (f" ({'; '.join(texts[1:])})" if texts[1:] else "") if texts else ""


# --- events, files, notes, mirrors, what to do ---


def events(contents: Contents) -> Html:
    """What happened, and what the speed leaves out."""
    rows = [event_row(one) for one in contents["events"]]
    headings = ("event", "update", "UTC", "facts")
    happened = table("Events", headings, rows, (1,), is_titled=False) if rows else paragraph("None.", class_="aside")
    left_out = [(span(one), foreign(one["reason"])) for one in contents["excluded"]]
    excluded = table("Updates left out of tokens/s", ("updates", "reason"), left_out) if left_out else None
    if excluded and len(left_out) > MANY_ROWS:
        excluded = details(f"Updates left out of tokens/s: {len(left_out):,} stretches", excluded)
    listing = details(f"Events: {len(rows):,}", happened) if len(rows) > MANY_ROWS else happened
    return section("events", "Events", listing, excluded)


def event_row(event: dict[str, Any]) -> tuple[Html, str, Html, Html]:
    """An event with its facts in words."""
    apart = ("event", "update", "utc")
    told = [f"{FACT_WORDS.get(key, key)} {fact_of(key, value)}" for key, value in event.items() if key not in apart]
    update, when = event.get("update"), str(event.get("utc", "")).replace("T", " ").removesuffix("+00:00")
    number = count(update) if isinstance(update, (int, float)) else ""
    return foreign(str(event.get("event"))), number, foreign(when), foreign(", ".join(told))


def fact_of(key: str, value: Any) -> str:
    """A fact of an event."""
    if isinstance(value, float):
        return duration(value) if key in ("seconds", "elapsed_s") else loss(value)
    return str(value)


def span(one: dict[str, Any]) -> str:
    """A range of updates."""
    return f"{one['from']:,}" if one["from"] == one["to"] else f"{one['from']:,}–{one['to']:,}"


def files(contents: Contents) -> Html:
    """Every file of the folder."""
    rows = [
        (
            code(one["name"]),
            size(one["bytes"]) if one["bytes"] is not None else "",
            join([
                tag("span", foreign(one["problem"]), class_="bad") if one["problem"] else foreign(one["what"]),
                tag("span", "opened with ", code(one["opened_with"]), class_="with") if one["opened_with"] else None,
            ]),
            code(one["sha256"]) if one["sha256"] else "",
        )
        for one in contents["files"]
    ]  # fmt: skip
    text = (
        "Sizes as they are, SHA-256 as in `manifest.json`; the command `verify` compares them. The report's own two "
        "files and the manifest are not listed: they are written after it. Where nothing is said of how to open a "
        "file, it is text."
    )
    headings = ("file", "size", "what it is", "SHA-256")
    listing = table("Files of the run", headings, rows, (1,), is_titled=False, class_="files")
    return section("files", "Files", paragraph(prose(text), class_="aside"), listing)


def notes(contents: Contents) -> Html:
    """The person's own words."""
    said = contents["notes"]
    none = paragraph(
        "There are none. What is written to ", code("notes.md"), " in the run's folder is shown here.", class_="aside"
    )
    return section("notes", "Notes", tag("div", set_notes(said), class_="notes") if said.strip() else none)


def mirror(contents: Contents) -> Html:
    """How the mirror on Weights & Biases stands."""
    said = contents["wandb"]
    if not said:
        return section("wandb", "Weights & Biases", paragraph("This run has no mirror.", class_="aside"))
    url = said.get("url")
    order = (
        "state",
        "mode",
        "reason",
        "message",
        "entity",
        "project",
        "id",
        "rows_sent",
        "last_update",
        "sync_command",
    )
    shown: list[tuple[str, Html | None]] = [("link", link_or_text(url) if isinstance(url, str) and url else None)]
    for key in order:
        value = said.get(key)
        if value not in (None, ""):
            shown.append((key.replace("_", " "), code(str(value)) if key == "sync_command" else foreign(str(value))))
    return section("wandb", "Weights & Biases", facts(shown))


def again(contents: Contents) -> Html:
    """The commands, as they are typed."""
    steps = [
        tag("div", tag("dt", word), tag("dd", tag("pre", code(command), tabindex=0)))
        for word, command in contents["again"].items()
    ]
    text = (
        "Typed in the folder labs/training of the lab's repository, with its environment; the run lies in .runs there."
    )
    return section("again", "Run it again", paragraph(text, class_="aside"), tag("dl", *steps, class_="commands"))
