"""Which device and arithmetic are chosen, with the devices of other machines mocked; and what a GPU does, on one."""

from __future__ import annotations

import os

import pytest
import torch
from tiny import tiny

from training_lab.data.dataset import prepare_dataset
from training_lab.engine import train_update
from training_lab.errors import UserError
from training_lab.memory import advice_for_memory, is_out_of_memory
from training_lab.precision import choose_compute, choose_device, choose_hardware
from training_lab.provenance import usable_cpus
from training_lab.trainer import Trainer, make_trainer

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch finds none here"),
]


def pretend(monkeypatch: pytest.MonkeyPatch, *, cuda: bool = False, bf16: bool = False, mps: bool = False) -> None:
    """A machine with other devices than this one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("cuda", "bf16", "mps", "device", "compute"),
    [
        (True, True, False, "cuda", "bf16"),
        (True, False, False, "cuda", "fp16"),
        (False, False, True, "mps", "fp32"),
        (False, False, False, "cpu", "fp32"),
    ],
)
def test_auto_takes_the_best_that_is_there_and_says_why(
    cuda: bool, bf16: bool, mps: bool, device: str, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, cuda=cuda, bf16=bf16, mps=mps)
    found, reason = choose_device("auto")
    assert found.type == device
    assert reason
    assert choose_compute("auto", found)[0] == compute


def test_what_is_not_there_is_refused_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, mps=True)
    with pytest.raises(UserError, match=r"cuda is not available to torch .* here; there is: mps, cpu"):
        choose_device("cuda")
    pretend(monkeypatch, cuda=True)
    with pytest.raises(UserError, match="no BF16 in hardware"):
        choose_compute("bf16", torch.device("cuda"))
    with pytest.raises(UserError, match="loss scaler"):
        choose_compute("fp16", torch.device("mps"))


def test_the_cpu_can_be_asked_for_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda=True, bf16=True)
    hardware = choose_hardware(tiny("train.device=cpu"))
    assert (hardware.device.type, hardware.compute) == ("cpu", "fp32")


def test_the_number_of_threads_is_the_configs_and_not_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    choose_hardware(tiny("train.num_threads=3"))
    assert torch.get_num_threads() == 3
    choose_hardware(tiny("train.num_threads=0"))
    assert torch.get_num_threads() == usable_cpus() == len(os.sched_getaffinity(0))


def test_only_out_of_memory_is_taken_for_it() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_advice_names_only_what_can_help() -> None:
    assert "batch.micro_batches from 1 to 2" in advice_for_memory(tiny())
    at_limit = advice_for_memory(tiny("batch.micro_batches=8", "eval.batch_tokens=64"))
    assert "micro_batches" not in at_limit
    assert "eval.batch_tokens" not in at_limit
    assert "lower model.max_positions, now 64" in at_limit


def gpu_trainer(*overrides: str) -> Trainer:
    config = tiny("model.dropout=0", *overrides)
    return make_trainer(config, choose_hardware(config), prepare_dataset(config))


@pytest.mark.parametrize(("compute", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 5e-3)])
class TestOnAGpu:
    """The same losses as on the CPU, up to the arithmetic."""

    pytestmark = needs_gpu

    def test_losses_follow_those_of_the_cpu(self, compute: str, tolerance: float) -> None:
        here, there = gpu_trainer("train.device=cpu"), gpu_trainer("train.device=cuda", f"precision.compute={compute}")
        for _ in range(5):
            assert train_update(there)["loss"] == pytest.approx(train_update(here)["loss"], rel=tolerance)

    def test_a_restored_trainer_goes_on(self, compute: str, tolerance: float) -> None:
        words = ("train.device=cuda", f"precision.compute={compute}")
        trainer, other = gpu_trainer(*words), gpu_trainer(*words)
        train_update(trainer)
        other.restore(trainer.state())
        assert train_update(other)["loss"] == pytest.approx(train_update(trainer)["loss"], rel=tolerance)
