"""The chunked loss against the textbook's, in value and in both gradients."""

from __future__ import annotations

import pytest
import torch

from training_lab import loss as loss_module
from training_lab.data.batches import IGNORED
from training_lab.loss import CHUNK_TOKENS, ChunkedLoss, Objective, reference_loss

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


OBJECTIVES = [Objective(), Objective(label_smoothing=0.1), Objective(z_loss=1e-3), Objective(0.2, 1e-2)]


def written_out(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, objective: Objective = OBJECTIVES[0]
) -> torch.Tensor:
    """The formula, token by token, with nothing of torch's losses."""
    logits = hidden @ head.T
    total = logits.new_zeros(())
    for row, label in zip(logits, labels.tolist(), strict=True):
        if label == IGNORED:
            continue
        lse = row.exp().sum().log()
        s = objective.label_smoothing
        total = total + (1 - s) * (lse - row[label]) + s * (lse - row.mean()) + objective.z_loss * lse**2
    return total


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("kernel", [ChunkedLoss(), reference_loss], ids=["chunked", "reference"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("vocab_size", [64, 65, 257])
def test_every_objective_equals_its_formula(
    vocab_size: int, dtype: torch.dtype, tolerance: float, kernel: loss_module.HeadLoss, objective: Objective
) -> None:
    hidden, head, labels = make_problem(23, vocab_size)
    hidden, head = (x.detach().to(dtype).requires_grad_() for x in (hidden, head))
    found, expected = kernel(hidden, head, labels, objective), written_out(hidden, head, labels, objective)
    assert found.item() == pytest.approx(expected.item(), rel=tolerance)
    gradients = torch.autograd.grad(found / 7, (hidden, head))
    expected_gradients = torch.autograd.grad(expected / 7, (hidden, head))
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert relative_error(gradient, wanted) < tolerance * 10


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("chunk", [7, 64, 1024])
def test_chunks_of_any_size_give_the_same(chunk: int, objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", chunk)
    hidden, head, labels = make_problem(100, 257)
    found, expected = (kernel(hidden, head, labels, objective) for kernel in (ChunkedLoss(), reference_loss))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(found, (hidden, head))
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, (hidden, head)), strict=True):
        assert relative_error(gradient, wanted) < 1e-6


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_parts_of_a_batch_add_up_to_the_whole(objective: Objective) -> None:
    hidden, head, labels = make_problem(90, 257)
    kernel = ChunkedLoss()
    whole = kernel(hidden, head, labels, objective)
    parts = [
        kernel(hidden[first:last], head, labels[first:last], objective) for first, last in ((0, 1), (1, 60), (60, 90))
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
def test_it_forms_the_gradients_that_are_asked_for(needs: tuple[bool, bool]) -> None:
    hidden, head, labels = make_problem(50, 65)
    both = torch.autograd.grad(ChunkedLoss()(hidden, head, labels), (hidden, head))
    inputs = [x.detach().requires_grad_(need) for x, need in zip((hidden, head), needs, strict=True)]
    loss = ChunkedLoss()(inputs[0], inputs[1], labels)
    assert loss.requires_grad == any(needs)
    if any(needs):
        loss.backward()
    for one, gradient, need in zip(inputs, both, needs, strict=True):
        assert (one.grad is not None) == need
        assert one.grad is None or torch.equal(one.grad, gradient)


def test_its_buffers_carry_nothing_from_call_to_call() -> None:
    kernel = ChunkedLoss()

    def call(num_tokens: int, vocab_size: int) -> list[torch.Tensor]:
        torch.manual_seed(num_tokens)
        hidden, head, labels = make_problem(num_tokens, vocab_size)
        before = head.detach().clone()
        loss = kernel(hidden, head, labels)
        gradients = torch.autograd.grad(loss, (hidden, head))
        assert torch.equal(head, before)
        return [loss.detach(), *gradients]

    with torch.inference_mode():  # the first use may well be an evaluation
        kernel(*make_problem(30, 65))
    first = call(100, 65)
    for other in ((1500, 65), (20, 1000), (3, 64)):
        call(*other)
    assert all(torch.equal(a, b) for a, b in zip(first, call(100, 65), strict=True))


def test_labels_that_the_model_is_sure_to_be_wrong_about_cost_what_they_should() -> None:
    hidden, head, labels = make_problem(40, 65)
    hidden, head = (hidden.detach() * 40).requires_grad_(), (head.detach() * 10).requires_grad_()
    found, expected = ChunkedLoss()(hidden, head, labels), reference_loss(hidden.double(), head.double(), labels)
    assert expected.item() / 40 > 200  # e^-200 is 0 in FP32
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = torch.autograd.grad(found, (hidden, head))
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, (hidden, head)), strict=True):
        assert relative_error(gradient, wanted) < 1e-4
