"""How much of the device an update reaches: operations that training takes, over the time that they took. Pure.

The operations are those that the mathematics needs, not those that kernels executed: a kernel that computes something
twice gains nothing by it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from training_lab.config import MeasureConfig, ModelConfig
from training_lab.flops import FORMULAS, training_flops
from training_lab.gpus import PEAK_DTYPE, find_gpu
from training_lab.tracking import Row

DEFINITION = (
    "operations of matrix products that training on the measured updates' pieces needs, forward and backward, divided "
    "by their seconds (and for MFU by the devices' peak rate); `causal` is the lab's figure, `full` the one often "
    "reported; not counted: norms, GELU, softmax, loss, clipping, optimizer"
)


class Peak(NamedTuple):
    """A device's peak rate, or why none is given."""

    tflops: float | None
    source: str
    """Where the figure comes from."""
    reason: str
    """Why there is none; empty if there is."""
    device: str


def peak_of(device: str, compute: str, gpu: str | None, measure: MeasureConfig) -> Peak:
    """The peak for a run on `device` (`cpu`, `cuda:0`) in the arithmetic `compute`, on the GPU of that name."""
    name = gpu or device
    if measure.peak_tflops:
        return Peak(measure.peak_tflops, measure.peak_source, "", name)
    if gpu is None:
        return Peak(None, "", f"no peak rate is known of the device {device}; measure.peak_tflops gives one", name)
    if compute not in ("bf16", "fp16"):
        return Peak(None, "", f"the lab's peak rates are those of BF16 and FP16, the run computed in {compute}", name)
    known = find_gpu(gpu)
    if known is None:
        slice_of = "a slice (MIG) has a part of its GPU's rate, " if " MIG " in gpu else ""
        reason = f"{slice_of}no peak rate is known of exactly {gpu!r}; measure.peak_tflops gives one"
        return Peak(None, "", reason, name)
    return Peak(known.tflops, f"{known.source}: {PEAK_DTYPE}", "", name)


def utilisation(
    model: ModelConfig,
    vocab_size: int,
    measured: list[Row],
    peak: Peak,
    compute: str,
    probe: dict[str, Any] | None,
    devices: int = 1,
) -> dict[str, Any]:
    """Rates, MFU and share of the measured matrix-multiply rate over the measured update rows.

    Rates are None if nothing was measured, MFU if there is no peak, the share if nothing was probed.
    """
    tokens = sum(row["input_tokens"] for row in measured)
    squares = sum(row["sum_of_squared_lengths"] for row in measured)
    seconds = sum(row["seconds"] for row in measured) * devices
    flops = training_flops(model, vocab_size, tokens, squares)._asdict()
    rates = {name: number / seconds / 1e12 for name, number in flops.items()} if seconds else None
    return {
        "definition": DEFINITION,
        "formulas": FORMULAS,
        "measured_flops": flops,
        "tflops_per_s": rates,
        "peak": {"tflops": peak.tflops, "dtype": compute, "source": peak.source, "device": peak.device}
        if peak.tflops
        else None,
        "reason": peak.reason,
        "mfu": share_of(rates, peak.tflops),
        "matmul_probe": probe,
        "matmul_share": share_of(rates, probe["tflops"] if probe else None),
    }


def share_of(rates: dict[str, float] | None, tflops: float | None) -> dict[str, float] | None:
    """Each rate as a share of another; None if either is not known."""
    return {name: rate / tflops for name, rate in rates.items()} if rates and tflops else None
