"""How fast this device multiplies matrices, measured: what an update could reach at best. Takes a few seconds."""

from __future__ import annotations

import time
from typing import Any

import torch

from training_lab.precision import TYPES, Hardware

PROBE_S = 1.0
"""How long each shape is tried."""
REPEATS = 4
"""Products between two looks at the clock."""


def measure_matmul_rate(hardware: Hardware, tokens: int, width: int) -> dict[str, Any]:
    """The best rate over some shapes, in 10¹² operations a second: products of the model's own width, and square ones.

    Products of prepared matrices into prepared memory, in the run's arithmetic. Uses no global random stream.
    """
    side = 2048 if hardware.device.type == "cpu" else 8192
    shapes = {(side, side, side), (min(tokens, 4 * side), width, 4 * width), (min(tokens, 4 * side), 4 * width, width)}
    started = time.perf_counter()
    rates = {shape: rate_of(shape, hardware) for shape in sorted(shapes)}
    best = max(rates, key=lambda shape: rates[shape])
    return {
        "definition": "best rate of matrix products here, in the run's arithmetic, into memory that is there already",
        "tflops": rates[best],
        "dtype": hardware.compute,
        "shape": list(best),
        "seconds": time.perf_counter() - started,
    }


def rate_of(shape: tuple[int, int, int], hardware: Hardware) -> float:
    """The best rate of products [m, k] × [k, n], in 10¹² operations a second."""
    (m, k, n), dtype, device = shape, TYPES[hardware.compute], hardware.device
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*size, generator=generator).to(device, dtype) for size in ((m, k), (n, k)))
    out = torch.empty(m, n, dtype=dtype, device=device)
    best_s, end = float("inf"), time.perf_counter() + PROBE_S
    while time.perf_counter() < end or best_s == float("inf"):
        hardware.synchronise()
        begin = time.perf_counter()
        for _ in range(REPEATS):
            torch.mm(left, right.t(), out=out)
        hardware.synchronise()
        best_s = min(best_s, (time.perf_counter() - begin) / REPEATS)
    return 2 * m * k * n / best_s / 1e12
