"""Head and loss alone, forward and backward: the lab's chunked one beside torch's and the textbook's.

    python benchmarks/head_loss.py [--tokens 8192] [--vocabulary 50257] [--turns 7]

Width 256, FP32, on the CPU. The rate counts the three matrix products, 6 · tokens · width · vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn import LinearCrossEntropyOptions
from turns import alternate, print_table

from training_lab.footprint import CHUNK_TOKENS
from training_lab.loss import ChunkedLoss, reference_loss

WIDTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="positions (8192)")
    parser.add_argument("--vocabulary", type=int, default=50257, help="tokens of the vocabulary (50257)")
    parser.add_argument("--turns", type=int, default=7, help="calls of each to take the median of (7)")
    options = parser.parse_args()
    hidden = torch.randn(options.tokens, WIDTH, requires_grad=True)
    head = (torch.randn(options.vocabulary, WIDTH) * 0.02).requires_grad_()
    labels = torch.randint(0, options.vocabulary, (options.tokens,))
    compact = LinearCrossEntropyOptions(batch_chunk_size=CHUNK_TOKENS, acc_policy="compact")

    def timed(loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(hidden, head, labels) / options.tokens, (hidden, head))

    ways = {
        "chunked": timed(ChunkedLoss()),
        "F.linear_cross_entropy": timed(
            lambda *arguments: F.linear_cross_entropy(*arguments, reduction="sum", options=compact)
        ),
        "reference": timed(reference_loss),
    }
    flop = 6 * options.tokens * WIDTH * options.vocabulary
    print_table(alternate(ways, options.turns), "chunked is faster by", flop / 1e9, "GFLOP/s")


if __name__ == "__main__":
    main()
