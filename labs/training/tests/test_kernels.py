"""Which kernels are chosen on which machine, and what is said where none can be."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny

from training_lab.errors import UserError
from training_lab.kernels import choose_kernels
from training_lab.precision import Hardware
from training_lab.resolve import resolve_config

REAL_FIND_SPEC = importlib.util.find_spec
Machine = Callable[..., Hardware]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretends to be on some machine."""

    def pretend(
        device: str = "cuda", compute: str = "bf16", capability: tuple[int, int] = (9, 0), missing: tuple[str, ...] = ()
    ) -> Hardware:
        def find_spec(name: str, *others: Any) -> Any:
            if name in ("liger_kernel", "triton"):
                return None if name in missing else object()
            return REAL_FIND_SPEC(name, *others)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(shutil, "which", lambda name: None if "compiler" in missing else f"/bin/{name}")
        return Hardware(torch.device(device), "pretended", compute, "pretended", 1, capability=capability)

    return pretend


ATTENTION: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("auto", {}, [], "flash"),
    ("auto", {"compute": "fp16"}, [], "flash"),
    ("auto", {"compute": "fp32"}, [], "flex"),
    ("auto", {"capability": (7, 5), "compute": "fp16"}, [], "flex"),
    ("auto", {"capability": (8, 0)}, [], "flash"),
    ("auto", {}, ["model.d_model=40"], "flex"),  # heads of 20 dimensions
    ("auto", {}, ["model.dropout=0.1"], "sdpa"),
    ("auto", {"device": "cpu", "compute": "fp32"}, [], "sdpa"),
    ("auto", {"device": "mps", "compute": "fp32"}, [], "sdpa"),
    ("auto_flex", {}, [], "flex"),
    ("auto_flex", {}, ["model.dropout=0.1"], "sdpa"),
    ("auto_flex", {"device": "cpu", "compute": "fp32"}, [], "sdpa"),
    ("sdpa", {}, [], "sdpa"),
    ("flex", {}, [], "flex"),
    ("flash", {}, [], "flash"),
]


@pytest.mark.parametrize(("wanted", "facts", "overrides", "expected"), ATTENTION, ids=str)
def test_attention(wanted: str, facts: dict[str, Any], overrides: list[str], expected: str, machine: Machine) -> None:
    kernels = choose_kernels(tiny("model.dropout=0", f"kernels.attention={wanted}", *overrides), machine(**facts))
    assert kernels.attention == expected
    assert kernels.attention_reason


@pytest.mark.parametrize(
    ("wanted", "facts", "overrides", "why", "instead"),
    [
        ("flash", {"device": "cpu", "compute": "fp32"}, [], "it runs on CUDA only", "use sdpa"),
        ("flash", {"compute": "fp32"}, [], "it computes in BF16 or FP16 only", "use flex, sdpa"),
        ("flash", {"capability": (7, 5)}, [], "compute capability 8.0", "use flex, sdpa"),
        ("flash", {}, ["model.d_model=40"], "a multiple of 8 dimensions", "use flex, sdpa"),
        ("flash", {}, ["model.d_model=520", "model.num_heads=1"], "at most 256", "use flex, sdpa"),
        ("flex", {}, ["model.d_model=16"], "at least 16 dimensions", "use flash, sdpa"),
        ("flex", {"missing": ("triton",)}, [], "triton is not installed", "use flash, sdpa"),
        ("flash", {}, ["model.dropout=0.1"], "it has no dropout", "use sdpa"),
        ("flex", {}, ["model.dropout=0.1"], "it has no dropout", "use sdpa"),
        ("flex", {"device": "mps", "compute": "fp32"}, [], "no backward pass", "use sdpa"),
    ],
)
def test_attention_that_cannot_work_is_refused_with_what_can(
    wanted: str, facts: dict[str, Any], overrides: list[str], why: str, instead: str, machine: Machine
) -> None:
    with pytest.raises(UserError) as caught:
        choose_kernels(tiny("model.dropout=0", f"kernels.attention={wanted}", *overrides), machine(**facts))
    message = str(caught.value)
    assert message.startswith(f"kernels.attention: {wanted} cannot be used on ")
    assert why in message
    assert message.endswith(instead)


@pytest.mark.parametrize(
    ("wanted", "facts", "expected"),
    [
        ("auto", {}, "liger"),
        ("auto", {"missing": ("liger_kernel",)}, "chunked"),
        ("auto", {"missing": ("triton",)}, "chunked"),
        ("auto", {"device": "cpu", "compute": "fp32"}, "chunked"),
        ("chunked", {}, "chunked"),
        ("reference", {}, "reference"),
        ("liger", {}, "liger"),
        ("liger", {"missing": ("liger_kernel",)}, "liger_kernel is not installed"),
        ("liger", {"device": "cpu", "compute": "fp32"}, "Liger's kernels run on CUDA only; use chunked"),
    ],
)
def test_loss(wanted: str, facts: dict[str, Any], expected: str, machine: Machine) -> None:
    config = tiny(f"kernels.loss={wanted}")
    if len(expected.split()) > 1:
        with pytest.raises(UserError, match=f"kernels.loss: liger cannot be used on .*{expected}"):
            choose_kernels(config, machine(**facts))
    else:
        kernels = choose_kernels(config, machine(**facts))
        assert (kernels.loss, bool(kernels.loss_reason)) == (expected, True)


@pytest.mark.parametrize(
    ("wanted", "facts", "expected"),
    [
        ("auto", {}, True),
        ("auto", {"missing": ("triton",)}, False),
        ("auto", {"device": "cpu", "compute": "fp32"}, False),
        ("auto", {"device": "mps", "compute": "fp32"}, False),
        ("off", {}, False),
        ("on", {}, True),
        ("on", {"device": "cpu", "compute": "fp32"}, True),
        ("on", {"device": "cpu", "compute": "fp32", "missing": ("compiler",)}, "no C.. compiler"),
        ("on", {"missing": ("triton",)}, "triton is not installed"),
        ("on", {"device": "mps", "compute": "fp32"}, "not supported on MPS"),
    ],
)
def test_compile(wanted: str, facts: dict[str, Any], expected: bool | str, machine: Machine) -> None:
    config = tiny(f"kernels.compile={wanted}")
    if isinstance(expected, str):
        with pytest.raises(UserError, match=f"kernels.compile: on is not possible here: {expected}.*; use auto or off"):
            choose_kernels(config, machine(**facts))
    else:
        kernels = choose_kernels(config, machine(**facts))
        assert (kernels.compile, bool(kernels.compile_reason)) == (expected, True)


def test_rows_of_many_lengths_are_not_compiled(machine: Machine) -> None:
    varying = ("batch.layout=token_budget", "batch.micro_batches=3")
    kernels = choose_kernels(tiny(*varying, "model.dropout=0", "kernels.attention=auto_flex"), machine())
    assert (kernels.attention, kernels.compile) == ("sdpa", False)
    with pytest.raises(UserError, match="not possible here: the micro-batches of a token budget differ in length"):
        choose_kernels(tiny("kernels.compile=on", *varying), machine())


@pytest.mark.parametrize(
    ("config", "on_a_gpu", "on_a_cpu"),
    [
        ("smoke", ("flex", "liger", True), ("sdpa", "chunked", False)),
        ("profile", ("flex", "liger", True), ("sdpa", "chunked", False)),
        ("baseline", ("flash", "liger", True), ("sdpa", "chunked", False)),
        ("corrected", ("flash", "liger", False), ("sdpa", "chunked", False)),
        ("corrected-fast", ("flash", "chunked", True), ("sdpa", "chunked", False)),
    ],
)
def test_the_path_of_each_config(
    config: str, on_a_gpu: tuple[str, str, bool], on_a_cpu: tuple[str, str, bool], machine: Machine
) -> None:
    for facts, expected in (({}, on_a_gpu), ({"device": "cpu", "compute": "fp32"}, on_a_cpu)):
        kernels = choose_kernels(resolve_config(config).config, machine(**facts))
        assert (kernels.attention, kernels.loss, kernels.compile) == expected
