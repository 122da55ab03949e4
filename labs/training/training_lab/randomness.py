"""Random numbers with names: each stream is made from (seed, purpose, position), never from what ran before.

Initial weights, the data's order, windows and samples each have a stream of their own, so that changing one leaves
the others as they were. Dropout draws from torch's global stream, which is seeded once and saved in checkpoints.
"""

from __future__ import annotations

import hashlib

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
    """Seeds torch's global streams, that of every device; dropout draws from them."""
    torch.manual_seed(derived_seed(seed, "global") & (U64 >> 1))


def global_streams(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of torch's global streams on the CPU and on the device that trains."""
    streams = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        streams["mps"] = torch.mps.get_rng_state()
    return streams


def restore_global_streams(streams: dict[str, torch.Tensor], device: torch.device) -> None:
    """Puts the global streams back to what `global_streams` said. A stream of another kind of device is left out:
    that the device changed is said elsewhere."""
    torch.set_rng_state(streams["cpu"])
    if device.type == "cuda" and "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"], device)
    elif device.type == "mps" and "mps" in streams:
        torch.mps.set_rng_state(streams["mps"])
