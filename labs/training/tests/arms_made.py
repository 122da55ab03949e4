"""Runs to compare, without a training: folders that are alike, and what is changed in one of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from report_folders import Recipe, write_run

from training_lab import record
from training_lab.identity import sha256_of_bytes
from training_lab.record import RunFolder


def make_run(name: str, seed: int = 1, lr: float = 6e-4, shift: float = 0.0, **recipe: Any) -> RunFolder:
    """A run of a seed. `shift` is added to every validation loss but the first."""
    folder = write_run(Recipe(name, **recipe))
    change(folder, record.CONFIG, "values train seed", seed)
    change(folder, record.CONFIG, "values data order_seed", seed)
    change(folder, record.CONFIG, "values optimizer max_lr", lr)
    change(folder, record.CONFIG, "origins optimizer.max_lr", "--set")
    change(folder, record.CONFIG, "model initial_weights_sha256", sha256_of_bytes(f"weights {seed}".encode()))
    change(folder, record.DATA_MANIFEST, "cache", {"identity": "c" * 64})
    change(folder, record.DATA_MANIFEST, "plan identity", sha256_of_bytes(f"plan {seed}".encode()))
    rows = [json.loads(line) for line in folder.file(record.METRICS).read_text("utf-8").splitlines()]
    for row in rows:
        if row["kind"] == "evaluation" and row["update"]:
            row["val_loss"] += shift
    folder.file(record.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    close(folder)
    return folder


def make_arm(
    name: str, losses: Sequence[float], lr: float, seeds: Sequence[int] | None = None, **recipe: Any
) -> list[RunFolder]:
    """Repetitions of one config whose last validation losses differ from the usual one by what is given."""
    seeds = seeds or range(1, len(losses) + 1)
    return [make_run(f"{name}-{s}", s, lr, shift, **recipe) for s, shift in zip(seeds, losses, strict=True)]


def noise(count: int, spread: float, seed: int) -> list[float]:
    """Shifts like those of other seeds."""
    chance = random.Random(seed)
    return [chance.gauss(0, spread) for _ in range(count)]


def change(folder: RunFolder, file: str, path: str, value: Any) -> None:
    """Sets one value of a JSON file of the folder, by its path, keys with spaces between them; `None` takes it out."""
    said = json.loads(folder.file(file).read_text("utf-8"))
    place = said
    *way, last = path.split()
    for key in way:
        place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
    if value is None:
        place.pop(last)
    else:
        place[last] = value
    folder.write_json(file, said)


def close(folder: RunFolder) -> None:
    """Makes the folder whole again after a change."""
    folder.write_manifest()
