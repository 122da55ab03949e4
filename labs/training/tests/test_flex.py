"""FlexAttention's mask of pieces, against torch's own from the definition, and its forward pass, which a CPU has."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from training_lab.attention import BLOCK, FlexAttention, SdpaAttention, piece_mask
from training_lab.config import ModelConfig
from training_lab.model import Decoder, initialise

CPU = torch.device("cpu")
SPECIAL = [
    [1], [2], [127], [128], [129], [256], [257], [300], [384], [127, 129], [129, 127], [128, 128], [256, 128], [1, 256],
    [63, 64, 65], [0, 0, 200], [100, 0, 0, 100], [5, 5, 1, 250, 128, 128, 0, 0], [1, 127, 1, 127, 1], [1] * 130,
]  # fmt: skip
GENERATOR = np.random.default_rng(7)
RANDOM = [GENERATOR.integers(0, most, 12).tolist() for most in (5, 50, 150, 400) for _ in range(3)]
WHOLE_BLOCKS = [(BLOCK * GENERATOR.integers(0, 4, 6)).tolist() for _ in range(5)]


def borders(lengths: list[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lengths, initial=0))


@pytest.mark.parametrize("lengths", [*SPECIAL, *RANDOM, *WHOLE_BLOCKS], ids=str)
def test_the_mask_is_what_torch_makes_of_the_definition(lengths: list[int]) -> None:
    pieces_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    size = len(pieces_T)

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (pieces_T[query] == pieces_T[key]) & (query >= key)

    expected, found = create_block_mask(sees, 1, 1, size, size, device="cpu"), piece_mask(borders(lengths), CPU)
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert found.shape == expected.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, listed, wanted = (
            getattr(found, f"{kind}_num_blocks")[0, 0],
            getattr(found, f"{kind}_indices")[0, 0],
            getattr(expected, f"{kind}_indices")[0, 0],
        )
        assert listed.dtype == torch.int32
        for count, some, others in zip(counts.tolist(), listed.tolist(), wanted.tolist(), strict=True):
            assert sorted(some[:count]) == sorted(others[:count]), kind


def computed_pairs(lengths: list[int]) -> torch.Tensor:
    """The pairs of tokens that a kernel lets through, [T, T]: of a full block all, of a partial one those that
    `mask_mod` allows, of others none. (Without compiling, torch asks `mask_mod` alone, and never looks at blocks.)"""
    mask, size = piece_mask(borders(lengths), CPU), sum(lengths)
    places, zero = torch.arange(size), torch.zeros((), dtype=torch.int64)
    allowed_TT = mask.mask_mod(zero, zero, places[:, None], places[None, :])
    pairs_TT = torch.zeros(size, size, dtype=torch.bool)
    for counts, indices, is_full in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            queries = slice(row * BLOCK, (row + 1) * BLOCK)
            for column in indices[0, 0, row, :count].tolist():
                keys = slice(column * BLOCK, (column + 1) * BLOCK)
                assert not pairs_TT[queries, keys].any(), "a block that is computed twice"
                pairs_TT[queries, keys] = True if is_full else allowed_TT[queries, keys]
    return pairs_TT


@pytest.mark.parametrize("lengths", [*SPECIAL, *RANDOM, *WHOLE_BLOCKS], ids=str)
def test_block_by_block_exactly_the_earlier_tokens_of_the_same_piece_are_seen(lengths: list[int]) -> None:
    expected_TT = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths if length)).bool()
    assert torch.equal(computed_pairs(lengths), expected_TT)


@pytest.mark.parametrize("seed", range(6))
def test_empty_pieces_change_nothing_of_the_mask(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(0, 200, 10)
    lengths[[0, 4, 5, 9]] = 0
    without = [length for length in lengths.tolist() if length]
    one, other = piece_mask(borders(lengths.tolist()), CPU), piece_mask(borders(without), CPU)
    for kind in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(one, kind), getattr(other, kind)), kind
    assert torch.equal(computed_pairs(lengths.tolist()), computed_pairs(without))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("lengths", [*SPECIAL, RANDOM[4]], ids=str)
def test_its_forward_pass_equals_the_piecewise_one(lengths: list[int]) -> None:
    q, k, v = (torch.randn(sum(lengths), 2, 16) for _ in range(3))
    flex, sdpa = FlexAttention(), SdpaAttention()
    with torch.no_grad():
        found = flex.attend(q, k, v, flex.prepare(borders(lengths), CPU), 0.0)
    expected = sdpa.attend(q, k, v, sdpa.prepare(borders(lengths), CPU), 0.0)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_no_bit_of_another_piece_or_an_earlier_position_changes_in_its_forward_pass() -> None:
    lengths, backend = [20, 133, 133, 0, 7], FlexAttention()
    pieces = backend.prepare(borders(lengths), CPU)
    inputs = [torch.randn(sum(lengths), 2, 16) for _ in range(3)]
    others = [x.clone() for x in inputs]
    for other in others:
        other[100:153] = torch.randn(53, 2, 16)
    with torch.no_grad():
        before, after = (backend.attend(q, k, v, pieces, 0.0) for q, k, v in (inputs, others))
    assert torch.equal(before[:100], after[:100])
    assert torch.equal(before[153:], after[153:])
    assert (before[100:153] != after[100:153]).flatten(1).any(dim=1).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_decoder_gives_the_same_with_it_as_with_the_piecewise_one() -> None:
    lengths = [1, 63, 64, 0, 30, 30, 64]
    config = ModelConfig(num_layers=2, d_model=32, num_heads=2, max_positions=64)
    tokens = torch.randint(0, 50, (sum(lengths),))
    positions = torch.cat([torch.arange(length) for length in lengths])
    results = []
    for name in ("sdpa", "flex"):
        model = Decoder(config, 50, name)
        initialise(model, 1)
        with torch.no_grad():
            results.append(model(tokens, positions, borders(lengths)))
    assert (results[0] - results[1]).abs().max() < 1e-5


@pytest.mark.parametrize("lengths", [[1000] * 40 + [960], [40_960], [1] * 40_960], ids=["1000s", "one", "ones"])
def test_the_mask_of_a_long_row_is_small_and_so_is_what_its_making_needs(lengths: list[int]) -> None:
    """A dense one would have 1.7 billion entries. tracemalloc sees NumPy's arrays, and the tensors are counted."""
    row = borders(lengths)
    tracemalloc.start()
    try:
        mask = piece_mask(row, CPU)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    captured = [cell.cell_contents for cell in mask.mask_mod.__closure__ or ()]
    tensors = [value for value in [*vars(mask).values(), *captured] if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 9  # counts and places of partial and full blocks, by queries and by keys; the pieces
    assert max(tensor.numel() for tensor in tensors) <= (40_960 // BLOCK) ** 2
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) < 10e6
    assert peak < 10e6


def test_rows_outside_training_are_computed_piece_by_piece() -> None:
    """They have many lengths, for each of which the kernel would be compiled, until torch gives up."""
    config = ModelConfig(num_layers=1, d_model=32, num_heads=2, max_positions=64)
    flex, sdpa = (Decoder(config, 50, name).eval() for name in ("flex", "sdpa"))
    for model in (flex, sdpa):
        initialise(model, 1)
    for length in range(40, 64):
        tokens, positions = torch.arange(length) % 50, torch.arange(length)
        with torch.inference_mode():
            assert torch.equal(flex(tokens, positions, (0, length)), sdpa(tokens, positions, (0, length)))
