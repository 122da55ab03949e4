"""Writes labs/training/requirements-gpu.lock: what a rented GPU machine installs from PyPI, every package with the hash
of its file for Python 3.12 on x86_64 Linux. torch is not in it: its build for CUDA 12.6 is in PyTorch's own index.

Run it with the project's environment after changing requirements-gpu.txt:  .venv/bin/python tools/lock_gpu.py
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TRAINING = Path(__file__).resolve().parent.parent / "labs/training"
SOURCE, LOCK = TRAINING / "requirements-gpu.txt", TRAINING / "requirements-gpu.lock"
MACHINE = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_machine": "x86_64",
}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")
BRINGS_ITS_OWN = ("torch", "triton")
"""They and what they need come from PyTorch's index."""


def pinned_roots() -> dict[str, str]:
    """The packages of requirements-gpu.txt with their versions, but for torch."""
    lines = [line.partition("#")[0].strip() for line in SOURCE.read_text("utf-8").splitlines()]
    parsed = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return {r.name: str(r.specifier).removeprefix("==") for r in parsed if r.name not in BRINGS_ITS_OWN}


def closure(roots: dict[str, str]) -> dict[str, str]:
    """The roots and all that they need there, in the versions that are installed here."""
    found, waiting = dict(roots), list(roots)
    while waiting:
        for text in importlib.metadata.requires(waiting.pop()) or []:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            is_needed = requirement.marker is None or requirement.marker.evaluate({**MACHINE, "extra": ""})
            if is_needed and name not in BRINGS_ITS_OWN and name not in map(canonicalize_name, found):
                found[name] = importlib.metadata.version(name)
                waiting.append(name)
    return found


def hashes(packages: dict[str, str]) -> dict[str, str]:
    """The SHA-256 of the file that pip takes for each package on such a machine."""
    wanted = [f"{name}=={version}" for name, version in packages.items()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
        command += ["--report", str(report), "--python-version", MACHINE["python_version"], "--implementation", "cp"]
        command += ["--target", folder, *(word for platform in PLATFORMS for word in ("--platform", platform))]
        subprocess.run([*command, *wanted], check=True)
        installs = json.loads(report.read_text("utf-8"))["install"]
    files = {one["metadata"]["name"]: one["download_info"]["archive_info"]["hashes"]["sha256"] for one in installs}
    return {canonicalize_name(name): sha256 for name, sha256 in files.items()}


def main() -> None:
    """Writes the lock."""
    packages = closure(pinned_roots())
    known = hashes(packages)
    lines = [f"{name}=={packages[name]} --hash=sha256:{known[canonicalize_name(name)]}" for name in sorted(packages)]
    head = "# Made by tools/lock_gpu.py from requirements-gpu.txt; for Python 3.12 on x86_64 Linux.\n"
    LOCK.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{LOCK}: {len(lines)} packages")


if __name__ == "__main__":
    main()
