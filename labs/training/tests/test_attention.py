"""Attention within pieces, against a plain reference that knows nothing of groups and kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from training_lab.attention import (
    FlashAttention,
    FlexAttention,
    Group,
    SdpaAttention,
    VarlenPieces,
    equal_length_groups,
    make_attention,
)
from training_lab.config import ModelConfig
from training_lab.data.batches import IGNORED, Batch, cut_out, pad
from training_lab.model import Decoder, initialise

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
        assert (gradient - wanted).abs().max() < tolerance


def attend_with_gradients(
    inputs: list[torch.Tensor], weights: torch.Tensor, lengths: list[int]
) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of its weighted sum: by queries, keys, values."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    mixed = attend(leaves[0], leaves[1], leaves[2], lengths)
    return (mixed.detach(), *torch.autograd.grad((mixed * weights).sum(), leaves))


@pytest.mark.parametrize(
    "lengths", [[20, 33, 33, 7], [1, 63, 64, 65, 64, 64, 1, 2, 2], [127, 128, 128, 129, 128], [8] * 32], ids=str
)
def test_a_piece_alone_gives_the_same_bits_as_among_others(lengths: list[int]) -> None:
    inputs = [torch.randn(sum(lengths), 2, 16) for _ in range(3)]
    weights = torch.randn(sum(lengths), 2, 16)
    together = attend_with_gradients(inputs, weights, lengths)
    for start, end in itertools.pairwise(cu_seqlens_of(lengths)):
        alone = attend_with_gradients([x[start:end] for x in inputs], weights[start:end], [end - start])
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[start:end], part)


def test_the_views_that_the_model_cuts_out_of_one_projection_give_the_same_bits_as_copies() -> None:
    lengths = [63, 64, 64, 1]
    qkv = torch.randn(sum(lengths), 3, 2, 16)
    q, k, v = qkv.unbind(dim=1)
    assert not q.is_contiguous()
    assert torch.equal(attend(q, k, v, lengths), attend(q.contiguous(), k.contiguous(), v.contiguous(), lengths))


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
        assert (gradient - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("lengths", [[30, 30, 0, 10], [30, 30, 10, 0, 0], [0, 30, 0, 0, 30, 10, 0, 0]], ids=str)
def test_empty_pieces_anywhere_change_no_bit_of_value_or_gradient(lengths: list[int]) -> None:
    inputs, weights = [torch.randn(70, 2, 16) for _ in range(3)], torch.randn(70, 2, 16)
    assert equal_length_groups(cu_seqlens_of(lengths)) == [Group(2, 30), Group(1, 10)]
    without, with_empties = (attend_with_gradients(inputs, weights, each) for each in ([30, 30, 10], lengths))
    for expected, found in zip(without, with_empties, strict=True):
        assert torch.equal(found, expected)


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


@pytest.mark.parametrize("changed_piece", range(5))
def test_changing_a_piece_changes_no_bit_of_the_values_or_gradients_of_any_other(changed_piece: int) -> None:
    lengths = [20, 33, 33, 1, 7]
    start, end = cu_seqlens_of(lengths)[changed_piece : changed_piece + 2]
    inputs, weights = [torch.randn(sum(lengths), 2, 16) for _ in range(3)], torch.randn(sum(lengths), 2, 16)
    others = [x.clone() for x in inputs]
    for other in others:
        other[start:end] = torch.nan  # which stays, whatever weight it is given
    elsewhere = [*range(start), *range(end, sum(lengths))]
    before, after = (attend_with_gradients(one, weights, lengths) for one in (inputs, others))
    for expected, found in zip(before, after, strict=True):
        assert torch.equal(found[elsewhere], expected[elsewhere])
    assert after[0][start:end].isnan().all()


@pytest.mark.parametrize("place", [20, 21, 52, 86, 92])
def test_changing_a_token_changes_no_bit_of_what_earlier_positions_give_and_take(place: int) -> None:
    lengths = [20, 33, 33, 7]
    inputs, weights = [torch.randn(sum(lengths), 2, 16) for _ in range(3)], torch.randn(sum(lengths), 2, 16)
    weights[place:] = 0  # the loss is of earlier positions alone
    others = [x.clone() for x in inputs]
    for other in others:
        other[place:] = torch.randn_like(other[place:])
    (before, *gradients_before), (after, *gradients_after) = (
        attend_with_gradients(one, weights, lengths) for one in (inputs, others)
    )
    assert torch.equal(after[:place], before[:place])
    for gradient, other in zip(gradients_before, gradients_after, strict=True):
        assert torch.equal(gradient, other)
        assert gradient[place:].abs().max() == 0


def make_decoder() -> Decoder:
    """In FP64, in which another order of additions changes nothing that could be seen."""
    model = Decoder(ModelConfig(num_layers=2, d_model=32, num_heads=2, max_positions=64), 50)
    initialise(model, 1)
    return model.double()


def random_row(lengths: list[int]) -> Batch:
    """A row of pieces, each position of which is to predict some token."""
    tokens, labels = (torch.randint(0, 50, (sum(lengths),)) for _ in range(2))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(tokens, labels, positions, cu_seqlens_of(lengths), sum(lengths))


def hidden_and_gradients(model: Decoder, rows: list[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The hidden states of all positions that have a label, and the gradients of their loss added up over the rows."""
    model.zero_grad()
    kept = []
    for row in rows:
        hidden = model(row.tokens_T, row.positions_T, row.cu_seqlens)
        logits = hidden @ model.head_Vd.T
        torch.nn.functional.cross_entropy(logits, row.labels_T, ignore_index=IGNORED, reduction="sum").backward()
        kept.append(hidden.detach()[row.labels_T != IGNORED])
    return torch.cat(kept), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cuts", [range(9), (0, 1, 8), (0, 3, 4, 8), (0, 4, 8)], ids=str)
@pytest.mark.parametrize("is_padded", [False, True])
def test_the_decoder_gives_the_same_for_packed_pieces_as_for_each_alone_and_in_any_micro_rows(
    cuts: tuple[int, ...], is_padded: bool
) -> None:
    model, row = make_decoder(), random_row([1, 2, 20, 20, 20, 63, 64, 9])
    parts = [cut_out(row, first, last) for first, last in itertools.pairwise(cuts)]
    if is_padded:  # to one shape, as the micro-batches of a run are
        parts = [pad(part, 256, 16, longest=64) for part in parts]
    (together, gradients), (apart, other_gradients) = (hidden_and_gradients(model, rows) for rows in ([row], parts))
    torch.testing.assert_close(apart, together, rtol=0, atol=1e-10)
    assert gradients.keys() == other_gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=0, atol=1e-10, msg=name)


def test_in_the_whole_decoder_no_bit_of_another_piece_or_an_earlier_position_changes() -> None:
    model, lengths, place = make_decoder(), [20, 33, 33, 0, 7], 30
    row = random_row(lengths)
    changed = row.tokens_T.clone()
    changed[place:53] = (changed[place:53] + 1) % 50
    elsewhere = [*range(place), *range(53, sum(lengths))]
    results = []
    for tokens in (row.tokens_T, changed):
        embedded: list[torch.Tensor] = []
        hook = model.token_embedding.register_forward_hook(lambda module, given, out, seen=embedded: seen.append(out))
        hidden = model(tokens, row.positions_T, row.cu_seqlens)
        hook.remove()
        results.append((hidden, *torch.autograd.grad(hidden[elsewhere].square().sum(), embedded)))
    (before, gradient_before), (after, gradient_after) = results
    assert torch.equal(after[elsewhere], before[elsewhere])
    assert (after[place:53] != before[place:53]).any(dim=1).all()
    assert torch.equal(gradient_after, gradient_before)
    assert gradient_before[place:53].abs().max() == 0


def test_each_name_gives_its_backend() -> None:
    backends = [make_attention(name, 512) for name in ("sdpa", "flex", "flash")]
    assert [type(backend) for backend in backends] == [SdpaAttention, FlexAttention, FlashAttention]
    assert [backend.name for backend in backends] == ["sdpa", "flex", "flash"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_takes_the_views_that_the_model_makes(dtype: torch.dtype) -> None:
    q, k, v = torch.empty(300, 3, 2, 16, device="meta", dtype=dtype).unbind(dim=1)
    pieces = VarlenPieces(torch.empty(5, dtype=torch.int32, device="meta"), 512)
    mixed = make_attention("flash", 512).attend(q, k, v, pieces, 0.0)
    assert (mixed.shape, mixed.dtype) == (q.shape, dtype)


def test_flash_is_given_borders_of_one_shape_for_all_rows_of_a_run() -> None:
    backend, shapes = FlashAttention(64), set()
    for lengths in ([64], [1, 2, 3], [30, 30]):
        row = pad(random_row(lengths), 64, 6, longest=64)
        prepared = backend.prepare(row.cu_seqlens, torch.device("cpu"))
        assert prepared.cu_seqlens.tolist() == list(row.cu_seqlens)
        shapes.add((prepared.cu_seqlens.shape, prepared.cu_seqlens.dtype, prepared.max_seqlen))
    assert shapes == {((7,), torch.int32, 64)}


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


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch finds none here"),
]


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [("flash", torch.bfloat16, 2e-2), ("flex", torch.float32, 1e-4)]
)
class TestOnAGpu:
    """The fast backends against the piecewise one in FP32, on views such as the model makes."""

    pytestmark = needs_gpu

    @pytest.mark.parametrize("lengths", [[1, 63, 64, 65, 1, 62], [127, 129], [256], [2, 0, 127, 0, 127, 0, 0]], ids=str)
    def test_values_and_gradients_equal_the_piecewise_ones(
        self, name: str, dtype: torch.dtype, tolerance: float, lengths: list[int]
    ) -> None:
        backend = make_attention(name, 256)
        qkv = torch.randn(256, 3, 2, 64, device="cuda", dtype=dtype, requires_grad=True)
        q, k, v = qkv.unbind(dim=1)
        weights = torch.randn(256, 2, 64, device="cuda")
        found = backend.attend(q, k, v, backend.prepare(cu_seqlens_of(lengths), q.device), 0.0)
        expected = attend(q.float(), k.float(), v.float(), lengths)
        assert (found.shape, found.dtype) == (q.shape, dtype)
        assert ((found - expected).norm() / expected.norm()).item() < tolerance
        gradient, wanted = (torch.autograd.grad((out * weights).sum(), qkv)[0].float() for out in (found, expected))
        for one, other in zip(gradient.unbind(dim=1), wanted.unbind(dim=1), strict=True):
            assert ((one - other).norm() / other.norm()).item() < tolerance

    def test_nothing_of_a_piece_reaches_another_nor_what_is_before_it(
        self, name: str, dtype: torch.dtype, tolerance: float
    ) -> None:
        backend, lengths, changed = make_attention(name, 256), [60, 133, 0, 63], slice(100, 193)
        pieces: Any = backend.prepare(cu_seqlens_of(lengths), torch.device("cuda"))
        qkv = torch.randn(256, 3, 2, 64, device="cuda", dtype=dtype)
        other = qkv.clone()
        other[changed] = torch.randn_like(other[changed])
        outputs, gradients = [], []
        for one in (qkv, other):
            q, k, v = one.requires_grad_().unbind(dim=1)
            mixed = backend.attend(q, k, v, pieces, 0.0)
            outside = torch.cat([mixed[:100], mixed[193:]])
            outputs.append(mixed.detach())
            gradients.append(torch.autograd.grad(outside.float().square().sum(), one)[0])
        before, after = outputs
        assert torch.equal(before[:100], after[:100])
        assert torch.equal(before[193:], after[193:])
        assert not torch.equal(before[changed], after[changed])
        for gradient in gradients:  # not compared bit by bit: a kernel may add up in any order
            assert gradient[changed].abs().max() == 0
        torch.testing.assert_close(gradients[0], gradients[1], rtol=tolerance, atol=tolerance)
