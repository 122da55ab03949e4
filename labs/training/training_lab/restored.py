"""A run's folder back as a model that can be used, or as a trainer that can go on: for eval, sample and verify."""

from __future__ import annotations

from typing import NamedTuple

from training_lab import record
from training_lab.checkpoint import Checkpoint, list_checkpoints, newest_good
from training_lab.data.tokenizers import Tokenizer, tokenizer_from_manifest
from training_lab.errors import LabError, UserError
from training_lab.kernels import Kernels, choose_kernels
from training_lab.memory import advice_when_out_of_memory
from training_lab.model import Decoder
from training_lab.precision import Hardware, choose_hardware
from training_lab.record import RunFolder
from training_lab.resolve import Resolved, config_from_record
from training_lab.trainer import check_shapes


class RestoredModel(NamedTuple):
    """The weights of a checkpoint, and what is needed to use them. No data is read for it."""

    resolved: Resolved
    hardware: Hardware
    kernels: Kernels
    tokenizer: Tokenizer
    model: Decoder
    checkpoint: Checkpoint
    document_start: list[int]
    """The tokens with which the training text began each document."""
    damaged: list[str]
    """What is wrong with newer checkpoints, because of which this one is used."""


def recorded_config(folder: RunFolder) -> Resolved:
    """The config that a run was made with."""
    return config_from_record(folder.read_json(record.CONFIG), str(folder.file(record.CONFIG)))


def restore_model(folder: RunFolder, update: int | None) -> RestoredModel:
    """The model after `update`, or that of the newest checkpoint that verifies. Raises UserError if there is none."""
    resolved = recorded_config(folder)
    checkpoint, damaged = choose_checkpoint(folder, update)
    hardware = choose_hardware(resolved.config)
    kernels = choose_kernels(resolved.config, hardware)
    try:
        data = folder.read_json(record.DATA_MANIFEST, tokenizer=dict, end_of_text=dict)
        tokenizer = tokenizer_from_manifest(data["tokenizer"])
        document_start = [data["end_of_text"]["token"]] if data["end_of_text"]["place"] == "start" else []
    except (KeyError, TypeError) as error:
        raise LabError(f"{folder.file(record.DATA_MANIFEST)}: damaged: no tokenizer in it") from error
    with advice_when_out_of_memory(resolved.config):
        model = Decoder(resolved.config.model, tokenizer.vocab_size, kernels.attention)
        weights = checkpoint.load()["model"]
        check_shapes(model, weights)
        model.load_state_dict(weights)
        model.to(hardware.device)
    return RestoredModel(resolved, hardware, kernels, tokenizer, model, checkpoint, document_start, damaged)


def choose_checkpoint(folder: RunFolder, update: int | None) -> tuple[Checkpoint, list[str]]:
    """The checkpoint after `update`, verified; without a number the newest that verifies, and what is wrong with
    newer ones."""
    checkpoints = folder.file(record.CHECKPOINTS)
    kept = ", ".join(str(checkpoint.update) for checkpoint in reversed(list_checkpoints(checkpoints))) or "none"
    if update is None:
        newest, damaged = newest_good(checkpoints)
        if newest is None:
            raise UserError(f"{folder.path}: has no checkpoint yet")
        return newest, damaged
    for checkpoint in list_checkpoints(checkpoints):
        if checkpoint.update == update:
            checkpoint.verify()
            return checkpoint, []
    raise UserError(f"--update {update}: no checkpoint of it in {folder.path}; kept are those of update {kept}")
