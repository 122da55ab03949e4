"""The chunked loss and torch's against the formula in FP64, in value and in both gradients, and what a caller may do.

Liger's is in test_liger.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from training_lab import loss as loss_module
from training_lab.data.batches import IGNORED
from training_lab.footprint import CHUNK_TOKENS
from training_lab.loss import ChunkedLoss, Objective, liger_loss, make_head_loss, reference_loss

SIZES = [1, 7, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 300]
PLAIN = Objective()
OBJECTIVES = [PLAIN, Objective(label_smoothing=0.1), Objective(z_loss=1e-3), Objective(0.1, 1e-3)]
TOLERANCES = [(torch.float32, 1e-5), (torch.float64, 1e-10)]

each_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
each_kernel = pytest.mark.parametrize("kernel", [ChunkedLoss(), reference_loss], ids=["chunked", "reference"])
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=["fp32", "fp64"])

Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Objective], torch.Tensor]


def make_problem(num_tokens: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> Problem:
    """Every third position has no label."""
    hidden = torch.randn(num_tokens, 32, dtype=dtype, requires_grad=True)
    head = (torch.randn(vocab_size, 32, dtype=dtype) * 0.3).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_tokens,))
    labels[1::3] = IGNORED
    return hidden, head, labels


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def written_out(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, objective: Objective = PLAIN
) -> torch.Tensor:
    """The formula in FP64, with nothing of torch's losses."""
    has_label = labels != IGNORED
    logits = hidden.double()[has_label] @ head.double().T
    top = logits.detach().max(1).values if len(logits) else logits.new_zeros(0)
    lse = (logits - top[:, None]).exp().sum(1).log() + top
    label_logits = (logits * (torch.arange(len(head)) == labels[has_label][:, None])).sum(1)
    mean_logits = logits.sum(1) / len(head)
    s, z = objective.label_smoothing, objective.z_loss
    return ((1 - s) * (lse - label_logits) + s * (lse - mean_logits) + z * lse**2).sum()


def results(kernel: Kernel, problem: Problem, objective: Objective = PLAIN, upstream: float = 1) -> list[torch.Tensor]:
    """The loss, and its gradients by hidden states and head."""
    hidden, head, labels = problem
    loss = kernel(hidden, head, labels, objective)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, head), torch.tensor(upstream, dtype=loss.dtype))]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for name, one, wanted in zip(("loss", "hidden", "head"), found, expected, strict=True):
        assert one.shape == wanted.shape, name
        assert one.isfinite().all(), name
        assert relative_error(one, wanted) < tolerance, name


def are_the_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, wanted) for one, wanted in zip(found, expected, strict=True))


# Equal to the formula


@pytest.mark.parametrize("vocab_size", [65, 257])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_any_number_of_tokens_gives_the_value_and_gradients_of_the_reference(num_tokens: int, vocab_size: int) -> None:
    hidden, head, labels = make_problem(num_tokens, vocab_size)
    found, expected = ChunkedLoss()(hidden, head, labels), reference_loss(hidden.double(), head.double(), labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(found / 3, (hidden, head))
    expected_gradients = torch.autograd.grad(expected / 3, (hidden, head))
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert relative_error(gradient, wanted) < 1e-5


@each_objective
@each_kernel
@each_dtype
@pytest.mark.parametrize(("vocab_size", "num_tokens"), [(64, 90), (65, 90), (257, 60), (5003, 30), (50257, 9)])
def test_every_objective_equals_its_formula(
    vocab_size: int, num_tokens: int, dtype: torch.dtype, tolerance: float, kernel: Kernel, objective: Objective
) -> None:
    if kernel is reference_loss and objective.label_smoothing:
        tolerance *= 2  # torch's own is 1.7e-5 off over 50,257 words with the AVX2 of some processors
    problem = make_problem(num_tokens, vocab_size, dtype)
    found = results(kernel, problem, objective)
    assert {one.dtype for one in found} == {dtype}
    assert_close(found, results(written_out, problem, objective), tolerance)


@each_kernel
def test_the_loss_is_a_sum_in_nats(kernel: Kernel) -> None:
    hidden, head, labels = make_problem(30, 65)
    loss = kernel(hidden, torch.zeros_like(head), labels, Objective(0.3, 0.01))
    surprise = torch.tensor(65.0).log().item()
    assert loss.shape == ()
    assert loss.item() == pytest.approx(20 * (surprise + 0.01 * surprise**2), rel=1e-6)


@each_objective
@each_dtype
def test_no_scale_of_logits_is_too_large(dtype: torch.dtype, tolerance: float, objective: Objective) -> None:
    hidden, head, labels = make_problem(40, 65, dtype)
    problem = leaf(hidden * 40), leaf(head * 10), labels
    expected = results(written_out, problem, objective)
    assert expected[0].item() / (labels != IGNORED).sum() > 200  # e^-200 is 0 in FP32
    # A logit of 1,000 is known to 6e-5 in FP32, and so is the logarithm of its probability.
    assert_close(results(ChunkedLoss(), problem, objective), expected, tolerance * 20)


def test_labels_that_the_model_is_sure_of_cost_nothing_and_never_less() -> None:
    hidden, head, _ = make_problem(40, 65)
    problem = leaf(hidden * 40), leaf(head * 10), (hidden @ head.T).argmax(1)
    found, expected = results(ChunkedLoss(), problem), results(written_out, problem)
    assert found[0] >= 0
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-4, abs=40 * 1e-4)


def test_under_autocast_the_products_are_in_its_type_and_all_else_is_fp32() -> None:
    hidden, head, labels = make_problem(200, 257)
    for objective in OBJECTIVES:
        with torch.autocast("cpu", torch.bfloat16):
            found = ChunkedLoss()(hidden, head, labels, objective)
            expected = reference_loss(hidden, head, labels, objective)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        gradients = torch.autograd.grad(found, (hidden, head))
        expected_gradients = torch.autograd.grad(expected, (hidden, head))
        for gradient, wanted in zip(gradients, expected_gradients, strict=True):
            assert gradient.dtype == torch.float32
            assert relative_error(gradient, wanted) < 0.01


@each_objective
def test_it_takes_what_is_not_contiguous(objective: Objective) -> None:
    hidden, head, labels = make_problem(60, 257)
    views = (
        leaf(hidden.detach().T.contiguous()).T,
        leaf(head.detach().T.contiguous()).T,
        labels.repeat_interleave(2)[::2],
    )
    assert not any(view.is_contiguous() for view in views)
    expected = results(written_out, (hidden, head, labels), objective)
    assert_close(results(ChunkedLoss(), views, objective), expected, 1e-5)


# Positions without a label


@each_objective
@each_kernel
def test_where_no_position_has_a_label_loss_and_gradients_are_exactly_zero(
    kernel: Kernel, objective: Objective
) -> None:
    hidden, head, labels = make_problem(50, 65)
    found = results(kernel, (hidden, head, torch.full_like(labels, IGNORED)), objective)
    assert are_the_same_bits(found, [torch.tensor(0.0), torch.zeros_like(hidden), torch.zeros_like(head)])


@each_objective
@each_kernel
def test_a_position_without_a_label_changes_nothing(
    kernel: Kernel, objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", 8)
    hidden, head, labels = make_problem(50, 257)
    labels[16:24] = IGNORED  # a whole chunk
    has_label = labels != IGNORED
    loss, gradient, head_gradient = results(kernel, (hidden, head, labels), objective)
    assert gradient[~has_label].abs().max() == 0
    found = [loss, gradient[has_label], head_gradient]
    assert_close(found, results(kernel, (leaf(hidden[has_label]), head, labels[has_label]), objective), 1e-6)
    other = torch.where(has_label.unsqueeze(1), hidden, 9.0)
    assert are_the_same_bits(found[:1], [kernel(other, head, labels, objective)])


@each_objective
def test_batches_with_and_without_gaps_meet_the_formula(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", 7)
    hidden, head, labels = make_problem(31, 65)
    labels = torch.randint(0, 65, (31,))
    for gaps in ([], [0], [30], [7, 13], list(range(7, 14)), list(range(30)), list(range(28, 31))):
        gapped = labels.clone()
        gapped[gaps] = IGNORED
        problem = hidden, head, gapped
        assert_close(results(ChunkedLoss(), problem, objective), results(written_out, problem, objective), 1e-5)


# Chunks, batches and padding


@each_objective
@pytest.mark.parametrize(("num_tokens", "chunk"), [(100, 7), (100, 64), (1100, 1024)])
def test_chunks_of_any_size_give_the_same(
    num_tokens: int, chunk: int, objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(num_tokens, 257)
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", num_tokens)
    whole = results(ChunkedLoss(), problem, objective)
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", chunk)
    found = results(ChunkedLoss(), problem, objective)
    assert_close(found, whole, 1e-6)
    assert_close(found, results(written_out, problem, objective), 1e-6)


@pytest.mark.parametrize("chunk", [7, 64])
def test_no_more_rows_of_logits_exist_than_a_chunk_has(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", chunk)
    kernel = ChunkedLoss()
    results(kernel, make_problem(100, 257))
    assert kernel._buffers["logits"].numel() == chunk * 320


@each_objective
@each_kernel
def test_the_parts_of_a_batch_add_up_to_the_whole(kernel: Kernel, objective: Objective) -> None:
    hidden, head, labels = make_problem(90, 257)
    whole = results(kernel, (hidden, head, labels), objective)
    total = 0.0
    for first, last in ((0, 1), (1, 60), (60, 90)):
        loss = kernel(hidden[first:last], head, labels[first:last], objective)
        loss.backward()
        total += loss.item()
    assert hidden.grad is not None
    assert head.grad is not None
    assert_close([torch.tensor(total), hidden.grad, head.grad], whole, 1e-6)


@each_objective
@pytest.mark.parametrize("aligned", [1, 2, 128, 1000])
def test_how_far_the_vocabulary_is_padded_changes_nothing(
    aligned: int, objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(60, 257)
    expected = results(ChunkedLoss(), problem, objective)
    monkeypatch.setattr(loss_module, "ALIGNED", aligned)
    assert_close(results(ChunkedLoss(), problem, objective), expected, 1e-6)


@each_objective
@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 127])
def test_padded_columns_never_get_gradient(vocab_size: int, ignored: bool, objective: Objective) -> None:
    scores = torch.randn(20, 128, dtype=torch.float64)
    scores[:, vocab_size:] = 100.0  # were it seen, it would take all the probability
    labels = torch.randint(0, vocab_size, (20,))
    if ignored:
        labels[::4] = IGNORED
    lse = scores[:, :vocab_size].logsumexp(1) * (labels != IGNORED)
    loss_module._loss_to_gradient(scores, labels, vocab_size, objective)
    assert scores[:, vocab_size:].abs().sum() == 0
    # Probability is only moved, so that the rows' sums are those of the z-loss.
    assert torch.allclose(scores.sum(1), 2 * objective.z_loss * lse, rtol=0, atol=1e-12)


# What a caller may do


@each_kernel
@pytest.mark.parametrize("upstream", [0.0, 1.0, -2.5, 1e-6, 65536.0])
def test_gradients_are_linear_in_what_comes_from_above(upstream: float, kernel: Kernel) -> None:
    problem = make_problem(50, 257)
    _, *once = results(kernel, problem, OBJECTIVES[-1])
    _, *scaled = results(kernel, problem, OBJECTIVES[-1], upstream)
    for one, many in zip(once, scaled, strict=True):
        assert (many - one * upstream).norm() <= 1e-6 * abs(upstream) * one.norm()


def test_a_second_backward_is_refused_because_the_gradients_are_spent() -> None:
    hidden, head, labels = make_problem(20, 65)
    loss = ChunkedLoss()(hidden, head, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(AttributeError):
        loss.backward()


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
@each_objective
def test_it_forms_the_gradients_that_are_asked_for(objective: Objective, needs: tuple[bool, bool]) -> None:
    hidden, head, labels = make_problem(50, 65)
    value, *both = results(ChunkedLoss(), (hidden, head, labels), objective)
    inputs = [x.detach().requires_grad_(need) for x, need in zip((hidden, head), needs, strict=True)]
    loss = ChunkedLoss()(inputs[0], inputs[1], labels, objective)
    assert loss.requires_grad == any(needs)
    assert torch.equal(loss, value)
    if any(needs):
        loss.backward()
    for one, gradient, need in zip(inputs, both, needs, strict=True):
        assert (one.grad is not None) == need
        assert one.grad is None or torch.equal(one.grad, gradient)


@each_objective
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients_it_is_the_same_number(
    mode: type[torch.inference_mode | torch.no_grad], objective: Objective
) -> None:
    problem = make_problem(CHUNK_TOKENS + 100, 257)
    with mode():
        measured = ChunkedLoss()(*problem, objective)
    assert not measured.requires_grad
    assert torch.equal(measured, ChunkedLoss()(*problem, objective))


@pytest.mark.parametrize("first", [(5, 65), (60, 257), (1200, 1000)], ids=str)
def test_a_kernel_first_used_in_evaluation_trains_like_a_new_one(first: tuple[int, int]) -> None:
    kernel, problem = ChunkedLoss(), make_problem(60, 257)
    with torch.inference_mode():
        kernel(*make_problem(*first))
    assert are_the_same_bits(results(kernel, problem), results(ChunkedLoss(), problem))
    with torch.inference_mode():
        measured = kernel(*problem)
    assert torch.equal(measured, ChunkedLoss()(*problem))


@each_objective
def test_its_buffers_carry_nothing_from_call_to_call(objective: Objective) -> None:
    kernel, problem = ChunkedLoss(), make_problem(100, 65)
    first = results(kernel, problem, objective)
    for other in ((1100, 65), (20, 1000), (3, 64), (100, 127)):
        results(kernel, make_problem(*other), objective)
        assert are_the_same_bits(results(kernel, problem, objective), first)
    with torch.autocast("cpu", torch.bfloat16):
        kernel(*problem, objective)
    results(kernel, make_problem(10, 65, torch.float64), objective)
    assert are_the_same_bits(results(kernel, problem, objective), first)
    for buffer in kernel._buffers.values():
        buffer.fill_(torch.nan)
    assert are_the_same_bits(results(kernel, problem, objective), first)


def test_losses_of_two_batches_may_be_outstanding_together() -> None:
    kernel, problem, other = ChunkedLoss(), make_problem(40, 65), make_problem(300, 257)
    expected = [*results(kernel, problem)[1:], *results(kernel, other)[1:]]
    losses = kernel(*problem, PLAIN), kernel(*other, PLAIN)
    found = torch.autograd.grad(losses, (*problem[:2], *other[:2]))
    assert are_the_same_bits(list(found), expected)


@each_kernel
def test_what_is_passed_in_is_not_modified(kernel: Kernel) -> None:
    problem = make_problem(100, 65)
    before = [one.detach().clone() for one in problem]
    for objective in OBJECTIVES:
        results(kernel, problem, objective)
    assert are_the_same_bits(list(problem), before)
    with torch.autocast("cpu", torch.bfloat16):
        kernel(*problem, PLAIN)
    assert are_the_same_bits(list(problem), before)


def test_the_name_of_a_kernel_makes_it_and_no_two_runs_share_buffers() -> None:
    assert make_head_loss("reference") is reference_loss
    assert make_head_loss("liger") is liger_loss
    assert isinstance(make_head_loss("chunked"), ChunkedLoss)
    assert make_head_loss("chunked") is not make_head_loss("chunked")


def test_no_tokens_cost_nothing() -> None:
    hidden, head, labels = make_problem(0, 65)
    loss = ChunkedLoss()(hidden, head, labels)
    assert loss.item() == reference_loss(hidden, head, labels).item() == 0
    for gradient in torch.autograd.grad(loss, (hidden, head)):
        assert not gradient.any()


def test_what_is_not_a_number_at_a_position_without_a_label_stays_out_of_the_loss() -> None:
    hidden, head, labels = make_problem(30, 65)
    expected = ChunkedLoss()(hidden, head, labels).item()
    with torch.no_grad():
        hidden[labels == IGNORED] = torch.nan
    assert ChunkedLoss()(hidden, head, labels).item() == expected
