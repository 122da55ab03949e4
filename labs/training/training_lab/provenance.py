"""What was executed: the commit, what had changed since, and the hash of every file that ran."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from training_lab.identity import identity_of, sha256_of_file

PACKAGE = Path(__file__).resolve().parent

# Environment variables that can change how fast or in which order something is computed. The lab sets its own number
# of threads, so they should not matter; they are recorded because libraries read them.
RECORDED_VARIABLES = (
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "ATEN_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
    "CUBLAS_",
    "NCCL_",
    "MALLOC_",
)


def describe_source() -> dict[str, Any]:
    """The content of `source.json`: commit, uncommitted changes, each file with its SHA-256, one hash over all.

    Outside a git checkout, or without git, `commit` is None and the hashes alone say what ran.
    """
    files = {
        path.relative_to(PACKAGE.parent).as_posix(): sha256_of_file(path) for path in sorted(PACKAGE.rglob("*.py"))
    }
    inside = git("rev-parse", "--is-inside-work-tree") == "true"
    return {
        "commit": git("rev-parse", "HEAD") if inside else None,
        "uncommitted_changes": (git("status", "--porcelain", "--", str(PACKAGE)) or "").splitlines()
        if inside
        else None,
        "uncommitted_diff": git("diff", "HEAD", "--", str(PACKAGE)) if inside else None,
        "files": files,
        "sha256": identity_of(files),
    }


def changed_files(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The files that differ between two descriptions of the source, each with what happened to it."""
    old, new = before["files"], now["files"]
    changes = [f"{name} removed" for name in old if name not in new]
    changes += [f"{name} added" for name in new if name not in old]
    changes += [f"{name} changed" for name in old if name in new and old[name] != new[name]]
    return sorted(changes)


def git(*arguments: str) -> str | None:
    """The output of a git command in the package's folder, or None if there is no git or it refuses."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=PACKAGE,
            capture_output=True,
            check=True,
            timeout=30,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip("\n")


def describe_host() -> dict[str, Any]:
    """Python, every installed package, the operating system and the processor."""
    packages = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return {
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "usable_cpus": usable_cpus(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(RECORDED_VARIABLES)},
    }


def processor_name() -> str:
    """The processor's own name, as far as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def usable_cpus() -> int:
    """The CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
