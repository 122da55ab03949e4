"""Random numbers with names: each stream is made from (seed, purpose, position), never from what ran before.

Initial weights, the data's order, windows and samples each have a stream of their own, so that changing one leaves
the others as they were. Dropout draws from torch's global stream, which is seeded for each micro-batch.
"""

from __future__ import annotations

import torch

from training_lab.seeds import U64, derived_seed


def generator(seed: int, purpose: str, *position: int | str) -> torch.Generator:
    """A CPU generator for one purpose and position."""
    return torch.Generator("cpu").manual_seed(derived_seed(seed, purpose, *position) & (U64 >> 1))


def seed_global_streams(seed: int, *position: int) -> None:
    """Seeds torch's global streams, that of every device; dropout draws from them."""
    torch.manual_seed(derived_seed(seed, "global", *position) & (U64 >> 1))


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
