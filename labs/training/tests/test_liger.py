"""Liger's fused loss against the textbook's: on a CPU in Triton's interpreter, on a GPU as it is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from tiny import TRAINING

from training_lab.loss import liger_loss, reference_loss

is_installed = all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton"))
needs_liger = pytest.mark.skipif(not is_installed, reason="liger-kernel and triton are made for Linux only")

# The interpreter must be chosen before Triton is imported, and cannot be left again: a process of its own.
PROGRAM = """
import json
import torch
from training_lab.data.batches import IGNORED
from training_lab.loss import Objective, liger_loss, reference_loss

torch.manual_seed(0)
PLAIN, SMOOTH, BOTH = Objective(), Objective(label_smoothing=0.1), Objective(0.2, 1e-3)
cases = [(24, 16, 65, objective, "some") for objective in (PLAIN, SMOOTH, BOTH)]
cases += [(24, 16, 257, BOTH, "some"), (8, 16, 65, PLAIN, "all"), (8, 16, 50257, PLAIN, "some")]
for tokens, width, vocabulary, objective, ignored in cases:
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = (torch.randn(vocabulary, width) * 0.3).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))
    labels[slice(1, None, 3) if ignored == "some" else slice(None)] = IGNORED
    found = []
    for kernel in (liger_loss, reference_loss):
        loss = kernel(hidden, head, labels, objective)
        found.append((loss.item(), *torch.autograd.grad(loss / 7, (hidden, head))))
    (loss, *gradients), (expected, *wanted) = found
    errors = [((a - b).norm() / (b.norm() + 1e-30)).item() for a, b in zip(gradients, wanted)]
    print(json.dumps({"case": f"{vocabulary} {objective} {ignored}", "loss": loss, "expected": expected,
                      "errors": errors, "largest": max(g.abs().max().item() for g in gradients)}))
"""


@needs_liger
def test_in_the_interpreter_values_and_gradients_equal_the_reference() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TRAINING)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 6
    for case in cases:
        if case["case"].endswith("all"):
            assert (case["loss"], case["largest"]) == (0, 0), case
        else:
            assert case["loss"] == pytest.approx(case["expected"], rel=1e-5), case
            assert max(case["errors"]) < 1e-5, case


@needs_liger
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch finds none here")
def test_on_a_gpu_it_is_the_reference_in_bf16() -> None:
    hidden = torch.randn(512, 64, device="cuda", requires_grad=True)
    head = (torch.randn(50257, 64, device="cuda") * 0.1).requires_grad_()
    labels = torch.randint(0, 50257, (512,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = liger_loss(hidden, head, labels)
    expected = reference_loss(hidden, head, labels)
    assert found.item() == pytest.approx(expected.item(), rel=2e-3)
    gradients = torch.autograd.grad(found, (hidden, head))
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, (hidden, head)), strict=True):
        assert ((gradient - wanted).norm() / wanted.norm()).item() < 2e-2
