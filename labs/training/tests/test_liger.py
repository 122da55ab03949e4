"""Liger's fused loss against the textbook's: on a CPU in Triton's interpreter, on a GPU as it is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tiny import TRAINING

from training_lab.data.batches import IGNORED
from training_lab.loss import Objective, liger_loss, reference_loss

is_installed = all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton"))
needs_liger = pytest.mark.skipif(not is_installed, reason="liger-kernel and triton are made for Linux only")

# The interpreter must be chosen before Triton is imported, and cannot be left again: a process of its own.
PROGRAM = """
import json
import sys
import torch
from training_lab.data.batches import IGNORED
from training_lab.loss import Objective, liger_loss, reference_loss

def measure(case):
    tokens, width, vocabulary = case["shape"]
    objective = Objective(*case["objective"])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).mul_(case["scale"]).requires_grad_()
    head = torch.randn(vocabulary, width, generator=generator).mul_(0.3).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[{"none": slice(0), "some": slice(1, None, 3), "all": slice(None)}[case["ignored"]]] = IGNORED
    before = head.detach().clone()

    loss = liger_loss(hidden, head, labels, objective)
    gradients = torch.autograd.grad(loss, (hidden, head), torch.tensor(case["upstream"]))
    exact = reference_loss(hidden.double(), head.double(), labels, objective)
    wanted = torch.autograd.grad(exact, (hidden, head), torch.tensor(case["upstream"], dtype=torch.float64))
    with torch.inference_mode():
        measured = liger_loss(hidden, head, labels, objective)
    only_hidden = liger_loss(hidden, head.detach(), labels, objective)
    only_head = liger_loss(hidden.detach(), head, labels, objective)
    return {
        "loss": loss.item(),
        "expected": exact.item(),
        "errors": [((a - b).norm() / (b.norm() + 1e-30)).item() for a, b in zip(gradients, wanted)],
        "largest": max(g.abs().max().item() for g in gradients),
        "largest_ignored": gradients[0][labels == IGNORED].abs().sum().item(),
        "without_gradients": measured.item(),
        "only_hidden": (torch.autograd.grad(only_hidden * case["upstream"], hidden)[0] - gradients[0]).norm().item(),
        "only_head": (torch.autograd.grad(only_head * case["upstream"], head)[0] - gradients[1]).norm().item(),
        "is_untouched": torch.equal(head, before),
    }

print(json.dumps({name: measure(case) for name, case in json.load(sys.stdin).items()}))
"""


def case(
    vocab_size: int, objective: Objective, *, ignored: str = "some", upstream: float = 1, scale: float = 1
) -> dict[str, Any]:
    """Sixteen tokens, all of one chunk only where the vocabulary is no larger than the width."""
    values = [objective.label_smoothing, objective.z_loss]
    return {
        "shape": [16, 16, vocab_size], "objective": values, "ignored": ignored, "upstream": upstream, "scale": scale
    }  # fmt: skip


PLAIN, SMOOTHED, Z_LOSS, BOTH = Objective(), Objective(0.1), Objective(z_loss=1e-3), Objective(0.1, 1e-3)
WITH_LABELS = {
    **{f"{size} {o}": case(size, o) for size in (65, 257) for o in (PLAIN, SMOOTHED, Z_LOSS, BOTH)},
    "smaller than the width": case(9, BOTH),
    "every position has a label": case(257, BOTH, ignored="none"),
    "upstream gradient": case(65, BOTH, upstream=-2.5),
    "scaled logits": case(65, BOTH, scale=300),
    "GPT-2": case(50257, BOTH),
}
WITHOUT_LABELS = {f"no label {o}": case(65, o, ignored="all") for o in (PLAIN, BOTH)}
Measured = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def interpreted() -> Measured:
    """All cases, computed in Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(WITH_LABELS | WITHOUT_LABELS),
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TRAINING)},
        capture_output=True,
        encoding="utf-8",
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured: Measured = json.loads(done.stdout)
    return measured


@needs_liger
@pytest.mark.parametrize("name", WITH_LABELS)
class TestInTheInterpreter:
    """What Liger's kernel makes of FP32, next to torch's loss in FP64."""

    def test_value_and_gradients_equal_the_reference(self, name: str, interpreted: Measured) -> None:
        found = interpreted[name]
        assert found["loss"] == pytest.approx(found["expected"], rel=1e-5)
        assert max(found["errors"]) < (1e-4 if name == "scaled logits" else 1e-5)

    def test_without_gradients_or_with_one_of_them_it_is_the_same(self, name: str, interpreted: Measured) -> None:
        found = interpreted[name]
        assert found["without_gradients"] == pytest.approx(found["loss"], rel=1e-6)
        assert max(found["only_hidden"], found["only_head"]) <= 1e-6 * found["largest"]

    def test_positions_without_a_label_get_no_gradient(self, name: str, interpreted: Measured) -> None:
        assert interpreted[name]["largest_ignored"] == 0

    def test_the_head_is_not_modified(self, name: str, interpreted: Measured) -> None:
        assert interpreted[name]["is_untouched"]


@needs_liger
def test_the_case_of_scaled_logits_is_one_of_more_than_200_nats(interpreted: Measured) -> None:
    assert interpreted["scaled logits"]["expected"] / 16 > 200


@needs_liger
@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_where_no_position_has_a_label_loss_and_gradients_are_exactly_zero(name: str, interpreted: Measured) -> None:
    found = interpreted[name]
    assert (found["loss"], found["without_gradients"], found["largest"]) == (0, 0, 0)


@needs_liger
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch finds none here")
@pytest.mark.parametrize("objective", [PLAIN, BOTH], ids=str)
def test_on_a_gpu_it_is_the_reference_in_bf16(objective: Objective) -> None:
    hidden = torch.randn(512, 64, device="cuda", requires_grad=True)
    head = (torch.randn(50257, 64, device="cuda") * 0.1).requires_grad_()
    labels = torch.randint(0, 50257, (512,), device="cuda")
    labels[1::3] = IGNORED
    with torch.autocast("cuda", torch.bfloat16):
        found = liger_loss(hidden, head, labels, objective)
    expected = reference_loss(hidden, head, labels, objective)
    assert found.item() == pytest.approx(expected.item(), rel=2e-3)
    gradients = torch.autograd.grad(found, (hidden, head))
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, (hidden, head)), strict=True):
        assert ((gradient - wanted).norm() / wanted.norm()).item() < 2e-2
