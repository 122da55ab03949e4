"""The counts of operations, against torch's own counter and against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from training_lab.config import ModelConfig
from training_lab.flops import flops_of_pieces
from training_lab.loss import reference_loss
from training_lab.model import Decoder, initialise

SMALL = ModelConfig(num_layers=2, d_model=32, num_heads=2, max_positions=64, dropout=0.0)
CORRECTED = ModelConfig(num_layers=12, d_model=768, num_heads=12, max_positions=4096, dropout=0.0)


@pytest.mark.parametrize("lengths", [[64], [1], [7, 7, 7], [64, 1, 30, 2]], ids=str)
def test_the_full_count_is_what_torch_counts_in_an_update(lengths: list[int]) -> None:
    model = Decoder(SMALL, 97)
    initialise(model, seed=1)
    tokens = torch.randint(0, 97, (sum(lengths),))
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = [0, *np.cumsum(lengths).tolist()]
    # torch counts no attention on a CPU but that of its plain implementation, which computes the whole square.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        reference_loss(model(tokens, positions, cu_seqlens), model.head_Vd, tokens).backward()
    assert flops_of_pieces(SMALL, 97, np.array(lengths)).full == counter.get_total_flops()


def test_the_causal_count_leaves_out_the_pairs_that_may_not_attend() -> None:
    counted = flops_of_pieces(SMALL, 97, np.array([10]))
    pairs, allowed = 100, 55
    assert counted.full - counted.causal == 12 * SMALL.num_layers * SMALL.d_model * (pairs - allowed)


def test_a_token_costs_what_the_reference_run_was_said_to_cost() -> None:
    """919.5 MFLOP a token: `corrected`, full squares, with pieces whose token-weighted mean length is 1,612."""
    counted = flops_of_pieces(CORRECTED, 50257, np.full(1000, 1612)).full / 1_612_000
    assert counted == pytest.approx(919.5e6, rel=1e-3)


def test_counts_of_many_tokens_do_not_overflow() -> None:
    lengths = np.full(100_000, 4096, dtype=np.int32)
    assert (
        flops_of_pieces(CORRECTED, 50257, lengths).full == 100_000 * flops_of_pieces(CORRECTED, 50257, lengths[:1]).full
    )
