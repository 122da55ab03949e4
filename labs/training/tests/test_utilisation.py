"""How much of a device is reached: against the reference run's figures, and names that only resemble each other."""

from __future__ import annotations

import pytest
from tiny import tiny

from training_lab.config import MeasureConfig, ModelConfig
from training_lab.flops import FORMULAS
from training_lab.gpus import GPUS, find_gpu
from training_lab.tracking import Row
from training_lab.utilisation import Peak, peak_of, utilisation

CORRECTED = ModelConfig(num_layers=12, d_model=768, num_heads=12, max_positions=4096, dropout=0.0)
H100 = "NVIDIA H100 80GB HBM3"


def rows_at(tokens_per_s: float, mean_piece: int, updates: int = 87) -> list[Row]:
    """Updates of 142,762 tokens at a speed, in pieces of which the token-weighted mean length is given."""
    tokens = 142_762
    one = {"input_tokens": tokens, "sum_of_squared_lengths": tokens * mean_piece, "seconds": tokens / tokens_per_s}
    return [dict(one) for _ in range(updates)]


def test_the_reference_runs_mfu_comes_out_by_both_conventions() -> None:
    peak = peak_of("cuda:0", "bf16", H100, MeasureConfig())
    found = utilisation(CORRECTED, 50257, rows_at(222_427, 1612), peak, "bf16", None)
    assert found["mfu"]["full"] == pytest.approx(0.2068, abs=5e-5)
    assert found["mfu"]["causal"] == pytest.approx(0.1868, abs=5e-5)
    assert found["peak"] == {"tflops": 989, "dtype": "bf16", "source": peak.source, "device": H100}
    assert found["formulas"] == FORMULAS


def test_rates_are_ratios_of_sums_and_shared_by_the_devices() -> None:
    peak = Peak(1.0, "given", "", "thing")
    fast, slow = rows_at(200_000, 100, 1), rows_at(100_000, 100, 1)
    both = utilisation(CORRECTED, 50257, fast + slow, peak, "bf16", None)["mfu"]["causal"]
    alone = utilisation(CORRECTED, 50257, fast, peak, "bf16", None)["mfu"]["causal"]
    assert both == pytest.approx(alone * 2 / 3)
    two = utilisation(CORRECTED, 50257, fast + slow, peak, "bf16", None, devices=2)["mfu"]["causal"]
    assert two == pytest.approx(both / 2)


def test_without_measured_updates_or_a_peak_there_is_no_figure_and_a_reason() -> None:
    nothing = utilisation(CORRECTED, 50257, [], Peak(989.0, "s", "", H100), "bf16", None)
    assert nothing["tflops_per_s"] is nothing["mfu"] is nothing["matmul_share"] is None
    on_cpu = utilisation(
        CORRECTED, 50257, rows_at(300, 100), peak_of("cpu", "fp32", None, MeasureConfig()), "fp32", None
    )
    assert on_cpu["mfu"] is on_cpu["peak"] is None
    assert on_cpu["reason"] == "no peak rate is known of the device cpu; measure.peak_tflops gives one"


def test_the_share_of_the_measured_product_is_by_the_same_count() -> None:
    probe = {"tflops": 0.5, "dtype": "fp32", "shape": [1, 1, 1], "seconds": 1.0}
    found = utilisation(
        CORRECTED, 50257, rows_at(300, 100), peak_of("cpu", "fp32", None, MeasureConfig()), "fp32", probe
    )
    assert found["matmul_share"]["causal"] == pytest.approx(found["tflops_per_s"]["causal"] / 0.5)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 836),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
    ],
)
def test_siblings_have_their_own_peaks(name: str, tflops: float) -> None:
    assert peak_of("cuda:0", "bf16", name, MeasureConfig()).tflops == tflops


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A10", "NVIDIA A10G", "NVIDIA A100", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "nvidia h100 pcie",
     "NVIDIA H100 PCIe ", "NVIDIA L40G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GH200 480GB", ""],
)  # fmt: skip
def test_a_name_that_only_resembles_one_has_no_peak_and_says_so(name: str) -> None:
    assert find_gpu(name) is None
    peak = peak_of("cuda:0", "bf16", name, MeasureConfig())
    assert peak.tflops is None
    assert "measure.peak_tflops gives one" in peak.reason
    assert ("MIG" in peak.reason) == ("MIG" in name)


def test_a_run_in_fp32_has_no_peak_of_bf16() -> None:
    peak = peak_of("cuda:0", "fp32", H100, MeasureConfig())
    assert (peak.tflops, peak.reason) == (
        None,
        "the lab's peak rates are those of BF16 and FP16, the run computed in fp32",
    )


@pytest.mark.parametrize(
    ("device", "compute", "gpu"), [("cpu", "fp32", None), ("cuda:0", "bf16", "NVIDIA A10"), ("cuda:0", "bf16", H100)]
)
def test_a_peak_of_ones_own_counts_before_the_table(device: str, compute: str, gpu: str | None) -> None:
    measure = tiny("measure.peak_tflops=1.5", "measure.peak_source=my data sheet").measure
    assert peak_of(device, compute, gpu, measure)[:3] == (1.5, "my data sheet", "")


def test_every_gpu_of_the_table_is_described_wholly() -> None:
    for name, gpu in GPUS.items():
        assert name == name.strip()
        assert 50 < gpu.tflops < 5000
        assert 20 <= gpu.memory_gb <= 300
        assert gpu.source
