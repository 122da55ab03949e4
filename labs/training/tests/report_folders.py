"""Complete run folders without a training: written to the record's schema, with figures that follow from each other.

Everything comes from formulas and a seeded generator, so that a folder is the same each time.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report_facts import (
    GIB,
    GPU,
    NOTES,
    SOURCE,
    data_manifest,
    data_stats,
    describe_model,
    describe_process,
    memory,
    memory_events,
    parts_s,
    timeline,
)

from training_lab import record, wall_clock
from training_lab.gpus import find_gpu
from training_lab.identity import sha256_of_bytes
from training_lab.measurement import measured_rows, milestones, throughput
from training_lab.record import RunFolder
from training_lab.resolve import Resolved, resolve_config
from training_lab.tracking import Row
from training_lab.utilisation import peak_of, utilisation

HOSTILE = (
    "</script><script>window.ran=1</script><img src=x onerror=window.ran=2>&amp;\"'`${window.ran=3}\u202egnp.exe\u2028"
    "\x1b[31m\x00{{7*7}} javascript:window.ran=4"
)
"""What a text in a folder may be, at its worst."""
NAMED = ("packages", "variables", "untracked_files", "rejected", "leaks", "scopes", "formulas")
"""Objects whose keys are no words of the lab."""


@dataclass(frozen=True)
class Recipe:
    """What a folder is to be like."""

    name: str
    updates: int = 60
    planned: int = 60
    state: str = "finished"
    is_gpu: bool = False
    resumed_after: tuple[int, ...] = ()
    """Updates from which another process went on; it trained the two before it was killed once more."""
    is_older: bool = False
    """Without what an earlier version did not record."""

    @property
    def resolved(self) -> Resolved:
        """The config: `corrected` on a GPU, else `profile`."""
        overrides = [f"train.updates={self.planned}", f"eval.every={max(1, self.planned // 6)}"]
        overrides += [f"checkpoint.every={max(1, self.planned // 3)}", "measure.warmup_updates=10"]
        overrides += ["measure.timeline_from=21", f"measure.memory_update={min(40, self.planned)}"]
        return resolve_config("corrected" if self.is_gpu else "profile", overrides)


def write_run(recipe: Recipe, runs_dir: str = ".runs") -> RunFolder:
    """Writes the folder and, if the run was closed, its manifest."""
    folder = RunFolder(Path(runs_dir) / recipe.name)
    (folder.path / record.CHECKPOINTS).mkdir(parents=True)
    lines = list(all_rows(recipe))
    rows = [row for row in lines if not row.pop("is_superseded", False)]
    folder.file(record.METRICS).write_text("".join(json.dumps(row) + "\n" for row in lines), "utf-8")
    folder.write_json(record.CONFIG, {**recipe.resolved.record(), "model": describe_model(recipe.is_gpu)})
    folder.write_json(record.SOURCE, SOURCE)
    processes = [describe_process(recipe.is_gpu, segment) for segment in range(1, len(recipe.resumed_after) + 2)]
    folder.write_json(record.ENVIRONMENT, {"processes": processes})
    folder.write_json(record.DATA_MANIFEST, data_manifest())
    folder.write_json(record.DATA_STATS, data_stats(recipe.is_gpu))
    is_closed = recipe.state not in ("killed", "running")
    folder.write_json(record.SUMMARY, summary(recipe, rows if is_closed else []))
    if not recipe.is_older and recipe.updates >= 40:
        folder.write_json(record.MEMORY_EVENTS, memory_events(recipe.is_gpu))
        folder.file(record.TIMELINE).write_text('{"traceEvents": []}', "utf-8")
        if recipe.is_gpu:
            folder.file(record.MEMORY_SNAPSHOT).write_bytes(b"\x80\x04.")
    write_mirrors(folder, recipe)
    for update in (row["update"] for row in rows if row.get("event") == "checkpoint"):
        place = folder.file(f"{record.CHECKPOINTS}/update-{update:06d}")
        place.mkdir(exist_ok=True)
        (place / "state.pt").write_bytes(b"weights")
    if is_closed:
        folder.write_manifest()
    return folder


def write_mirrors(folder: RunFolder, recipe: Recipe) -> None:
    """What a person and Weights & Biases have of the run."""
    if recipe.is_older:
        return
    folder.file(record.NOTES).write_text(NOTES, "utf-8")
    mirror = {
        "mode": "online", "reason": "there is a key", "state": "complete", "id": "abc123", "entity": "lab",
        "project": "llm-training-lab", "url": "https://wandb.ai/lab/llm-training-lab/runs/abc123",
        "rows_sent": recipe.updates, "last_update": recipe.updates, "message": "", "sync_command": "",
    }  # fmt: skip
    folder.write_json(record.WANDB, mirror)


# --- what happened ---


def all_rows(recipe: Recipe) -> Iterator[Row]:
    """The lines of the metrics; those that a resume supersedes are marked `is_superseded`."""
    chance, segment, line = random.Random(7), 1, 0
    every, saved = max(1, recipe.planned // 6), max(1, recipe.planned // 3)
    line_of_state = 0
    opening: list[Row] = [event("start", segment=1, utc="2026-12-01T10:00:00+00:00")]
    opening.append(
        {"kind": "evaluation", "update": 0, "val_loss": initial_loss(recipe), "target_tokens": 131072, "seconds": 2.5}
    )
    for row in opening:
        line += 1
        yield row
    for update in range(1, recipe.updates + 1):
        for row in rows_of_update(recipe, update, segment, chance, every, saved):
            line += 1
            yield row
        line_of_state = line
        if update in recipe.resumed_after:
            for lost in (update + 1, update + 2):
                line += 1
                yield {**update_row(recipe, lost, segment, chance), "is_superseded": True}
            segment += 1
            line += 1
            facts = {"segment": segment, "from_update": update, "supersedes_from_line": line_of_state}
            yield event("resume", **facts, utc="2026-12-01T11:00:00+00:00")
    if recipe.state.startswith("failed"):
        yield event("failure", state=recipe.state, message=failure_of(recipe)["message"])
    if recipe.state not in ("killed", "running") and not recipe.is_older:
        clock = {"segment": segment, "elapsed_s": 95.0, "wall_clock": parts_s()}
        yield event("end", utc="2026-12-01T12:00:00+00:00", **clock)


def rows_of_update(
    recipe: Recipe, update: int, segment: int, chance: random.Random, every: int, saved: int
) -> Iterator[Row]:
    """An update and what follows on it."""
    yield update_row(recipe, update, segment, chance)
    if update % every == 0 or update == recipe.updates:
        loss = val_loss(recipe, update)
        yield {"kind": "evaluation", "update": update, "val_loss": loss, "target_tokens": 131072, "seconds": 2.1}
    if update % saved == 0:
        yield event("checkpoint", update=update, path=f"checkpoints/update-{update:06d}", seconds=1.25)
    if update == 22 and not recipe.is_older:
        yield event("timeline", update=22, path=record.TIMELINE, seconds=3.5, summary=timeline(recipe.is_gpu))


def event(name: str, **facts: Any) -> Row:
    return {"kind": "event", "event": name, **facts}


def update_row(recipe: Recipe, update: int, segment: int, chance: random.Random) -> Row:
    """What an update leaves behind: slow at first, slower while it is observed."""
    first = update == 1 or update - 1 in recipe.resumed_after
    observed = {20: "timeline warm-up", 21: "timeline", 22: "timeline", 40: "memory"}.get(update)
    tokens = 142_500 + chance.randrange(500) if recipe.is_gpu else 8_100 + chance.randrange(60)
    seconds = (0.64 if recipe.is_gpu else 1.3) * (1 + 0.03 * chance.random())
    row: Row = {
        "kind": "update",
        "update": update,
        "loss": val_loss(recipe, update) + 0.12 * chance.gauss(0, 1) - 0.05,
        "lr": 6e-4 * min(update / 10, 0.55 + 0.45 * math.cos(math.pi * update / max(recipe.planned, 10))),
        "grad_norm": 0.6 + 5 * math.exp(-update / 8) + 0.15 * chance.random(),
        "target_tokens": tokens,
        "input_tokens": tokens + 860,
        "seconds": seconds * (9 if first else 1.4 if observed else 1),
        "batch_sha256": sha256_of_bytes(str(update).encode()),
        "segment": segment,
    }
    if recipe.is_older:
        return row
    memory = 47.88 * GIB if recipe.is_gpu else 1.1 * GIB + 30e6 * chance.random()
    row |= {"sum_of_squared_lengths": tokens * 1612, "memory_bytes": int(memory)}
    return {**row, "observed": observed} if observed else row


def initial_loss(recipe: Recipe) -> float:
    return 10.9817 if recipe.is_gpu else 5.5231


def val_loss(recipe: Recipe, update: int) -> float:
    """A loss that falls as losses do."""
    floor = 4.6 if recipe.is_gpu else 2.4
    return floor + (initial_loss(recipe) - floor) * float((1 + update / 6) ** -0.62)


# --- what the record says of it ---


def summary(recipe: Recipe, rows: list[Row]) -> dict[str, Any]:
    """The summary of these rows; of no rows, it is that of a run that has just begun."""
    updates = [row for row in rows if row["kind"] == "update"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    config, compute = recipe.resolved.config, "bf16" if recipe.is_gpu else "fp32"
    losses = [row["val_loss"] for row in evaluations]
    state = "running" if recipe.state == "killed" else recipe.state
    warmup = config.measure.warmup_updates
    said: dict[str, Any] = {
        "state": state,
        **({"failure": failure_of(recipe)} if state.startswith("failed") else {}),
        "updates": len(updates),
        "planned_updates": recipe.planned,
        "target_tokens": sum(row["target_tokens"] for row in updates),
        "loss": {
            "definition": "mean cross-entropy over the target tokens of an update, in nats",
            "first": updates[0]["loss"] if updates else None,
            "last": updates[-1]["loss"] if updates else None,
        },
        "val_loss": {
            "definition": "mean cross-entropy over the target tokens of the fixed validation set, in nats",
            "validation_identity": "5" * 64,
            "first": losses[0] if losses else None,
            "last": losses[-1] if losses else None,
            "best": min(losses, default=None),
            "best_update": min(evaluations, key=lambda row: row["val_loss"])["update"] if evaluations else None,
        },
        "initial_loss": {
            "expected": 10.9785 if recipe.is_gpu else 5.5964,
            "measured": losses[0] if losses else None,
            "is_plausible": True if losses else None,
        },
        "milestones": milestones(updates, evaluations),
        "throughput": throughput(updates, warmup),
        "last_process": {
            "segment": 1,
            "elapsed_s": 95.0,
            "peak_memory": {"bytes": 1_231_794_176, "definition": "peak"},
        },
        "weights_sha256": "7" * 64,
        "checkpoints": [row["update"] for row in rows if row.get("event") == "checkpoint"],
    }
    if recipe.is_older:
        return said
    peak = peak_of("cuda:0" if recipe.is_gpu else "cpu", compute, GPU if recipe.is_gpu else None, config.measure)
    probe = (
        {"tflops": 731.5, "dtype": compute, "shape": [143_360, 768, 3072], "seconds": 1.0} if recipe.is_gpu else None
    )
    measured = measured_rows(updates, warmup)
    vocabulary = 50_257 if recipe.is_gpu else 256
    end = {"segment": len(recipe.resumed_after) + 1, "elapsed_s": 95.0, "parts": parts_s()}
    return said | {
        "utilisation": utilisation(config.model, vocabulary, measured, peak, compute, probe),
        "memory": memory(recipe.is_gpu),
        "wall_clock": {"definition": wall_clock.DEFINITION, "processes": [end]},
        "timeline": timeline(recipe.is_gpu) if len(updates) >= 22 else None,
    }


def failure_of(recipe: Recipe) -> dict[str, Any]:
    """Why the run failed, if it did."""
    message = "update 31: the loss is not finite; lower optimizer.max_lr"
    return (
        {"message": message, "traceback": "Traceback (most recent call last):\n  …"}
        if recipe.state.startswith("failed")
        else {}
    )


# --- the folders ---


def finished() -> RunFolder:
    return write_run(Recipe("cpu-20261201-100000-aaaa"))


def on_gpu() -> RunFolder:
    assert find_gpu(GPU)
    return write_run(Recipe("gpu-20261201-100000-bbbb", updates=100, planned=100, is_gpu=True))


def resumed() -> RunFolder:
    return write_run(Recipe("resumed-20261201-100000-cccc", resumed_after=(20, 45)))


def failed() -> RunFolder:
    return write_run(Recipe("failed-20261201-100000-dddd", updates=30, state="failed: non-finite"))


def interrupted() -> RunFolder:
    return write_run(Recipe("interrupted-20261201-100000-eeee", updates=42, state="interrupted"))


def killed() -> RunFolder:
    """Killed in the middle of a line."""
    folder = write_run(Recipe("killed-20261201-100000-ffff", updates=33, state="killed"))
    with open(folder.file(record.METRICS), "a", encoding="utf-8") as file:
        file.write('{"kind": "update", "upda')
    return folder


def damaged() -> RunFolder:
    """A summary cut short, a line of the metrics overwritten, a file of another size."""
    folder = write_run(Recipe("damaged-20261201-100000-abcd"))
    text = folder.file(record.SUMMARY).read_text("utf-8")
    folder.file(record.SUMMARY).write_text(text[: len(text) // 2], "utf-8")
    lines = folder.file(record.METRICS).read_text("utf-8").split("\n")
    folder.file(record.METRICS).write_text("\n".join([*lines[:9], "\x00\x00", *lines[10:]]), "utf-8")
    folder.file(record.TIMELINE).write_text("{", "utf-8")
    return folder


def older() -> RunFolder:
    return write_run(Recipe("older-20261201-100000-9999", is_older=True))


def hostile() -> RunFolder:
    """Every text of the folder that somebody could have written is as bad as it can be."""
    folder = write_run(Recipe("hostile-20261201-100000-6666", is_gpu=True))
    for name in (record.CONFIG, record.SOURCE, record.ENVIRONMENT, record.DATA_MANIFEST, record.DATA_STATS,
                 record.SUMMARY, record.MEMORY_EVENTS, record.WANDB):  # fmt: skip
        value = folder.read_json(name)
        folder.file(name).write_text(json.dumps(poisoned(value, ("state",))), "utf-8")
    lines = folder.file(record.METRICS).read_text("utf-8").splitlines()
    rows = [poisoned(json.loads(line), ("kind", "event")) for line in lines]
    folder.file(record.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    mirror = {"mode": "online", "state": "complete", "url": f"javascript:alert(1)//{HOSTILE}", "id": HOSTILE}
    folder.file(record.WANDB).write_text(json.dumps(mirror), "utf-8")
    folder.file(record.NOTES).write_text(
        f"# {HOSTILE}\n\n- {HOSTILE}\n\n{HOSTILE}\n[x](javascript:alert(1))\n", "utf-8"
    )
    folder.file("<img src=x onerror=window.ran=5>\u202e.txt").write_text(HOSTILE, "utf-8")
    folder.write_manifest()
    return folder


def poisoned(value: Any, kept: tuple[str, ...], is_named: bool = False) -> Any:
    """A value with every text in it replaced, but for that under some keys; and its keys if they are anybody's."""
    if isinstance(value, dict):
        return {
            f"{HOSTILE}{number}" if is_named else key: one if key in kept else poisoned(one, kept, key in NAMED)
            for number, (key, one) in enumerate(value.items())
        }
    if isinstance(value, list):
        return [poisoned(one, kept) for one in value]
    return HOSTILE if isinstance(value, str) else value


def long() -> RunFolder:
    """Ten thousand updates, resumed three times."""
    recipe = Recipe(
        "long-20261201-100000-0000", updates=10_000, planned=10_000, is_gpu=True, resumed_after=(2500, 5000, 7500)
    )
    return write_run(recipe)


STATES: dict[str, Callable[[], RunFolder]] = {
    "finished": finished, "gpu": on_gpu, "resumed": resumed, "failed": failed, "interrupted": interrupted,
    "killed": killed, "damaged": damaged, "older": older, "hostile": hostile,
}  # fmt: skip
"""A folder of each kind, but for the long one, which takes a second to write."""
