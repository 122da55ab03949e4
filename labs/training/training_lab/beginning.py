"""The folder of a run before the first update of a process: which one it is, whether this code and data may go on with
it, and what is written there first."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from experiment_runner.durable import write_atomically
from training_lab import record
from training_lab.checkpoint import Checkpoint, set_aside_damaged
from training_lab.console import Console
from training_lab.data.dataset import differences
from training_lab.errors import LabError, UserError
from training_lab.model import count_parameters
from training_lab.optim import describe_groups
from training_lab.provenance import changed_files, pack_source
from training_lab.record import RunFolder
from training_lab.resolve import Resolved
from training_lab.restored import choose_checkpoint
from training_lab.tracking import count_lines, read_metrics, rows_of_kind
from training_lab.trainer import Trainer


def take_first_weights(trainer: Trainer, runs_dir: Path) -> None:
    """Takes the weights of the run that `train.init_from` names, of its newest state that verifies."""
    text, processes = trainer.config.train.init_from, trainer.processes
    if text:
        found = None
        if processes.is_first:
            checkpoint, _ = choose_checkpoint(record.find_run(runs_dir, text), None)
            found = checkpoint.load()["model"]
        trainer.start_from(processes.share_state(found))


def check_same_beginning(folder: RunFolder, initial_sha256: str) -> None:
    """Refuses to begin a run again, which was killed before its first checkpoint, from other weights than it did."""
    recorded = folder.read_json(record.CONFIG, model=dict)["model"].get("initial_weights_sha256")
    if recorded != initial_sha256:
        raise UserError(
            f"{folder.path}: began with other weights (SHA-256 {str(recorded)[:12]}…, now {initial_sha256[:12]}…): the "
            "run of train.init_from has gone on since, or torch draws other numbers; start afresh with --new"
        )


def find_unfinished(
    resolved: Resolved, runs_dir: Path, source: dict[str, Any], run_id: str | None = None
) -> RunFolder | None:
    """The newest run of this config, or of it the one with this id, if it is unfinished. Raises an error rather than
    mixing code, or passing over a folder that may be the one."""
    for folder in record.list_runs(runs_dir):
        if run_id not in (None, folder.run_id):
            continue
        try:
            identity = folder.read_json(record.CONFIG, identity=str)["identity"]
        except LabError as error:
            if not folder.run_id.startswith(f"{resolved.name}-"):
                continue
            raise LabError(f"{error}; it may be the run to go on with: mend or remove it, or use --new") from error
        if identity != resolved.identity:
            continue
        state = folder.state()
        if is_finished(folder, resolved.config.train.updates):
            return None
        if state == "running":
            raise UserError(
                f"{folder.path}: this config is being trained there now; wait for it, or start another with --new"
            )
        changes = changed_files(folder.read_json(record.SOURCE, files=dict), source)
        if changes:
            raise UserError(
                f"{folder.path}: is unfinished, but was trained by other code: {', '.join(changes[:5])}"
                f"{', …' if len(changes) > 5 else ''}; start afresh with --new, or go back to its code to continue it"
            )
        return folder
    return None


def is_finished(folder: RunFolder, updates: int) -> bool:
    """Whether a run has made all of its updates, of which it may have been given more."""
    return folder.state() == "finished" and folder.read_json(record.SUMMARY, updates=int)["updates"] >= updates


def check_same_data(folder: RunFolder, manifest: dict[str, Any]) -> None:
    """Refuses to continue on other data, and says what differs."""
    before = folder.read_json(record.DATA_MANIFEST, identity=str, source=dict)
    if before["identity"] != manifest["identity"]:
        found = "; ".join(differences(before, manifest)) or "the files are the same, their use differs"
        raise UserError(
            f"{folder.path}: its data have changed since: {found}; restore them, or start afresh with --new"
        )


def restore(trainer: Trainer, checkpoint: Checkpoint | None) -> None:
    """Brings the trainer to the checkpoint, which only the first process has."""
    state = trainer.processes.share_state(checkpoint.load() if checkpoint else None)
    trainer.restore(state, with_optimizer=trainer.config.checkpoint.restore == "all")


def first_superseded(folder: RunFolder, checkpoint: Checkpoint | None) -> int:
    """The first line of the metrics that going on from a checkpoint supersedes (None: the run was killed before its
    first one). Sets aside what is newer. Raises LabError if rows before it are lost."""
    set_aside_damaged(folder.file(record.CHECKPOINTS), checkpoint)
    if checkpoint is None:
        return 0
    rows = rows_of_kind(read_metrics(folder.file(record.METRICS)), "update")
    lost = sorted(set(range(1, checkpoint.update + 1)) - {row["update"] for row in rows})
    first_line: int = checkpoint.describe()["metrics_lines"]
    if lost or count_lines(folder.file(record.METRICS)) < first_line:
        first_lost = lost[0] if lost else checkpoint.update
        raise LabError(
            f"{folder.file(record.METRICS)}: rows are lost, among them update {first_lost}: the record would have "
            "a gap; start afresh with --new"
        )
    return first_line


def write_beginning(
    folder: RunFolder, resolved: Resolved, source: dict[str, Any], trainer: Trainer, stats: dict[str, Any],
    initial_sha256: str,
) -> None:  # fmt: skip
    """Writes what is known before the first update; the config last, because with it the folder is a run."""
    folder.write_json(record.SOURCE, source)
    write_atomically(folder.file(record.SOURCE_ARCHIVE), pack_source())
    folder.write_json(record.DATA_MANIFEST, trainer.dataset.manifest)
    folder.write_json(record.DATA_STATS, stats)
    notes = f"# {folder.run_id}\n\n## Question\n\n{resolved.config.purpose}\n\n## Expected\n\n\n## Seen\n\n"
    write_atomically(folder.file(record.NOTES), notes.encode("utf-8"))
    model = {
        "parameters": count_parameters(trainer.model),
        "optimizer_groups": describe_groups(trainer.model, trainer.config.optimizer),
        "initial_weights_sha256": initial_sha256,
    }
    folder.write_json(record.CONFIG, {**resolved.record(), "model": model, "uid": secrets.token_hex(8)})


def record_environment(folder: RunFolder, environment: dict[str, Any], console: Console) -> None:
    """Adds what this process runs in and on, and says where it differs from the process before it."""
    known: list[Any] = []
    if folder.file(record.ENVIRONMENT).exists():
        known = folder.read_json(record.ENVIRONMENT, processes=list)["processes"]
    before = known[-1] if known and isinstance(known[-1], dict) else environment
    changed = sorted(key for key in {*before, *environment} - {"segment"} if before.get(key) != environment.get(key))
    if changed:
        console.warn(
            f"this process differs from the last in {', '.join(changed)} (see {record.ENVIRONMENT}): "
            "the run may not be bit-identical to one that was never stopped"
        )
    folder.write_json(record.ENVIRONMENT, {"processes": [*known, environment]})
