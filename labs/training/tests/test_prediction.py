"""Memory foretold, against the tensors that autograd saves and the bytes that an update really holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny import tiny

from training_lab.config import Config
from training_lab.data.dataset import prepare_dataset
from training_lab.engine import train_update
from training_lab.errors import UserError
from training_lab.footprint import activation_bytes, kind_on_gpu, memory_parts, parameter_values
from training_lab.gpus import GPUS
from training_lab.kernels import choose_kernels
from training_lab.model import Decoder, count_parameters
from training_lab.observation import CpuHistory
from training_lab.precision import choose_hardware, plan_hardware
from training_lab.prediction import enough_micro_batches, need_memory, predict_memory
from training_lab.record import RunFolder
from training_lab.resolve import resolve_config
from training_lab.trainer import Trainer, make_trainer

H100 = "NVIDIA H100 80GB HBM3"
WINDOWS = ("batch.layout=windows", "batch.block_size=64", "model.dropout=0", "model.d_model=128", "model.num_heads=4")


def saved_bytes(config: Config) -> int:
    """The bytes that a forward pass of one micro-batch keeps for the backward pass, weights left out."""
    trainer = make_trainer(config, choose_hardware(config), prepare_dataset(config))
    known = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no address is given out twice
        return tensor

    batch = trainer.dataset.update_data(1).micro_batches[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), trainer.hardware.autocast():
        trainer.model(batch.tokens_T, batch.positions_T, batch.cu_seqlens)
    return sum(kept.values())


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_activations_of_a_token_and_layer_are_exactly_what_autograd_saves(compute: str) -> None:
    def config(layers: int, windows: int) -> Config:
        sizes = (f"model.num_layers={layers}", f"batch.batch_size={windows}")
        return tiny(*WINDOWS, f"precision.compute={compute}", *sizes)

    more, fewer = (saved_bytes(config(3, windows)) - saved_bytes(config(2, windows)) for windows in (8, 4))
    predicted = activation_bytes(config(3, 1), compute == "fp32") - activation_bytes(config(2, 1), compute == "fp32")
    assert (more - fewer) / (4 * 64) == predicted


def tensor_peak(trainer: Trainer) -> int:
    """The most bytes in tensors during an update, by the profiler."""
    train_update(trainer)
    history, held = CpuHistory(torch.device("cpu")), trainer.held()
    trainer.phases.watch = history.phase
    history.start()
    train_update(trainer)
    history.stop()
    trainer.phases.watch = None
    peaks = [phase["peak_bytes"] for phase in history.picture(RunFolder(Path.cwd()), held)["phases"]]
    return int(max(peaks))


@pytest.mark.parametrize(
    "overrides",
    [
        ("batch.batch_size=64",),
        ("batch.batch_size=64", "batch.micro_batches=4"),
        ("batch.batch_size=64", "optimizer.name=muon"),
        ("batch.batch_size=32", "data.tokenizer=gpt2"),
        ("batch.batch_size=64", "precision.compute=bf16"),
    ],
    ids=["whole", "split", "muon", "large vocabulary", "bf16"],
)
def test_an_update_holds_as_much_as_was_foretold(overrides: tuple[str, ...]) -> None:
    config = tiny(*WINDOWS, *overrides)
    trainer = make_trainer(config, choose_hardware(config), prepare_dataset(config))
    vocab_size = trainer.dataset.tokenizer.vocab_size
    predicted = predict_memory(config, vocab_size, trainer.hardware, trainer.kernels, base_bytes=0)
    assert predicted.total_bytes == pytest.approx(tensor_peak(trainer), rel=0.1)


def test_more_micro_batches_take_less_and_the_fewest_that_fit_are_found() -> None:
    config = tiny(*WINDOWS, "batch.batch_size=24")
    hardware = plan_hardware(config, H100)
    kernels = choose_kernels(config, hardware)

    def total(micro_batches: int) -> int:
        batch = dataclasses.replace(config.batch, micro_batches=micro_batches)
        return predict_memory(dataclasses.replace(config, batch=batch), 256, hardware, kernels).total_bytes

    totals = {number: total(number) for number in (1, 2, 3, 4, 6, 8, 12, 24)}
    assert list(totals.values()) == sorted(totals.values(), reverse=True)
    for number, needed in totals.items():
        assert enough_micro_batches(config, 256, hardware, kernels, needed) == number
    assert enough_micro_batches(config, 256, hardware, kernels, totals[24] - 1) is None
    assert enough_micro_batches(config, 256, hardware, kernels, total(5)) == 6, "5 would fill some up with padding"


def test_what_cannot_fit_is_refused_with_the_split_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(*WINDOWS, "batch.batch_size=512")
    hardware = choose_hardware(config)
    kernels = choose_kernels(config, hardware)
    monkeypatch.setattr("training_lab.prediction.resident_bytes", lambda: 0)
    whole = predict_memory(config, 256, hardware, kernels).total_bytes
    monkeypatch.setattr("training_lab.prediction.machine_memory_bytes", lambda: whole - 1)
    with pytest.raises(UserError, match=r"use --set batch\.micro_batches=2 \(the update stays the same\)$"):
        need_memory(config, 256, hardware, kernels)
    monkeypatch.setattr("training_lab.prediction.machine_memory_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"use a smaller model$"):
        need_memory(config, 256, hardware, kernels)
    monkeypatch.setattr("training_lab.prediction.machine_memory_bytes", lambda: whole)
    need_memory(config, 256, hardware, kernels)


@pytest.mark.parametrize("overrides", [(), ("model.num_layers=3", "model.d_model=96", "model.num_heads=3")])
def test_the_values_that_a_model_trains_are_known_without_it(overrides: tuple[str, ...]) -> None:
    config = tiny(*overrides)
    foretold = parameter_values(config.model, 300)
    model = Decoder(config.model, 300)
    assert sum(foretold.values()) == count_parameters(model)
    assert foretold["matrices of the blocks"] == sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)


def test_corrected_on_an_h100_takes_what_was_recorded() -> None:
    config = resolve_config("corrected").config
    total = sum(memory_parts(config, 50_257, kind_on_gpu(config, GPUS[H100])).values())
    assert sum(parameter_values(config.model, 50_257).values()) == 126_716_160
    assert total / 2**30 == pytest.approx(47.88, rel=0.03)
