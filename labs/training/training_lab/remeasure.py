"""The command `eval`: a checkpoint's validation loss, measured again and compared with the record."""

from __future__ import annotations

from typing import Any

from training_lab import record
from training_lab.data.dataset import prepare_dataset
from training_lab.errors import UserError
from training_lab.evaluate import evaluate
from training_lab.loss import make_head_loss
from training_lab.memory import advice_when_out_of_memory
from training_lab.parallel import SummedLoss
from training_lab.record import RunFolder
from training_lab.restored import restore_model
from training_lab.tracking import read_metrics, rows_of_kind


def evaluate_run(folder: RunFolder, update: int | None) -> dict[str, Any]:
    """Measures a checkpoint again, and compares with what the run recorded. Raises UserError if the data changed."""
    restored = restore_model(folder, update)
    dataset = prepare_dataset(restored.resolved.config)
    recorded_data = folder.read_json(record.DATA_MANIFEST, validation=dict)["validation"].get("identity", "unknown")
    if dataset.validation.identity != recorded_data:
        raise UserError(
            f"{folder.path}: its validation set cannot be built again: identity {dataset.validation.identity[:12]}…, "
            f"was {recorded_data[:12]}…; `verify` names what changed"
        )
    config = restored.resolved.config
    with advice_when_out_of_memory(config):
        whole = SummedLoss(restored.model, make_head_loss(restored.kernels.loss))
        result = evaluate(whole, dataset.validation, restored.hardware, config.eval.batch_tokens)
    update = restored.checkpoint.update
    evaluations = rows_of_kind(read_metrics(folder.file(record.METRICS)), "evaluation")
    recorded = next((row["val_loss"] for row in evaluations if row["update"] == update), None)
    if recorded is None:
        comparison = "not measured then"
    elif recorded == result.loss:
        comparison = "as recorded"
    else:
        comparison = (
            f"recorded: {recorded}; another device, processor, version or number of threads changes the last bits"
        )
    return {
        "run": folder.run_id,
        "update": update,
        "val_loss": result.loss,
        "target_tokens": result.target_tokens,
        "validation_identity": dataset.validation.identity,
        "recorded_val_loss": recorded,
        "is_as_recorded": None if recorded is None else recorded == result.loss,
        "comparison": comparison,
        "damaged_checkpoints": restored.damaged,
    }
