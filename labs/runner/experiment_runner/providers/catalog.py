"""RunPod's catalog of GPUs: exact names, prices now, and what is there."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from experiment_runner.errors import InputError
from experiment_runner.providers.base import Candidate
from experiment_runner.providers.runpod_api import ApiError, RunpodApi


def candidates(
    api: RunpodApi | None, names: Sequence[str], count: int, cloud: str, min_cuda: str
) -> tuple[list[Candidate], list[str]]:
    """The GPUs of these names with their price for `count` of them, and notes. Without a key the prices are not known.

    Raises InputError for a name that RunPod does not have, with the nearest that it has.
    """
    if api is None:
        return [Candidate(name, None, None) for name in names], [
            "without RUNPOD_API_KEY prices and stock are not known"
        ]
    found = {gpu["id"]: gpu for gpu in gpus(api, count, cloud, min_cuda)}
    wanted = []
    for name in names:
        if name not in found:
            near = difflib.get_close_matches(name, found, 1, 0.3)
            advice = f"the nearest is {near[0]!r}" if near else f"there are {', '.join(sorted(found))}"
            raise InputError(f"gpus: RunPod has no {name!r}; {advice}")
        wanted.append(found[name])
    notes = []
    for gpu in wanted:
        most = (gpu.get("maxCount") or {}).get(cloud.lower())
        if isinstance(most, int) and 0 < most < count:
            raise InputError(f"gpu_count: RunPod has at most {most} of {gpu['id']!r} in one machine, got {count}")
        stock = gpu.get("availability")
        if stock in ("NONE", "LOW"):
            notes.append(f"{gpu['id']}: {'none is free now' if stock == 'NONE' else 'few are free now'}")
    return [candidate(gpu, count, cloud) for gpu in wanted], notes


def candidate(gpu: dict[str, Any], count: int, cloud: str) -> Candidate:
    """One GPU's entry, as what would be paid for it."""
    price = (gpu.get("price") or {}).get(cloud.lower())
    stock = gpu.get("availability")
    return Candidate(gpu["id"], price * count if price else None, None if stock is None else stock != "NONE")


def gpus(api: RunpodApi, count: int, cloud: str, min_cuda: str) -> list[dict[str, Any]]:
    """Every GPU of the catalog, as it would be for such a pod."""
    query = {
        "include": "AVAILABILITY",
        "product": "POD",
        "count": str(count),
        "cloud": cloud,
        "minCudaVersion": min_cuda,
    }
    body = api.call("GET", "/catalog/gpus", query=query).body
    if not isinstance(body, dict) or not isinstance(body.get("gpus"), list):
        raise ApiError(0, "the catalog has no GPUs", "GET /catalog/gpus")
    return [gpu for gpu in body["gpus"] if isinstance(gpu, dict) and "id" in gpu]
