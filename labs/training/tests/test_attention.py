"""Attention within pieces, against a plain reference that knows nothing of groups and kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

from training_lab.attention import Group, SdpaAttention, equal_length_groups

LENGTHS = [[1], [2, 2, 2], [1, 1, 1], [63, 64, 65], [5, 5, 1, 7, 7, 7, 5], [127, 129], [300]]


def cu_seqlens_of(lengths: list[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lengths, initial=0))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    backend = SdpaAttention()
    mixed: torch.Tensor = backend.attend(q, k, v, backend.prepare(cu_seqlens_of(lengths), q.device), 0.0)
    return mixed


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Softmax attention written out with one mask over the whole row."""
    piece_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    index_T = torch.arange(len(piece_T))
    allowed_TT = (piece_T[:, None] == piece_T[None, :]) & (index_T[:, None] >= index_T[None, :])
    scores_HTT = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    weights_HTT = scores_HTT.masked_fill(~allowed_TT, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights_HTT, v)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_values_and_gradients_equal_the_reference(lengths: list[int], dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = (torch.randn(sum(lengths), 2, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    weights = torch.randn(sum(lengths), 2, 16, dtype=dtype)
    found = attend(q, k, v, lengths)
    expected = reference(q, k, v, lengths)
    assert (found - expected).abs().max() < tolerance
    gradients = torch.autograd.grad((found * weights).sum(), (q, k, v))
    expected_gradients = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert (gradient - wanted).abs().max() < tolerance * 10


def test_a_piece_alone_gives_the_same_bits_as_among_others() -> None:
    lengths = [20, 33, 33, 7]
    q, k, v = (torch.randn(sum(lengths), 2, 16) for _ in range(3))
    together = attend(q, k, v, lengths)
    for start, length in zip(cu_seqlens_of(lengths), lengths, strict=False):
        piece = slice(start, start + length)
        alone = attend(q[piece], k[piece], v[piece], [length])
        assert torch.equal(together[piece], alone)


def test_fixed_windows_are_one_group() -> None:
    assert equal_length_groups(range(0, 33 * 8, 8)) == [Group(32, 8)]
    assert equal_length_groups((0, 3, 6, 7, 10)) == [Group(2, 3), Group(1, 1), Group(1, 3)]
