"""Packed rows of many pieces, forward and backward: the lab's attention beside one dense masked SDPA.

    python benchmarks/attention.py [--turns 9]

4,096 tokens in pieces of log-normal length, 4 heads of 64, FP32, on the CPU; a row of many short pieces besides.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from turns import alternate, print_table

from training_lab.attention import SdpaAttention

TOKENS, HEADS, WIDTH = 4096, 4, 64


def log_normal_lengths(mean: float, seed: int) -> list[int]:
    """Piece lengths of about `mean` tokens that fill a row."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.5, 1.0, TOKENS).astype(int).clip(1)
    ends = np.minimum(np.cumsum(drawn), TOKENS)
    return [int(length) for length in np.diff(ends, prepend=0) if length]


def piecewise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: tuple[int, ...]) -> torch.Tensor:
    """The lab's way, what it has to find out about the pieces included."""
    backend = SdpaAttention()
    mixed: torch.Tensor = backend.attend(q, k, v, backend.prepare(cu_seqlens, q.device), 0.0)
    return mixed


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask_TT: torch.Tensor) -> torch.Tensor:
    """The whole row at once, with what is not to be seen masked."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TT).squeeze(0).transpose(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9, help="calls of each to take the median of (9)")
    options = parser.parse_args()
    for mean in (650, 100):
        lengths = log_normal_lengths(mean, seed=1)
        cu_seqlens = tuple(itertools.accumulate(lengths, initial=0))
        numbers_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        index_T = torch.arange(TOKENS)
        mask_TT = (numbers_T[:, None] == numbers_T[None, :]) & (index_T[:, None] >= index_T[None, :])
        q, k, v = (torch.randn(TOKENS, HEADS, WIDTH, requires_grad=True) for _ in range(3))
        outputs = {
            "piece by piece": functools.partial(piecewise, q, k, v, cu_seqlens),
            "dense mask": functools.partial(dense, q, k, v, mask_TT),
        }
        difference = (outputs["piece by piece"]() - outputs["dense mask"]()).abs().max().item()
        print(f"\n{len(lengths)} pieces, the longest {max(lengths)}; the outputs differ by at most {difference:.1e}")
        ways = {name: forward_backward(output, [q, k, v]) for name, output in outputs.items()}
        print_table(alternate(ways, options.turns), "piece by piece is faster by")


def forward_backward(output: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> Callable[[], object]:
    """A call that computes the output and all gradients."""
    return lambda: torch.autograd.grad(output().sum(), inputs)


if __name__ == "__main__":
    main()
