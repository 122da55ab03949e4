"""The GPUs of the fake provider, and what its catalog says of them."""

from __future__ import annotations

from typing import Any

from fakewire import ProblemError


def make_gpu(gpu_id: str, memory: int, secure: float, community: float | None) -> dict[str, Any]:
    return {
        "id": gpu_id,
        "name": gpu_id.removeprefix("NVIDIA ").removeprefix("GeForce "),
        "pool": None,
        "manufacturer": "NVIDIA",
        "memory": memory,
        "secure": True,
        "community": community is not None,
        "price": {"secure": secure, "community": community or 0},
        "maxCount": {"secure": 8, "community": 8 if community else 0},
        "availability": "HIGH",
        "dataCenters": [{"id": "US-KS-2", "name": "US Kansas 2", "availability": "HIGH"}],
        "cudaVersions": [{"version": version, "available": True} for version in ("12.8", "12.6")],
    }


GPUS = [
    make_gpu("NVIDIA H100 80GB HBM3", 80, 2.99, 2.69),
    make_gpu("NVIDIA H100 PCIe", 80, 2.39, 1.99),
    make_gpu("NVIDIA H200", 141, 3.99, None),
    make_gpu("NVIDIA GeForce RTX 4090", 24, 0.69, 0.34),
    make_gpu("NVIDIA A40", 48, 0.4, None),
    make_gpu("NVIDIA A100 80GB PCIe", 80, 1.64, 1.19),
]


def catalog_view(gpu: dict[str, Any], query: dict[str, str]) -> dict[str, Any]:
    """A GPU as a question gets it: with where and how many there are only if that is asked for."""
    extras = ("availability", "dataCenters", "cudaVersions")
    shown = {name: value for name, value in gpu.items() if name not in extras}
    if "include" not in query:
        return shown
    if "product" not in query:
        raise ProblemError(400, "product is required with include=AVAILABILITY")
    cloud = query.get("cloud", "SECURE").lower()
    fits = gpu["maxCount"][cloud] >= int(query.get("count", "1")) and has_cuda(gpu, query.get("minCudaVersion"), None)
    if not fits or gpu["availability"] == "NONE":
        return shown | {"availability": "NONE", "cudaVersions": gpu["cudaVersions"]}
    return shown | {name: gpu[name] for name in extras}


def has_cuda(gpu: dict[str, Any], least: str | None, allowed: list[str] | None) -> bool:
    versions = [each["version"] for each in gpu["cudaVersions"] if each["available"]]
    fitting = [version for version in versions if least is None or version_of(version) >= version_of(least)]
    return any(allowed is None or version in allowed for version in fitting)


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
