"""The chunked loss against the textbook's, in value and in both gradients."""

from __future__ import annotations

import pytest
import torch

from training_lab.data.batches import IGNORED
from training_lab.loss import CHUNK_TOKENS, ChunkedLoss, reference_loss

SIZES = [1, 7, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 300]


def make_problem(num_tokens: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(num_tokens, 32, requires_grad=True)
    head = (torch.randn(vocab_size, 32) * 0.3).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_tokens,))
    labels[1::3] = IGNORED
    return hidden, head, labels


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("vocab_size", [65, 257, 5003])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_value_and_gradients_equal_the_reference(num_tokens: int, vocab_size: int) -> None:
    hidden, head, labels = make_problem(num_tokens, vocab_size)
    found, expected = ChunkedLoss()(hidden, head, labels), reference_loss(hidden.double(), head.double(), labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(found / 3, (hidden, head))
    expected_gradients = torch.autograd.grad(expected / 3, (hidden, head))
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert relative_error(gradient, wanted) < 1e-5


def test_the_vocabulary_of_gpt2() -> None:
    hidden, head, labels = make_problem(64, 50257)
    found, expected = ChunkedLoss()(hidden, head, labels), reference_loss(hidden, head, labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(found, head)
    (wanted,) = torch.autograd.grad(expected, head)
    assert relative_error(gradient, wanted) < 1e-5


def test_without_gradients_it_is_the_same_number() -> None:
    hidden, head, labels = make_problem(CHUNK_TOKENS + 100, 257)
    with torch.inference_mode():
        measured = ChunkedLoss()(hidden, head, labels).item()
    assert measured == pytest.approx(ChunkedLoss()(hidden, head, labels).item(), rel=1e-6)


def test_positions_without_a_label_contribute_nothing_even_when_there_are_no_others() -> None:
    hidden, head, labels = make_problem(50, 65)
    loss = ChunkedLoss()(hidden, head, torch.full_like(labels, IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert hidden.grad.abs().max() == 0
    assert head.grad is not None
    assert head.grad.abs().max() == 0


def test_under_autocast_the_products_are_in_its_type_and_all_else_is_fp32() -> None:
    hidden, head, labels = make_problem(200, 257)
    with torch.autocast("cpu", torch.bfloat16):
        found = ChunkedLoss()(hidden, head, labels)
        expected = reference_loss(hidden, head, labels)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(found, (hidden, head))
    expected_gradients = torch.autograd.grad(expected, (hidden, head))
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, wanted) < 0.01
