"""FlexAttention's mask of pieces, against torch's own from the definition, and its forward pass, which a CPU has."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from training_lab.attention import FlexAttention, SdpaAttention, piece_mask

CPU = torch.device("cpu")
SPECIAL = [[1], [128], [256], [300], [127, 129], [128, 128], [63, 64, 65], [5, 5, 1, 250, 128, 128, 0, 0], [1] * 130]
GENERATOR = np.random.default_rng(7)
RANDOM = [GENERATOR.integers(0, most, 12).tolist() for most in (5, 50, 150, 400) for _ in range(3)]


def borders(lengths: list[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lengths, initial=0))


@pytest.mark.parametrize("lengths", [*SPECIAL, *RANDOM], ids=str)
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
    places = torch.arange(size)
    assert torch.equal(
        found.mask_mod(0, 0, places[:, None], places[None, :]), sees(places, places, places[:, None], places[None, :])
    )


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


def test_the_mask_of_a_long_row_is_small() -> None:
    mask = piece_mask(borders([1000] * 41), CPU)  # a dense one would have 1.7 billion entries
    tensors = [value for value in vars(mask).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 4
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) < 10e6
