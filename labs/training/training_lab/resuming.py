"""`train --resume`: going on with a run that is named, perhaps with settings that cannot spoil it, perhaps from a copy.

A run's config may be changed only where that changes nothing of what was trained already: more updates, and what is
observed, saved and mirrored. Whatever else differs is another experiment, and a run of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_lab import record
from training_lab.checkpoint import list_checkpoints
from training_lab.config import Config, values_of
from training_lab.console import Console
from training_lab.errors import UserError
from training_lab.fetching import fetch_copy
from training_lab.record import RunFolder, find_run
from training_lab.resolve import Resolved, flatten, resolve_config
from training_lab.restored import recorded_config

HARMLESS = (
    "measure.",
    "tracking.",
    "remote.",
    "checkpoint.",
    "eval.every",
    "train.parallel",
    "data.cache_dir",
    "purpose",
)
"""Settings, or with a dot at the end sections, that change nothing of what is trained."""
HARMFUL = ("checkpoint.restore",)
CHANGES = "changes"
"""The key of config.json under which they are listed."""


def resume(text: str, overrides: Sequence[str], runs_dir: Path, console: Console) -> RunFolder:
    """The folder of the run to go on with, its config changed as `overrides` say. `text` is what `find_run` takes, or
    the address of a copy, which is fetched. Raises UserError for a change that would make it another experiment."""
    if "://" in text:
        with console.preparing(f"Fetching {text}") as progress:
            folder = fetch_copy(text, runs_dir, progress)
    else:
        folder = find_run(runs_dir, text)
    before = recorded_config(folder)
    after = changed_config(folder, overrides)
    with folder.lock():
        change(folder, before, after, console)
    return folder


def changed_config(folder: RunFolder, overrides: Sequence[str]) -> Resolved:
    """The recorded config with changes."""
    return resolve_config(str(folder.file(record.CONFIG)), overrides)


def change(folder: RunFolder, before: Resolved, after: Resolved, console: Console) -> None:
    """Lists what differs, and records it. Raises UserError if that is not harmless."""
    differences = differing(before.config, after.config)
    listed = [f"{key}: {old} → {new}" for key, (old, new) in differences.items()]
    saved = [checkpoint.update for checkpoint in list_checkpoints(folder.file(record.CHECKPOINTS))]
    done = max([*saved, int(folder.read_json(record.SUMMARY, updates=int)["updates"])])  # a killed run's summary is old
    harmful = [line for key, line in zip(differences, listed, strict=True) if not is_harmless(key)]
    if harmful:
        raise UserError(
            f"{folder.path}: cannot go on with {'; '.join(harmful)}: that would be another experiment; train it from "
            "its beginning, or from this run's weights with --set train.init_from=" + str(folder.path)
        )
    updates = after.config.train.updates
    if updates < done or (updates == done and folder.state() == "finished"):
        raise UserError(
            f"{folder.path}: has {done} updates; to go on with it, give more with --set train.updates={2 * done}"
        )
    for line in listed:
        console.note(f"changed: {line}")
    if "train.updates" in differences and after.config.schedule.name != "constant":
        console.warn(
            f"the learning rate of schedule {after.config.schedule.name} depends on train.updates: from here on it is "
            "that of the longer run, so that this is no longer a run that was planned so from its beginning"
        )
    if differences:
        content = folder.read_json(record.CONFIG)
        known: list[Any] = content.get(CHANGES, [])
        changes = {key: list(pair) for key, pair in differences.items()}
        new = {**content, **after.record(), CHANGES: [*known, {"after_update": done, "settings": changes}]}
        folder.write_json(record.CONFIG, new)


def differing(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, with both values."""
    old, new = (flatten(values_of(config), "config") for config in (before, after))
    return {key: (old[key], new[key]) for key in old if old[key] != new[key]}


def is_harmless(key: str) -> bool:
    """Whether a change of a setting leaves what was trained as it would have been."""
    if key in HARMFUL:
        return False
    return key == "train.updates" or any(key == one or (one[-1] == "." and key.startswith(one)) for one in HARMLESS)
