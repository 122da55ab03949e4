"""Random numbers with names: each stream is made from (seed, purpose, position), never from what ran before.

Initial weights, the data's order, windows and samples each have a stream of their own, so that changing one leaves
the others as they were. Dropout draws from torch's global stream, which is seeded once and saved in checkpoints.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

U64 = (1 << 64) - 1


def derived_seed(seed: int, purpose: str, *position: int | str) -> int:
    """A 64-bit seed from the first 8 bytes of the SHA-256 of seed, purpose and position."""
    name = "|".join(["training-lab-v1", purpose, str(seed), *map(str, position)])
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "big")


def generator(seed: int, purpose: str, *position: int | str) -> torch.Generator:
    """A CPU generator for one purpose and position."""
    return torch.Generator("cpu").manual_seed(derived_seed(seed, purpose, *position) & (U64 >> 1))


def splitmix64(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function over an array of uint64: a fixed, library-independent hash of integers.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seed_global_streams(seed: int) -> None:
    """Seeds the process's global streams; dropout draws from torch's."""
    torch.manual_seed(derived_seed(seed, "global") & (U64 >> 1))
    random.seed(derived_seed(seed, "python"))
    np.random.seed(derived_seed(seed, "numpy") & 0xFFFFFFFF)  # noqa: NPY002 - for code that uses the global stream


def global_streams() -> dict[str, Any]:
    """The state of the process's global streams, as tensors and plain types."""
    name, keys, position, has_gauss, cached_gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached_gauss)),
    }


def restore_global_streams(state: dict[str, Any]) -> None:
    """Puts the global streams back to what `global_streams` said."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
