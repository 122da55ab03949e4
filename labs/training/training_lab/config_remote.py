"""The part of a config that says where `runpod` runs it, and what that may cost. No part of the config's identity.

Standard library only, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from training_lab.settings import Problem, derived, setting

IMAGE = (
    "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
    "@sha256:0a360022e8de4375af99430f84e8b38951acc397252163a37ceac7204d01be35"
)
"""CUDA 12.8.1, PyTorch 2.8.0, Python 3.12.3, Ubuntu 24.04."""


@dataclass(frozen=True)
class RemoteConfig:
    """A machine for the run, and its limits."""

    provider: Literal["runpod", "ssh", "local"] = "runpod"
    """`runpod`: a rented pod. `ssh`: a machine of your own, `remote.host`. `local`: a folder on this machine."""
    host: str = setting("", only=("remote.provider", "ssh"))
    """A name from your SSH configuration, or user@address."""
    hosts: tuple[str, ...] = ()
    """Several machines of your own instead, which train together; the first is where they meet. For `ssh` alone."""
    master: str = setting("", only=("remote.provider", "ssh"))
    """Where the others reach the first host; empty: its address in your SSH configuration."""
    master_port: int = setting(29500, at_least=1024, at_most=65535, only=("remote.provider", "ssh"))
    """The port there on which they meet. They talk on others besides."""
    gpus: tuple[str, ...] = setting(("NVIDIA H100 80GB HBM3",), only=("remote.provider", "runpod"))
    """GPUs by RunPod's exact names, in order of preference. With more than one, runs may come from different parts."""
    gpu_count: int = setting(1, at_least=1, at_most=64)
    """GPUs, and so processes, of the machine: with more than one, torchrun trains."""
    cloud: Literal["SECURE", "COMMUNITY"] = setting("SECURE", only=("remote.provider", "runpod"))
    """COMMUNITY is cheaper; a pod there may have no address of its own."""
    image: str = setting(IMAGE, only=("remote.provider", "runpod"))
    """The container's image, pinned by its digest."""
    min_cuda: str = setting("12.8", only=("remote.provider", "runpod"))
    """The version of CUDA that the host's driver must know."""
    disk_gb: int = setting(40, at_least=10, only=("remote.provider", "runpod"))
    """The container's own disk; wiped when the pod stops."""
    volume_gb: int = setting(60, at_least=10, only=("remote.provider", "runpod"))
    """The disk that a stopped pod keeps: source, packages, data, results."""
    network_volume: str = setting("", only=("remote.provider", "runpod"))
    """The id of a network volume instead, which keeps packages and data from run to run, and costs while it exists."""
    volume_path: str = setting("/workspace", only=("remote.provider", "runpod"))
    """Where that disk or volume is in the pod."""
    data_centers: tuple[str, ...] = setting((), only=("remote.provider", "runpod"))
    """Where the pod is preferred to be."""
    python: str = derived(
        "python3.12 for runpod, else python3",
        lambda get: "python3.12" if get("remote.provider") == "runpod" else "python3",
    )
    """The machine's Python, 3.11 or newer. RunPod's images have several."""
    install: Literal["gpu", "nothing"] = derived(
        "nothing for local, else gpu", lambda get: "nothing" if get("remote.provider") == "local" else "gpu"
    )
    """`gpu`: what requirements-gpu.txt pins, in an environment of its own. `nothing`: the machine's Python has it."""
    max_hours: float = setting(3.0, above=0.0, at_most=720.0)
    """The run is ended after so long, and its machine stopped."""
    max_usd: float = setting(12.0, above=0.0, at_most=1e6)
    """The same for money."""
    max_usd_per_hour: float = setting(4.0, above=0.0, at_most=1e6)
    """A machine that costs more is not taken."""
    max_upload_mb: float = setting(20.0, above=0.0, at_most=1e6)
    """More than this is not sent; the lab itself has less than 1 MB."""

    def problems(self) -> Iterator[Problem]:
        if self.provider == "ssh" and not self.host and not self.hosts:
            yield Problem("remote.host", "ssh needs the name of a host, such as --set remote.host=gpu-box")
        yield from self.problems_of_hosts()
        if not self.volume_path.startswith("/"):
            yield Problem("remote.volume_path", f"must be an absolute path, got {self.volume_path!r}")
        if not all(self.gpus or [""]):
            yield Problem("remote.gpus", "must name at least one GPU, none of them empty")

    def problems_of_hosts(self) -> Iterator[Problem]:
        """What is wrong with several machines."""
        if not self.hosts:
            if self.master:
                yield Problem("remote.master", "has no effect without remote.hosts", is_fatal=False)
            return
        if self.provider != "ssh":
            advice = "set remote.provider=ssh, or leave remote.hosts out"
            yield Problem(
                "remote.hosts", f"several machines are for ssh, and remote.provider is {self.provider!r}: {advice}"
            )
        if self.host:
            yield Problem("remote.hosts", f"{self.host!r} is in remote.host besides; give one of the two")
        for index, host in enumerate(self.hosts):
            if not host or host.startswith("-"):
                yield Problem("remote.hosts", f"must be names of hosts, got {host!r}")
            if host in self.hosts[:index]:
                yield Problem("remote.hosts", f"{host!r} is named twice")
