"""The entry point on the machine that was rented: `python3 -m training_lab.remote install|data|train`.

`install` makes an environment beside the run's folder, where other runs of the machine find it, and where a network
volume keeps it. The other two go on in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

from experiment_runner.durable import sha256_of_file
from training_lab.command import TRAINING_PYTHON

TRAINING = Path(__file__).resolve().parent.parent
PINS, LOCK = TRAINING / "requirements-gpu.txt", TRAINING / "requirements-gpu.lock"
CONFIG_FILE = "remote-config.json"
LOCKED_FOR = ((3, 12), "linux", "x86_64")
DONE = "complete"
TORCH = ("torch==", "--extra-index-url")
"""The lines of the pins that are about torch, which comes from an index of its own."""
MEETING_S = 7200
"""How long a machine waits for the others, which may still install packages and prepare data."""
GET_ADDRESS = 0x8915
"""Linux's question for the address of an interface, SIOCGIFADDR."""


def main(arguments: list[str]) -> int:
    """Runs one step; its exit code."""
    steps = {"install": install, "data": data, "train": train}
    if len(arguments) != 1 or arguments[0] not in steps:
        print(f"usage: python3 -m training_lab.remote {'|'.join(steps)}", file=sys.stderr)
        return 2
    if sys.version_info < TRAINING_PYTHON:
        print(f"error: {sys.executable} is Python {sys.version.split()[0]}; set remote.python to 3.11 or newer",
              file=sys.stderr)  # fmt: skip
        return 2
    return steps[arguments[0]]()


def shared() -> Path:
    """The folder that the machine's runs share."""
    return Path(os.environ.get("EXPERIMENT_SHARED", ".")).resolve()


def environment() -> Path:
    """The environment for these pins and this Python."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return shared() / f"environment-{version}-{sha256_of_file(PINS)[:12]}"


def install() -> int:
    """Installs what the pins say, unless that was done here before."""
    place = environment()
    if (place / DONE).exists():
        print(f"installed before, in {place}")
        return 0
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = str(place / "bin" / "python")
    for command in pip_commands(python):
        code = subprocess.run(command, check=False).returncode
        if code:
            print(f"error: {' '.join(command[1:6])} … ended with {code}", file=sys.stderr)
            return code
    (place / DONE).touch()
    return 0


def pip_commands(python: str) -> list[list[str]]:
    """First torch from its own index, then the rest: by their hashes where those are known, else by their versions."""
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    lines = [line for line in PINS.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    torch = [word for line in lines if line.startswith(TORCH) for word in line.split()]
    others = [line for line in lines if not line.startswith(TORCH)]
    is_locked = (sys.version_info[:2], sys.platform, os.uname().machine) == LOCKED_FOR
    chosen = ["--require-hashes", "--no-deps", "--requirement", str(LOCK)] if is_locked else others
    return [[*pip, *torch], [*pip, *chosen], [python, "-m", "pip", "check"]]


def go_on_installed() -> None:
    """Starts this step again in the environment, if there is one and this is not it."""
    python = environment() / "bin" / "python"
    if os.environ.get("TRAINING_LAB_INSTALL") == "gpu" and Path(sys.prefix) != python.parent.parent:
        os.execv(python, [str(python), "-m", "training_lab.remote", *sys.argv[1:]])


def share_caches() -> None:
    """Downloads and tokens are kept where the next run of the machine finds them."""
    cache = shared() / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HOME", str(cache / "huggingface"))
    here = Path(".cache")
    if not here.exists():
        here.symlink_to(cache, target_is_directory=True)


def data() -> int:
    """Prepares the data of the config that was sent."""
    go_on_installed()
    share_caches()
    from training_lab.cli import main as lab

    return lab(["data", "prepare", "--config", CONFIG_FILE])


def train() -> int:
    """Trains it, in the folder that comes home. A second time it goes on where it was."""
    go_on_installed()
    share_caches()
    results = Path(os.environ["EXPERIMENT_RESULTS"])
    if results.is_dir() and not any(results.iterdir()):
        results.rmdir()
    command = ["train", "--config", CONFIG_FILE, "--runs", str(results.parent), "--run-id", results.name]
    processes, nodes = count_of("TRAINING_LAB_PROCESSES"), count_of("EXPERIMENT_NODES")
    if processes * nodes > 1:  # in this process's place, so that signals reach it and its exit code is the step's
        prefer_the_way_to_the_master()
        os.execv(sys.executable, [sys.executable, *torchrun(processes, nodes), "-m", "training_lab", *command])
    from training_lab.cli import main as lab

    return lab(command)


def count_of(name: str) -> int:
    """A number in the environment; 1 where it is not set."""
    return int(os.environ.get(name, "1"))


def torchrun(processes: int, nodes: int) -> list[str]:
    """The words with which Python starts so many processes, one for each GPU, on this one of so many machines."""
    words = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    if nodes == 1:
        return [*words, "--standalone"]
    place = {"--node-rank": "NODE_RANK", "--master-addr": "MASTER", "--master-port": "MASTER_PORT"}
    meeting = [f"{option}={os.environ[f'EXPERIMENT_{name}']}" for option, name in place.items()]
    return [*words, f"--nnodes={nodes}", *meeting, f"--rdzv-conf=timeout={MEETING_S}"]


def prefer_the_way_to_the_master() -> None:
    """Tells gloo which network to use: by itself it takes what the machine's own name stands for, which often is the
    machine alone. NCCL looks for itself."""
    name = interface_to(os.environ.get("EXPERIMENT_MASTER", ""))
    if count_of("EXPERIMENT_NODES") > 1 and name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_to(address: str) -> str:
    """The network interface over which an address is reached, or which has it; empty where that cannot be found."""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it only chooses a way
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                if fcntl.ioctl(probe, GET_ADDRESS, struct.pack("256s", name.encode()))[20:24] == own:
                    return name
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
