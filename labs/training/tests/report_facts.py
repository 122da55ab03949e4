"""What the run folders of the report's tests say of model, data, memory, timeline and machine: made-up figures."""

from __future__ import annotations

import math
from typing import Any

GPU = "NVIDIA H100 80GB HBM3"
GIB = 2**30


def parts_s() -> dict[str, float]:
    """Where the time of a process went."""
    return {
        "setup_s": 4.0, "data_s": 6.0, "update_s": 62.0, "evaluation_s": 12.0, "checkpoint_s": 4.0, "profile_s": 6.0,
        "other_s": 1.0,
    }  # fmt: skip


def memory(is_gpu: bool) -> dict[str, Any]:
    """Peaks, and the prediction."""
    parts = {
        "weights": 506_864_640, "gradients": 506_864_640, "optimizer states": 1_013_729_280,
        "weights in 16 bits": 253_432_320, "activations": 48_500_000_000, "head and loss": 700_000_000,
    }  # fmt: skip
    if not is_gpu:
        parts = {"weights": 13_125_632, "gradients": 13_125_632, "optimizer states": 26_251_264,
                 "activations": 537_395_200, "Python and libraries": 420_000_000}  # fmt: skip
    scopes = {
        "updates": {"allocated_bytes": int(47.88 * GIB), "active_bytes": int(47.95 * GIB),
                    "reserved_bytes": int(50.1 * GIB), "device_used_bytes": int(51.0 * GIB)},
        "evaluation": {"allocated_bytes": int(6.2 * GIB), "active_bytes": int(6.2 * GIB),
                       "reserved_bytes": int(50.1 * GIB), "device_used_bytes": int(51.0 * GIB)},
    }  # fmt: skip
    return {
        "definition": "on a GPU the most bytes at one time within the scope; on a CPU the most resident memory",
        "scopes": scopes if is_gpu else {},
        "process_peak_bytes": 1_231_794_176,
        "predicted": {"parts": parts, "total_bytes": sum(parts.values()), "of": "peak allocated in updates"},
    }


def timeline(is_gpu: bool) -> dict[str, Any]:
    """The summary of a trace."""
    shares = {"batch": 0.004, "zero_grad": 0.002, "transfer": 0.003, "forward": 0.31, "backward": 0.62, "clip": 0.012}
    phases = [{"name": name, "count": 2, "seconds": 1.31 * share, "share": share} for name, share in shares.items()]
    names = ("nvjet_hsh_128x256_64x4", "flash_bwd_dq_dk_dv_loop", "flash_fwd", "vectorized_elementwise_kernel<4, add>")
    operators = [
        {"name": name, "count": 96 // (i + 1), "seconds": 0.41 / (i + 1), "share": 0.31 / (i + 1)}
        for i, name in enumerate(names if is_gpu else ("aten::mm", "aten::native_layer_norm", "aten::gelu"))
    ]
    bounds = ((0.0, 1e-5, 5310), (1e-5, 1e-4, 410), (1e-4, 1e-3, 37), (1e-3, 1e-2, 4), (1e-2, None, 0))
    bins = [{"from_s": a, "below_s": b, "count": n, "seconds": n * a} for a, b, n in bounds]
    return {
        "updates": [21, 22],
        "seconds": 1.31,
        "busy": {"share": 0.947, "definition": "time in which a kernel or copy ran on the GPU, of the updates' time"},
        "phases": phases,
        "operators": operators,
        "gaps": {"count": 5761, "seconds": 0.0694, "longest_s": 0.0042, "histogram": bins},
    }


def memory_events(is_gpu: bool) -> dict[str, Any]:
    """Memory over an update: it rises in the forward pass and falls in the backward pass."""
    top, base = (47.88 * GIB, 1.9 * GIB) if is_gpu else (560e6, 53e6)
    spans = {
        "batch": 0.02,
        "zero_grad": 0.02,
        "transfer": 0.02,
        "forward": 0.3,
        "backward": 0.55,
        "clip": 0.03,
        "optimizer": 0.06,
    }
    phases, begin = [], 0.0
    for name, span in spans.items():
        phases.append({"name": name, "begin_s": begin, "end_s": begin + span, "peak_bytes": int(top)})
        begin += span
    times = [i / 2000 for i in range(2000)]
    held = [
        base + (top - base) * max(0.0, min((t - 0.06) / 0.3, (0.91 - t) / 0.55)) * (1 - 0.04 * (i % 2))
        for i, t in enumerate(times)
    ]
    return {
        "update": 40,
        "device": "cuda:0" if is_gpu else "cpu",
        "source": "the history of torch's CUDA allocator" if is_gpu else "the memory events of torch's profiler",
        "definition": "bytes in tensors",
        "base_bytes": int(base),
        "phases": phases,
        "curve": {"s": times, "bytes": [int(one) for one in held]},
    }


def describe_model(is_gpu: bool) -> dict[str, Any]:
    """Parameters and their groups."""
    total, plain = (126_716_160, 38_400) if is_gpu else (3_281_408, 4_608)
    group = {"optimizer": "adamw", "lr_ratio": 1.0}
    return {
        "parameters": total,
        "optimizer_groups": [
            {
                **group,
                "name": "matrices",
                "weight_decay": 0.1,
                "values": total - plain,
                "parameters": ["head.weight", "mlp.weight"],
            },
            {
                **group,
                "name": "vectors",
                "weight_decay": 0.0,
                "values": plain,
                "parameters": ["norm.weight", "norm.bias"],
            },
        ],
        "initial_weights_sha256": "9" * 64,
    }


def describe_process(is_gpu: bool, segment: int) -> dict[str, Any]:
    """What a process ran in and on."""
    on_gpu = {
        "device": "cuda:0", "device_reason": "the first GPU", "gpu": GPU, "cuda": "13.0", "compute": "bf16",
        "compute_reason": "the GPU has it in hardware", "attention": "flash", "attention_reason": "", "loss": "liger",
        "loss_reason": "", "compile": False, "compile_reason": "the config says off",
    }  # fmt: skip
    on_cpu = {
        "device": "cpu", "device_reason": "no GPU that torch can use", "cuda": None, "compute": "fp32",
        "compute_reason": "exact", "attention": "sdpa", "attention_reason": "no flex", "loss": "chunked",
        "loss_reason": "no liger", "compile": False, "compile_reason": "gains nothing on a CPU",
    }  # fmt: skip
    return {
        "segment": segment, "python": "3.11.7", "implementation": "CPython", "system": "Linux-6.8-x86_64",
        "machine": "x86_64", "processor": "A Processor @ 2.0 GHz", "usable_cpus": 2, "num_threads": 2,
        "packages": {"numpy": "2.4.6", "torch": "2.13.0"}, "variables": {"OMP_NUM_THREADS": "2"}, "torch": "2.13.0",
        "compile_state": "off", **(on_gpu if is_gpu else on_cpu),
    }  # fmt: skip


def data_manifest() -> dict[str, Any]:
    """What the data are made of."""
    file = {"name": "sample/10BT/014_00000.parquet", "bytes": 2_147_483_648, "sha256": "b" * 64}
    return {
        "identity": "d" * 64,
        "source": {"source": "fineweb", "repo": "HuggingFaceFW/fineweb", "revision": "9" * 40, "files": [file]},
        "tokenizer": {"kind": "gpt2", "vocab_size": 50_257},
        "duplicates": {"found": 12, "policy": "keep"},
        "split": {"rule": "content-hash-v1", "salt": "", "val_fraction": 0.1, **SPLIT},
        "plan": {"identity": "e" * 64, "layout": "packs-v1"},
        "validation": {"identity": "5" * 64, "pieces": 170, "target_tokens": 131_072},
    }


SPLIT = {
    "train": {"documents": 90_000, "tokens": 61_000_000, "sha256": "1" * 64},
    "validation": {"documents": 10_000, "tokens": 6_800_000, "sha256": "2" * 64},
}


def data_stats(is_gpu: bool) -> dict[str, Any]:
    """What the data are like."""
    bins = [
        {"from": 1 << i, "below": 2 << i, "number": int(30_000 * math.exp(-((i - 9) ** 2) / 4))} for i in range(3, 16)
    ]
    quantiles = {"0": 8.0, "50": 410.0, "95": 2_400.0, "99": 5_300.0, "100": 48_211.0}
    fill = [{"from": i / 20, "to": (i + 1) / 20, "packs": int(16_000 * math.exp(i - 19))} for i in range(20)]
    return {
        "data_identity": "d" * 64,
        "licence": {"licence": "ODC-By 1.0", "licence_url": "https://opendatacommons.org/licenses/by/1-0/"},
        "documents": 100_000, "tokens": 67_800_000, "text_bytes": 301_000_000, "bytes_per_token": 4.44,
        "lengths": {"definition": "tokens of a document", "mean": 678.0, "quantiles": quantiles, "histogram": bins},
        "rejected": {"empty": 2, "too short to predict anything": 1},
        "duplicates": {"definition": "documents that are the same as another", "found": 12, "policy": "keep"},
        "split": {**SPLIT, "leaks": {
            "exact": {"definition": "validation documents that are also in the training text", "documents": 0},
            "windows": {"definition": "validation documents of which a run is also in the training text",
                        "documents": 31, "documents_with_a_sampled_run": 9_000, "validation_documents": 10_000},
        }},
        "packing": {
            "definition": "the packs of the first epoch", "packing": "best_fit", "pack_length": 4096, "packs": 16_400,
            "fill": 0.9962, "fill_histogram": fill, "pieces_per_pack": {"mean": 6.3, "max": 41},
            "documents_cut_share": 0.06, "target_tokens_per_pack": 4078.9,
        } if is_gpu else None,
        "pieces": {"definition": "the pieces of the first updates", "mean": 640.0, "token_weighted_mean": 1612.0,
                   "quantiles": quantiles, "histogram": bins[:10]},
    }  # fmt: skip


SOURCE = {
    "commit": "a" * 40,
    "uncommitted_changes": [" M labs/training/training_lab/config.py"],
    "uncommitted_diff": "--- a/config.py\n+++ b/config.py\n-old\n+new\n",
    "untracked_files": {"new.py": "print(1)\n"},
    "files": {"training_lab/engine.py": "c" * 64},
    "sha256": "f" * 64,
}

NOTES = """# Question

Does the loss fall *faster* with a longer warm-up?

## Expected

- the same final loss
- a smaller gradient norm
  in the first updates

1. look at the curve
2. compare

```
python -m training_lab compare A B
```
"""
