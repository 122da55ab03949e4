"""What is known of GPUs, by the exact name that torch gives them: peak rate, memory, generation. Pure.

The rate is that of dense matrix products in BF16 (or FP16) with sums in FP32. Data sheets often print twice as much,
which holds for matrices of which half the values are 0 in a pattern. Names that only resemble one here are other parts:
a PCIe card is not its SXM sibling, an A10 not an A100, a slice of a GPU (MIG) not the whole.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

from training_lab.errors import UserError

PEAK_DTYPE = "dense BF16 or FP16 products, sums in FP32"


class Gpu(NamedTuple):
    """One kind of GPU."""

    tflops: float
    """Peak rate of dense BF16 products, 10¹² operations a second."""
    memory_gb: int
    """As it is sold: at least so many times 10⁹ bytes."""
    capability: tuple[int, int]
    """CUDA compute capability; (0, 0) for other makers."""
    source: str


NVIDIA, AMD = "NVIDIA's data sheet, without sparsity", "AMD's data sheet, without sparsity"

GPUS: dict[str, Gpu] = {
    "NVIDIA A100-SXM4-40GB": Gpu(312, 40, (8, 0), NVIDIA),
    "NVIDIA A100-SXM4-80GB": Gpu(312, 80, (8, 0), NVIDIA),
    "NVIDIA A100-PCIE-40GB": Gpu(312, 40, (8, 0), NVIDIA),
    "NVIDIA A100 80GB PCIe": Gpu(312, 80, (8, 0), NVIDIA),
    "NVIDIA A30": Gpu(165, 24, (8, 0), NVIDIA),
    "NVIDIA A40": Gpu(149.7, 48, (8, 6), NVIDIA),
    "NVIDIA RTX A6000": Gpu(154.85, 48, (8, 6), NVIDIA),
    "NVIDIA H100 80GB HBM3": Gpu(989, 80, (9, 0), NVIDIA + " (SXM)"),
    "NVIDIA H100 PCIe": Gpu(756, 80, (9, 0), NVIDIA),
    "NVIDIA H100 NVL": Gpu(835, 94, (9, 0), NVIDIA),
    "NVIDIA H200": Gpu(989, 141, (9, 0), NVIDIA + " (SXM)"),
    "NVIDIA H200 NVL": Gpu(836, 141, (9, 0), NVIDIA),
    "NVIDIA H20": Gpu(148, 96, (9, 0), NVIDIA),
    "NVIDIA B200": Gpu(2250, 180, (10, 0), NVIDIA),
    "NVIDIA GB200": Gpu(2500, 186, (10, 0), NVIDIA),
    "NVIDIA L40S": Gpu(362, 48, (8, 9), NVIDIA),
    "NVIDIA L40": Gpu(181, 48, (8, 9), NVIDIA),
    "NVIDIA L4": Gpu(121, 24, (8, 9), NVIDIA),
    "NVIDIA GeForce RTX 3090": Gpu(71, 24, (8, 6), NVIDIA),
    "NVIDIA GeForce RTX 4090": Gpu(165.2, 24, (8, 9), NVIDIA),
    "NVIDIA GeForce RTX 5090": Gpu(209.5, 32, (12, 0), NVIDIA),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": Gpu(503.8, 96, (12, 0), "as reported for its data sheet"),
    "AMD Instinct MI300X": Gpu(1307, 192, (0, 0), AMD),
    "AMD Instinct MI325X": Gpu(1307, 256, (0, 0), AMD),
    "AMD Instinct MI355X": Gpu(2500, 288, (0, 0), AMD),
}


def find_gpu(name: str) -> Gpu | None:
    """What is known of the GPU of exactly this name; None of any other."""
    return GPUS.get(name)


def need_gpu(name: str) -> Gpu:
    """What is known of a GPU that a person names. Raises UserError for another, with the nearest."""
    if name not in GPUS:
        by_lower = {known.lower(): known for known in GPUS}
        words = [known for lower, known in by_lower.items() if name.lower() in lower]
        close = words or [by_lower[lower] for lower in difflib.get_close_matches(name.lower(), by_lower, 3, 0.4)]
        raise UserError(f"--gpu {name}: not among those that the lab knows; did you mean {', '.join(close or GPUS)}?")
    return GPUS[name]
