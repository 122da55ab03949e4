"""How much of the machine's matrix-multiply rate a whole update reaches.

    python benchmarks/peak_share.py [--tokenizer gpt2] [--set batch.micro_batches=4] [--turns 7]

The peak is the best rate of FP32 products of the update's own shapes and of square ones, into memory that is there,
measured in turn with the updates. An update is everything: batch, forward, backward, clipping, optimizer. Its
operations are those of `training_lab.flops`, attention counted causally.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable

import torch
from turns import alternate

from training_lab.data.dataset import prepare_dataset
from training_lab.engine import train_update
from training_lab.flops import flops_of_pieces
from training_lab.precision import choose_hardware
from training_lab.resolve import resolve_config
from training_lab.trainer import make_trainer


def product(rows: int, inner: int, columns: int) -> Callable[[], object]:
    """A product of x [rows, inner] and w [columns, inner]ᵀ into prepared memory, ten times."""
    x, w, out = torch.randn(rows, inner), torch.randn(columns, inner), torch.empty(rows, columns)

    def run() -> None:
        for _ in range(10):
            torch.mm(x, w.t(), out=out)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", choices=["byte", "gpt2"], default="byte", help="byte: 256 tokens; gpt2: 50,257")
    parser.add_argument("--turns", type=int, default=7, help="updates to take the median of (7)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        own = [f"data.tokenizer={options.tokenizer}", f"data.cache_dir={cache}", "eval.tokens=256", *options.set]
        config = resolve_config("baseline", own).config
        dataset = prepare_dataset(config)
        trainer = make_trainer(config, choose_hardware(config), dataset)
        width, tokens = config.model.d_model, config.batch.update_tokens // config.batch.micro_batches
        shapes = {(tokens, width, 4 * width), (tokens, 4 * width, width), (1024, width, 50304), (2048, 2048, 2048)}
        products = {f"{m} × {k} × {n}": (product(m, k, n), 20 * m * k * n) for m, k, n in shapes}
        ways: dict[str, Callable[[], object]] = {"update": lambda: train_update(trainer)}
        seconds = alternate({**ways, **{name: run for name, (run, _) in products.items()}}, options.turns)
    rates = {name: flop / statistics.median(seconds[name]) / 1e9 for name, (_, flop) in products.items()}
    lengths = dataset.update_data(1).pieces.lengths
    flop = flops_of_pieces(config.model, dataset.tokenizer.vocab_size, lengths).causal
    update_rate = flop / statistics.median(seconds["update"]) / 1e9
    for name, rate in sorted(rates.items(), key=lambda item: item[1]):
        print(f"product {name}: {rate:,.0f} GFLOP/s")
    print(f"update of {flop / 1e9:,.0f} GFLOP in {statistics.median(seconds['update']):.3f} s: {update_rate:,.0f} "
          f"GFLOP/s, {update_rate / max(rates.values()):.0%} of the best product")  # fmt: skip


if __name__ == "__main__":
    main()
