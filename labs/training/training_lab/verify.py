"""Is a run's folder still what was written, and does it still come out the same?

Three checks, each stronger than the one before: every file has its hash; batches, built again from the data, have
the hashes that their updates recorded; and (`--replay N`) N updates, trained again from a checkpoint, give the same
losses, norms and weights, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from training_lab import record
from training_lab.beginning import take_first_weights
from training_lab.checkpoint import list_checkpoints, weights_sha256
from training_lab.data.dataset import Dataset, differences, prepare_dataset
from training_lab.engine import compile_trainer, train_update
from training_lab.errors import LabError, UserError
from training_lab.footprint import share_out
from training_lab.precision import choose_hardware
from training_lab.provenance import changed_files, describe_source
from training_lab.record import Finding, RunFolder
from training_lab.restored import recorded_config
from training_lab.tracking import Row, read_metrics, rows_of_kind
from training_lab.trainer import make_trainer

REPLAYED = ("batch_sha256", "lr", "loss", "grad_norm", "target_tokens")


def verify_run(folder: RunFolder, batches: list[int], replay: int, start: int | None) -> Iterator[Finding]:
    """Checks the files, then the batches of some updates (default: first, middle, last), then replays."""
    yield from folder.verify_manifest()
    for checkpoint in list_checkpoints(folder.file(record.CHECKPOINTS)):
        try:
            checkpoint.verify()
        except LabError as error:
            yield Finding(f"checkpoint {checkpoint.update}", False, str(error))
        else:
            yield Finding(f"checkpoint {checkpoint.update}", True, "as it was written")
    try:
        rows = {row["update"]: row for row in rows_of_kind(read_metrics(folder.file(record.METRICS)), "update")}
        yield verify_rows(folder, rows)
        recorded_data = folder.read_json(record.DATA_MANIFEST, identity=str, source=dict)
        dataset = prepare_dataset(recorded_config(folder).config)
        if dataset.manifest["identity"] != recorded_data["identity"]:
            found = what_differs(recorded_data, dataset.manifest)
            yield Finding("data", False, f"cannot be built again as they were: {found}")
            return
    except LabError as error:
        yield Finding("data", False, str(error))
        return
    yield Finding("data", True, f"built again: identity {recorded_data['identity'][:12]}…")
    yield from verify_batches(dataset, rows, batches)
    if replay:
        yield from replay_updates(folder, dataset, rows, replay, start)


def what_differs(recorded: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two data manifests, in words; the recorded one may be damaged."""
    try:
        return "; ".join(differences(recorded, now)) or "the same files are used otherwise"
    except (KeyError, TypeError, AttributeError):
        return f"and {record.DATA_MANIFEST} is damaged, so it cannot say what differs"


def verify_rows(folder: RunFolder, rows: dict[int, Row]) -> Finding:
    """Whether the metrics have a row for every update that the summary speaks of."""
    done = folder.read_json(record.SUMMARY, updates=int)["updates"]
    missing = sorted(set(range(1, done + 1)) - rows.keys())
    if missing:
        return Finding(
            "updates", False, f"{len(missing)} of {done} have no row in {record.METRICS}, first {missing[0]}"
        )
    return Finding("updates", True, f"a row for each of {done}")


def verify_batches(dataset: Dataset, rows: dict[int, Row], batches: list[int]) -> Iterator[Finding]:
    """Builds the batches of some updates again and compares their hashes."""
    updates = sorted(rows)
    chosen = batches or sorted({updates[0], updates[len(updates) // 2], updates[-1]} if updates else set())
    for update in chosen:
        if update not in rows:
            raise UserError(f"--batch {update}: the run has no such update; it has 1 to {max(rows, default=0)}")
        seen, now = str(rows[update].get("batch_sha256")), dataset.update_data(update).sha256
        message = f"SHA-256 {now[:12]}…" if now == seen else f"SHA-256 is {now[:12]}…, was {seen[:12]}…"
        yield Finding(f"batch of update {update}", now == seen, message)


def replay_updates(
    folder: RunFolder, dataset: Dataset, rows: dict[int, Row], replay: int, start: int | None
) -> Iterator[Finding]:
    """Trains `replay` updates again, from the beginning or from a checkpoint, and compares each with its row."""
    config = recorded_config(folder).config
    checkpoints = {0: None, **{c.update: c for c in reversed(list_checkpoints(folder.file(record.CHECKPOINTS)))}}
    last = max(rows, default=0)
    possible = [update for update in checkpoints if update + replay <= last]
    if not possible or (start is not None and start not in possible):
        kept = ", ".join(map(str, checkpoints))
        wanted = f"--replay {replay}" + ("" if start is None else f" --from {start}")
        raise UserError(f"{wanted}: the run has {last} updates, and can be replayed from update {kept}")
    changes = changed_files(folder.read_json(record.SOURCE, files=dict), describe_source())
    if changes:
        yield Finding("source", False, f"not the code that ran: {', '.join(changes[:5])}")
    hardware = choose_hardware(config)
    first = max(possible) if start is None else start
    processes = folder.read_json(record.ENVIRONMENT, processes=list)["processes"]
    segment = rows[first + 1].get("segment")
    recorded = next((p for p in processes if isinstance(p, dict) and p.get("segment") == segment), {})
    world_size = recorded.get("world_size", 1)
    config = share_out(config, world_size)  # the micro-batches that they had between them
    if world_size > 2:
        message = f"{world_size} processes added up the gradients in another order than one: the last digits differ"
        yield Finding("processes", False, message)
    trainer = make_trainer(config, hardware, dataclasses.replace(dataset, config=config))
    checkpoint = checkpoints[first]
    if checkpoint is None:
        take_first_weights(trainer, folder.path.parent)
    else:
        checkpoint.verify()
        trainer.restore(checkpoint.load())
    compiled = compile_trainer(trainer, lambda message: None)  # what failed is among the findings
    for name, now in {**hardware.describe(), **trainer.kernels.describe(), **compiled}.items():
        if recorded.get(name) != now:
            yield Finding("environment", False, f"{name} is {now}, was {recorded.get(name)}")
    for update in range(first + 1, first + replay + 1):
        again = train_update(trainer)
        before = rows[update]
        parts = [
            f"{key} is {again[key]!r}, was {before.get(key)!r}" for key in REPLAYED if again[key] != before.get(key)
        ]
        yield Finding(
            f"replayed update {update}", not parts, "; ".join(parts) or f"loss {again['loss']!r}, the same bits"
        )
    end = checkpoints.get(first + replay)
    if end is not None:
        was, now = end.describe()["weights_sha256"], weights_sha256(trainer.model)
        yield Finding(
            f"weights after update {end.update}",
            was == now,
            f"{now[:12]}…" + ("" if was == now else f", were {was[:12]}…"),
        )
