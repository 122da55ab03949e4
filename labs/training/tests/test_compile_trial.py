"""The trial of a compiled model consumes nothing, whatever it meets; and what is compiled serves training alone.

Most of it with a torch.compile that is pretended, which takes no time; `test_compile.py` has the real one's results.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import tiny

from training_lab.checkpoint import weights_sha256
from training_lab.data.dataset import prepare_dataset
from training_lab.engine import compile_trainer, train_update
from training_lab.errors import UserError
from training_lab.evaluate import evaluate
from training_lab.precision import choose_hardware
from training_lab.sample import sample_tokens
from training_lab.trainer import Trainer, make_trainer

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="needs a C++ compiler on PATH"
)
LAYOUTS = {
    "token_budget": ("batch.layout=token_budget",),
    "packs": ("batch.layout=packs",),
    "windows": ("batch.layout=windows", "batch.block_size=64", "batch.batch_size=8"),
}
Body = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def deterministic_mode_is_left() -> Iterator[None]:
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(was, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def there_is_a_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that pretend to compile."""
    if "really_compiled" not in request.fixturenames:
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def trainer_of(*overrides: str) -> Trainer:
    config = tiny(*overrides)
    return make_trainer(config, choose_hardware(config), prepare_dataset(config))


def automatic_trainer(*overrides: str) -> Trainer:
    """One for which compiling was chosen by itself, as on a GPU."""
    trainer = trainer_of(*overrides)
    return dataclasses.replace(trainer, kernels=dataclasses.replace(trainer.kernels, compile=True))


def refuse_warning(message: str) -> None:
    raise AssertionError(message)


def pretend_to_compile(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Body], Body]) -> None:
    monkeypatch.setattr(torch, "compile", lambda body, **options: wrap(body))


def counting(calls: list[int]) -> Callable[[Body], Body]:
    """A compiler that changes nothing, and keeps the lengths of the rows that its product is called with."""

    def wrap(body: Body) -> Body:
        def count(tokens_T: torch.Tensor, *others: Any) -> torch.Tensor:
            calls.append(len(tokens_T))
            return body(tokens_T, *others)

        return count

    return wrap


class FailsBackward(torch.autograd.Function):
    """Passes its input on, and fails when its gradient is asked for."""

    error: Exception = RuntimeError("no such kernel")

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise FailsBackward.error


def pass_through_failing(block: torch.nn.Module, inputs: Any, output: torch.Tensor) -> Any:
    return FailsBackward.apply(output)  # type: ignore[no-untyped-call]


def fail_at_once(body: Body) -> Body:
    def fail(*arguments: Any) -> torch.Tensor:
        torch.rand(3)
        raise FailsBackward.error

    return fail


def fail_halfway_back(body: Body) -> Body:
    """Fails in the backward pass when the last block and the norms after it have their gradients."""

    def fail(*arguments: Any) -> torch.Tensor:
        blocks = body.__self__.blocks  # type: ignore[attr-defined]
        handle = blocks[0].register_forward_hook(pass_through_failing)
        try:
            return body(*arguments)
        finally:
            handle.remove()

    return fail


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same bits, of the same types."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def gradients_left(trainer: Trainer) -> list[str]:
    return [name for name, parameter in trainer.model.named_parameters() if parameter.grad is not None]


def losses_of(trainer: Trainer, updates: int) -> list[float]:
    return [train_update(trainer)["loss"] for _ in range(updates)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("updates_before", [0, 2, 12])
def test_the_trial_changes_nothing_that_an_update_reads(
    layout: str, compute: str, updates_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    pretend_to_compile(monkeypatch, counting(calls))
    words = (
        *LAYOUTS[layout],
        f"precision.compute={compute}",
        f"batch.micro_batches={1 if layout == 'token_budget' else 2}",
    )
    tried, plain = trainer_of("kernels.compile=on", *words), trainer_of(*words)
    tried.restore(copy.deepcopy(plain.state()))
    for one in (plain, tried):
        streams = torch.get_rng_state()
        losses_of(one, updates_before)
        if one is plain:
            torch.set_rng_state(streams)
    tried.model.zero_grad(set_to_none=True)
    before = copy.deepcopy(tried.state())
    assert compile_trainer(tried, refuse_warning) == {"compile_state": "active"}
    assert same(before, tried.state())
    assert gradients_left(tried) == []
    assert tried.model.training
    assert len(calls) == 1  # the first micro-batch, and no other
    assert weights_sha256(tried.model) == weights_sha256(plain.model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_after_the_trial_is_that_without_it(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_compile(monkeypatch, counting([]))
    plain = trainer_of(*LAYOUTS[layout])
    expected = losses_of(plain, 4)
    tried = trainer_of("kernels.compile=on", *LAYOUTS[layout])
    compile_trainer(tried, refuse_warning)
    assert losses_of(tried, 4) == expected
    assert weights_sha256(tried.model) == weights_sha256(plain.model)


@pytest.mark.parametrize("fail", [fail_at_once, fail_halfway_back])
@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_a_compiler_that_fails_by_itself_leaves_the_run_that_is_not_compiled(
    fail: Callable[[Body], Body], compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailsBackward, "error", RuntimeError("no such kernel\nand a long trace"))
    pretend_to_compile(monkeypatch, fail)
    plain = trainer_of(f"precision.compute={compute}", "kernels.compile=off")
    expected = losses_of(plain, 4)
    trainer, warnings = automatic_trainer(f"precision.compute={compute}"), list[str]()
    before = copy.deepcopy(trainer.state())
    state = compile_trainer(trainer, warnings.append)
    assert state == {"compile_state": "requested, not active", "compile_failure": "RuntimeError: no such kernel"}
    assert trainer.model.compiled_body is None
    assert gradients_left(trainer) == []
    assert same(before, trainer.state())
    (warning,) = warnings
    assert len(warning.splitlines()) == 1
    assert "no such kernel" in warning
    assert losses_of(trainer, 4) == expected
    assert weights_sha256(trainer.model) == weights_sha256(plain.model)


def test_the_failure_of_the_backward_pass_comes_after_some_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above has gradients to be left behind."""
    trainer = automatic_trainer()
    seen: list[list[str]] = []
    zero_grad = trainer.model.zero_grad

    def look_first(set_to_none: bool = True) -> None:
        seen.append(gradients_left(trainer))
        zero_grad(set_to_none=set_to_none)

    monkeypatch.setattr(trainer.model, "zero_grad", look_first)
    pretend_to_compile(monkeypatch, fail_halfway_back)
    compile_trainer(trainer, lambda message: None)
    assert "blocks.1.mlp.expand.weight" in seen[-1]
    assert not any(name.startswith("blocks.0.") for name in seen[-1])


@pytest.mark.parametrize("text", ["", "x" * 999, "\n\n", "first\nsecond"], ids=["empty", "long", "newlines", "two"])
def test_whatever_a_compiler_says_becomes_one_short_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailsBackward, "error", ValueError(text))
    pretend_to_compile(monkeypatch, fail_at_once)
    warnings: list[str] = []
    reason = compile_trainer(automatic_trainer(), warnings.append)["compile_failure"]
    for line in (reason, *warnings):
        assert len(line.splitlines()) == 1
        assert "ValueError" in line
        assert len(line) < 300


@pytest.mark.parametrize("fail", [fail_at_once, fail_halfway_back])
def test_where_it_is_required_the_failure_is_a_users_error_and_leaves_no_trace(
    fail: Callable[[Body], Body], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_compile(monkeypatch, fail)
    trainer = trainer_of("kernels.compile=on")
    before = copy.deepcopy(trainer.state())
    with pytest.raises(UserError, match=r"^kernels\.compile: on, .*RuntimeError: no such kernel; use auto or off$"):
        compile_trainer(trainer, refuse_warning)
    assert trainer.model.compiled_body is None
    assert gradients_left(trainer) == []
    assert same(before, trainer.state())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory."),
    ],
    ids=["cuda", "python", "cpu", "wrapped"],
)
@pytest.mark.parametrize("fail", [fail_at_once, fail_halfway_back])
@pytest.mark.parametrize("is_required", [True, False])
def test_no_memory_left_is_said_as_that_whoever_wanted_to_compile(
    error: Exception, fail: Callable[[Body], Body], is_required: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailsBackward, "error", error)
    pretend_to_compile(monkeypatch, fail)
    trainer = trainer_of("kernels.compile=on") if is_required else automatic_trainer()
    with pytest.raises(type(error)) as caught:
        compile_trainer(trainer, refuse_warning)
    assert caught.value is error
    assert trainer.model.compiled_body is None
    assert gradients_left(trainer) == []


def test_evaluating_and_sampling_do_not_use_what_is_compiled_and_training_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    pretend_to_compile(monkeypatch, counting(calls))
    trainer = trainer_of("kernels.compile=on", "batch.layout=packs", "batch.micro_batches=2")
    compile_trainer(trainer, refuse_warning)
    calls.clear()
    evaluate(trainer.whole, trainer.dataset.validation, trainer.hardware, 128)
    assert calls == []
    assert trainer.model.training
    train_update(trainer)
    assert len(calls) == 2
    list(sample_tokens(trainer.model, trainer.hardware, [65], num_tokens=3, temperature=1.0, top_k=5, seed=0))
    assert len(calls) == 2


def test_what_is_compiled_is_in_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_compile(monkeypatch, counting([]))
    trainer, plain = trainer_of("kernels.compile=on"), trainer_of()
    compile_trainer(trainer, refuse_warning)
    assert trainer.model.state_dict().keys() == plain.model.state_dict().keys()
    assert [name for name, _ in trainer.model.named_modules()] == [name for name, _ in plain.model.named_modules()]


@pytest.mark.parametrize(("layout", "parts"), [*itertools.product(("packs", "windows"), (1, 3)), ("token_budget", 1)])
def test_the_rows_of_a_run_are_of_one_length_so_that_it_compiles_once(
    layout: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    pretend_to_compile(monkeypatch, counting(lengths))
    packs = ("batch.pack_length=64", "batch.packs=8") if layout == "packs" else ()
    trainer = trainer_of("kernels.compile=on", *LAYOUTS[layout], *packs, f"batch.micro_batches={parts}")
    compile_trainer(trainer, refuse_warning)
    losses_of(trainer, 12)
    assert len(set(lengths)) == 1


@pytest.fixture(scope="module")
def really_compiled() -> Iterator[Trainer]:
    """A trainer of packs, with dropout, after the trial; its compilation serves every trainer of the same shapes."""
    torch._dynamo.reset()
    yield trainer_of("kernels.compile=on", *LAYOUTS["packs"])
    torch._dynamo.reset()


# torch._dynamo looks at `.grad` of tensors that are not leaves, and torch.jit.script_method is old: its own warnings.
@needs_compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*:DeprecationWarning")
def test_really_compiled_with_dropout_the_trial_leaves_no_trace_and_a_resumed_run_is_the_same_bits(
    really_compiled: Trainer,
) -> None:
    words, start = ("kernels.compile=on", *LAYOUTS["packs"]), copy.deepcopy(really_compiled.state())
    assert compile_trainer(really_compiled, refuse_warning) == {"compile_state": "active"}
    assert gradients_left(really_compiled) == []
    assert same(start, really_compiled.state())
    compiled_frames = torch._dynamo.utils.counters["frames"]["ok"]
    first = losses_of(really_compiled, 2)
    halfway = copy.deepcopy(really_compiled.state())
    rest = losses_of(really_compiled, 3)
    assert torch._dynamo.utils.counters["frames"]["ok"] == compiled_frames
    resumed = trainer_of(*words)
    resumed.restore(halfway)
    compile_trainer(resumed, refuse_warning)
    assert losses_of(resumed, 3) == rest
    assert weights_sha256(resumed.model) == weights_sha256(really_compiled.model)
    again = trainer_of(*words)
    again.restore(start)
    compile_trainer(again, refuse_warning)
    assert losses_of(again, 5) == [*first, *rest]
