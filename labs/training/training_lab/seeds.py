"""Integers that look random and are functions of names and numbers alone, the same with every version of every library.

What draws torch's random numbers is in `randomness.py`.
"""

from __future__ import annotations

import hashlib

import numpy as np

U64 = (1 << 64) - 1


def derived_seed(seed: int, purpose: str, *position: int | str) -> int:
    """A 64-bit seed from the first 8 bytes of the SHA-256 of seed, purpose and position."""
    name = "|".join(["training-lab-v1", purpose, str(seed), *map(str, position)])
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "big")


def splitmix64(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function over an array of uint64: a fixed, library-independent hash of integers.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
