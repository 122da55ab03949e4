"""Attention within pieces, against a plain reference that knows nothing of groups and kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

from training_lab.attention import Group, SdpaAttention, VarlenPieces, equal_length_groups, make_attention

LENGTHS = [[1], [2, 2, 2], [1, 1, 1], [63, 64, 65], [5, 5, 1, 7, 7, 7, 5], [127, 128, 129], [300], [3] * 200]


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


def test_one_piece_of_4096_tokens() -> None:
    q, k, v = (torch.randn(4096, 1, 8, requires_grad=True) for _ in range(3))
    found, expected = attend(q, k, v, [4096]), reference(q, k, v, [4096])
    assert (found - expected).abs().max() < 1e-5
    weights = torch.randn(4096, 1, 8)
    gradients = torch.autograd.grad((found * weights).sum(), (q, k, v))
    for gradient, wanted in zip(gradients, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True):
        assert (gradient - wanted).abs().max() < 1e-4


def test_empty_pieces_anywhere_change_no_bit() -> None:
    q, k, v = (torch.randn(70, 2, 16) for _ in range(3))
    assert torch.equal(attend(q, k, v, [30, 30, 10]), attend(q, k, v, [0, 30, 0, 0, 30, 10, 0, 0]))


def test_nothing_of_a_piece_reaches_another_nor_what_is_before_it() -> None:
    lengths, changed = [20, 33, 33, 7], slice(30, 53)  # of the second piece, from its eleventh token on
    inputs = [torch.randn(sum(lengths), 2, 16) for _ in range(3)]
    others = [x.clone() for x in inputs]
    for other in others:
        other[changed] = torch.randn(23, 2, 16)
    results = []
    for one in (inputs, others):
        leaves = [x.requires_grad_() for x in one]
        mixed = attend(leaves[0], leaves[1], leaves[2], lengths)
        outside = mixed[[*range(20), *range(53, sum(lengths))]]
        results.append((mixed, torch.autograd.grad(outside.square().sum(), leaves)))
    (before, gradients_before), (after, gradients_after) = results
    assert torch.equal(before[:30], after[:30])
    assert torch.equal(before[53:], after[53:])
    assert not torch.equal(before[changed], after[changed])
    for gradient, other in zip(gradients_before, gradients_after, strict=True):
        assert torch.equal(gradient, other)
        assert gradient[20:53].abs().max() == 0


def test_the_flash_path_has_the_right_shape_and_type_and_one_size_for_a_run() -> None:
    backend = make_attention("flash", 512)
    row = torch.empty(300, 2, 16, device="meta", dtype=torch.bfloat16)
    pieces = VarlenPieces(torch.empty(5, dtype=torch.int32, device="meta"), 512)
    mixed = backend.attend(row, row, row, pieces, 0.0)
    assert (mixed.shape, mixed.dtype) == (row.shape, row.dtype)
    prepared = backend.prepare((0, 10, 300, 300), torch.device("cpu"))
    assert (prepared.cu_seqlens.tolist(), prepared.cu_seqlens.dtype) == ([0, 10, 300, 300], torch.int32)
    assert prepared.max_seqlen == 512


@pytest.mark.parametrize("name", ["flash", "flex"])
def test_dropout_is_not_silently_left_out(name: str) -> None:
    backend = make_attention(name, 64)
    row = torch.randn(64, 1, 16)
    with pytest.raises(AssertionError, match="without dropout"):
        backend.attend(row, row, row, None, 0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch finds none here")
@pytest.mark.parametrize("lengths", [[1, 63, 64, 65, 1, 62], [127, 129], [256]], ids=str)
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [("flash", torch.bfloat16, 3e-2), ("flex", torch.float32, 1e-4)]
)
def test_on_a_gpu_each_backend_equals_the_piecewise_one(
    name: str, dtype: torch.dtype, tolerance: float, lengths: list[int]
) -> None:
    backend = make_attention(name, 256)
    leaves = [torch.randn(sum(lengths), 2, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    q, k, v = leaves
    found = backend.attend(q, k, v, backend.prepare(cu_seqlens_of(lengths), q.device), 0.0).float()
    expected = attend(q.float(), k.float(), v.float(), lengths)
    assert (found - expected).abs().max() < tolerance
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((found * weights).sum(), leaves)
    for gradient, wanted in zip(gradients, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        assert ((gradient - wanted).norm() / wanted.norm()).item() < tolerance
