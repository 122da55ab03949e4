"""How much memory the process and its device take, and in which part of the work the most.

On CUDA the allocator counts; its peaks are reset where a scope begins, and nowhere else in the lab. On a CPU the system
knows what is resident now, and the most that ever was.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

DEFINITION = (
    "on a GPU the most bytes at one time within the scope: allocated: in tensors; active: these and blocks about to be "
    "freed; reserved: held by torch's allocator; device used: taken on the GPU by all processes when the scope ended; "
    "`updates` are those that were not observed at work. On a CPU the most resident memory of the whole process, "
    "Python and libraries included"
)


class PeakMemory:
    """The highest figures by scope, as far as the device tells them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base_bytes = resident_bytes() or 0
        """Resident when the watching began: Python and its libraries."""
        self.scopes: dict[str, dict[str, int]] = {}

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Watches while it is entered."""
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        finally:
            seen, highest = cuda_peaks(self.device), self.scopes.setdefault(name, {})
            for key, number in seen.items():
                highest[key] = max(number, highest.get(key, 0))

    def now(self) -> int | None:
        """Bytes for the row of an update: the most in tensors since the scope began on CUDA, what is resident now on a
        CPU; None where the system does not say."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else resident_bytes()

    def peak(self) -> dict[str, Any]:
        """The highest of all, in bytes, and what that means on this device."""
        if self.device.type == "cuda":
            definition = "most bytes in tensors on the GPU at one time, over all updates, evaluations and checkpoints"
            highest = max((scope["allocated_bytes"] for scope in self.scopes.values()), default=None)
            return {"bytes": highest, "definition": definition}
        definition = "most resident memory of the whole process, Python and libraries included"
        return {"bytes": process_peak_bytes(), "definition": definition}


def cuda_peaks(device: torch.device) -> dict[str, int]:
    """The allocator's peaks since they were reset."""
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_bytes": stats["allocated_bytes.all.peak"],
        "active_bytes": stats["active_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "device_used_bytes": total - free,
    }


def resident_bytes() -> int | None:
    """The resident memory of this process now, where the system tells it cheaply."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def process_peak_bytes() -> int | None:
    """The most resident memory of this process so far."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine_memory_bytes() -> int | None:
    """The machine's memory, as the system tells it; in a container what that may use."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    return total
