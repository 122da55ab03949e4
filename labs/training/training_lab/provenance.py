"""What was executed: the commit, what had changed since, every file that ran and its hash."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import experiment_runner
from experiment_runner.durable import sha256_of_file
from experiment_runner.redaction import Secrets
from training_lab.identity import identity_of

PACKAGE = Path(__file__).resolve().parent
RUNNER = Path(experiment_runner.__file__).resolve().parent
OF_THE_RUNNER = [RUNNER / f"{name}.py" for name in ("__init__", "durable", "errors", "redaction")]
"""What a training uses of the runner."""
SENT_SOURCE = "sent-source.json"
"""The description that travels with a source which is sent to another machine, where no commit can be asked for."""

# Environment variables that libraries read and that can change how, and so how exactly, something is computed. The lab
# sets its own number of threads and its FP32 arithmetic; what it cannot set is at least on record.
RECORDED_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES",
    "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "LD_PRELOAD",
    "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_DYNAMIC", "OMP_NUM_THREADS",
    "OMP_PROC_BIND", "OMP_SCHEDULE", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT",
)  # fmt: skip


def describe_source() -> dict[str, Any]:
    """The content of `source.json`: commit, uncommitted changes, each file with its SHA-256, one hash over all.

    Outside a git checkout, or without git, `commit` is None and the hashes alone say what ran.
    """
    files = {name: sha256_of_file(path) for name, path in source_files().items()}
    sent = read_sent_source()
    if sent is not None and sent.get("files") == files:
        return sent
    # Installed into some other project's folder, that project's commit says nothing of this code.
    is_tracked = git("ls-files", "--error-unmatch", "__init__.py") is not None
    return {**(describe_commit() if is_tracked else NO_COMMIT), "files": files, "sha256": identity_of(files)}


def source_files() -> dict[str, Path]:
    """Every file that a training runs, by its name in an import path."""
    ours = {path.relative_to(PACKAGE.parent).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {**ours, **{path.relative_to(RUNNER.parent).as_posix(): path for path in OF_THE_RUNNER}}


def pack_source() -> bytes:
    """The content of `source.zip`: the files that ran, the same bytes for the same files. A secret in one is replaced
    by its name; the file then no longer has its hash, and says so."""
    secrets = Secrets.from_environment(os.environ)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in source_files().items():
            entry = zipfile.ZipInfo(name)  # its time is the earliest that the format knows
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, secrets.redact(path.read_text("utf-8")))
    return packed.getvalue()


def read_sent_source() -> dict[str, Any] | None:
    """How the source was described on the machine that it was sent from; None where it was not sent."""
    try:
        sent: dict[str, Any] = json.loads((PACKAGE.parent / SENT_SOURCE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return sent


NO_COMMIT: dict[str, Any] = {
    "commit": None,
    "uncommitted_changes": None,
    "uncommitted_diff": None,
    "untracked_files": {},
}


def describe_commit() -> dict[str, Any]:
    """The commit, and how the code differs from it."""
    everything = [str(PACKAGE), *map(str, OF_THE_RUNNER)]
    modules = [f"{PACKAGE}/*.py", *map(str, OF_THE_RUNNER)]
    untracked = (git("ls-files", "--others", "--exclude-standard", "--", *modules) or "").splitlines()
    return {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": (git("status", "--porcelain", "--", *everything) or "").splitlines(),
        "uncommitted_diff": git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", *everything),
        "untracked_files": {name: (PACKAGE / name).read_text("utf-8") for name in untracked},
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
            ["git", "--no-optional-locks", *arguments],
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
    # A package whose metadata are broken has no name; it cannot be imported by one either.
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return {
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "usable_cpus": usable_cpus(),
        "image": os.environ.get("TRAINING_LAB_IMAGE"),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        "variables": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
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
