"""Compiled and not compiled learn the same, and trying to compile leaves no trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import run, tiny, train_tiny

from training_lab.checkpoint import weights_sha256
from training_lab.data.dataset import prepare_dataset
from training_lab.engine import compile_trainer, train_update
from training_lab.errors import UserError
from training_lab.evaluate import evaluate
from training_lab.precision import choose_hardware
from training_lab.trainer import Trainer, make_trainer

has_compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
# The compiler warns of torch's own old parts, and of looking at gradients itself; as errors they would stop it.
pytestmark = pytest.mark.filterwarnings("ignore")
needs_compiler = pytest.mark.skipif(not has_compiler, reason="needs a C++ compiler")
PACKS = ("batch.layout=packs", "model.dropout=0")


@pytest.fixture(autouse=True)
def deterministic_mode_is_left() -> Iterator[None]:
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def trainer_of(*overrides: str) -> Trainer:
    config = tiny(*overrides)
    return make_trainer(config, choose_hardware(config), prepare_dataset(config))


def refuse_warning(message: str) -> None:
    raise AssertionError(message)


def compiled_trainer(*overrides: str) -> Trainer:
    trainer = trainer_of("kernels.compile=on", *overrides)
    assert compile_trainer(trainer, refuse_warning) == {"compile_state": "active"}
    return trainer


def losses_of(trainer: Trainer, updates: int) -> list[float]:
    return [train_update(trainer)["loss"] for _ in range(updates)]


@needs_compiler
def test_compiled_learns_the_same_twice_and_what_it_would_learn_otherwise() -> None:
    eager, first, second = trainer_of(*PACKS), compiled_trainer(*PACKS), compiled_trainer(*PACKS)
    expected = losses_of(eager, 5)
    assert losses_of(first, 5) == losses_of(second, 5)
    assert weights_sha256(first.model) == weights_sha256(second.model)
    assert losses_of(compiled_trainer(*PACKS), 5) == pytest.approx(expected, rel=1e-4)


@needs_compiler
def test_a_compiled_run_that_is_resumed_equals_one_that_never_stopped() -> None:
    whole, before = compiled_trainer(*PACKS), compiled_trainer(*PACKS)
    losses_of(whole, 4)
    losses_of(before, 2)
    after = trainer_of("kernels.compile=on", *PACKS)
    after.restore(before.state())
    compile_trainer(after, refuse_warning)
    losses_of(after, 2)
    assert weights_sha256(after.model) == weights_sha256(whole.model)


@needs_compiler
def test_evaluation_does_not_use_what_was_compiled() -> None:
    trainer, eager = compiled_trainer(*PACKS), trainer_of(*PACKS)
    trainer.model.compiled_body = refuse_call
    measured, expected = (evaluate(one.whole, one.dataset.validation, one.hardware, 256) for one in (trainer, eager))
    assert measured.loss == expected.loss


def refuse_call(*arguments: Any) -> torch.Tensor:
    raise AssertionError("called")


def everything(trainer: Trainer) -> list[torch.Tensor]:
    """All that an update reads or changes, and gradients, in a fixed order."""
    found: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value.clone())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                collect(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                collect(one)
        elif isinstance(value, int | float):
            found.append(torch.tensor(float(value)))

    collect(trainer.state())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    return found


def failing_compiler(error: Exception, is_in_backward: bool) -> Callable[..., Any]:
    """A torch.compile whose product fails, at its call or after half of the backward pass."""

    def compile_it(body: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
        def fail(*arguments: Any) -> torch.Tensor:
            if not is_in_backward:
                raise error
            hidden_Td = body(*arguments)

            def raise_it(gradient: torch.Tensor) -> None:
                raise error

            body.__self__.blocks[0].mlp.project.weight.register_hook(raise_it)  # type: ignore[attr-defined]
            return hidden_Td

        return fail

    return compile_it


@pytest.mark.parametrize("is_in_backward", [False, True])
def test_a_compiler_that_fails_leaves_no_trace_and_is_said_once(
    is_in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of()
    object.__setattr__(trainer.kernels, "compile", True)  # as `auto` chooses on a GPU
    before = everything(trainer)
    monkeypatch.setattr(torch, "compile", failing_compiler(RuntimeError("no such kernel\nand more"), is_in_backward))
    warnings: list[str] = []
    state = compile_trainer(trainer, warnings.append)
    assert state == {
        "compile_state": "requested, not active",
        "compile_failure": "RuntimeError: no such kernel",
    }
    assert warnings == ["compiling failed, so the model runs as it is: RuntimeError: no such kernel"]
    assert trainer.model.compiled_body is None
    assert all(torch.equal(a, b) for a, b in zip(before, everything(trainer), strict=True))
    if not is_in_backward:  # the hook of the other case stays on its parameter
        losses, plain = losses_of(trainer, 3), trainer_of()
        assert losses == losses_of(plain, 3)
        assert weights_sha256(trainer.model) == weights_sha256(plain.model)


def test_where_compiling_is_required_its_failure_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    trainer = trainer_of("kernels.compile=on")
    monkeypatch.setattr(torch, "compile", failing_compiler(RuntimeError("no such kernel"), is_in_backward=False))
    with pytest.raises(UserError, match=r"kernels\.compile: on, but compiling failed: .*no such kernel; use"):
        compile_trainer(trainer, refuse_warning)


def test_running_out_of_memory_is_no_failure_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    object.__setattr__(trainer.kernels, "compile", True)
    monkeypatch.setattr(
        torch, "compile", failing_compiler(torch.OutOfMemoryError("out of memory"), is_in_backward=False)
    )
    with pytest.raises(torch.OutOfMemoryError):
        compile_trainer(trainer, refuse_warning)


def test_without_compiling_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", refuse_call)
    assert compile_trainer(trainer_of("kernels.compile=off"), refuse_warning) == {"compile_state": "off"}


@needs_compiler
def test_a_run_records_its_kernels_and_that_it_was_compiled_and_is_replayed_so() -> None:
    train_tiny("--set", "kernels.compile=on", "--set", "train.updates=2", "--set", "checkpoint.every=2",
               "--set", "schedule.warmup_updates=1", "--set", "eval.every=0")  # fmt: skip
    (folder,) = Path(".runs").iterdir()
    (process,) = json.loads((folder / "environment.json").read_text())["processes"]
    assert (process["attention"], process["loss"], process["compile"]) == ("sdpa", "chunked", True)
    assert process["compile_state"] == "active"
    for kernel in ("attention", "loss", "compile"):
        assert process[f"{kernel}_reason"]
    verified = run("verify", folder.name, "--replay", "1", "--from", "0")
    assert verified.returncode == 0, verified.stdout + verified.stderr
