"""What happens on the rented machine: packages by their hashes, and the same training as here."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny import TRAINING

from experiment_runner.job import Node
from training_lab import cli, remote

PIN = re.compile(r"([A-Za-z0-9_.-]+)==([^\s]+)")


def pins(path: Path) -> dict[str, str]:
    found = (PIN.match(line) for line in path.read_text("utf-8").splitlines())
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def test_every_pin_is_locked_and_every_locked_package_has_a_hash() -> None:
    locked, asked = pins(remote.LOCK), pins(remote.PINS)
    assert asked.pop("torch") == "2.14.1+cu126"
    assert {name: locked.get(name) for name in asked} == asked
    lines = [line for line in remote.LOCK.read_text("utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_a_rented_machine_has_the_versions_of_the_tests() -> None:
    tested = pins(TRAINING.parent.parent / "constraints.txt")
    shared = {name: version for name, version in pins(remote.LOCK).items() if name in tested}
    assert {name: tested[name] for name in shared} == shared
    assert {"numpy", "tiktoken", "wandb", "liger-kernel"} <= shared.keys()


def make_wheel(folder: Path, name: str) -> str:
    """A package with nothing in it. Returns the SHA-256 of its file."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": b"VALUE = 1\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={urlsafe(content)},{len(content)}" for path, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, content in files.items():
            archive.writestr(inner, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def urlsafe(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Pins of two empty packages, one of which comes as torch does; installed from a folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    hashes = {name: make_wheel(folder, name) for name in ("likenumpy", "liketorch")}
    (tmp_path / "pins.txt").write_text(f"# pins\n--no-index --find-links={folder}\nliketorch==1.0\nlikenumpy==1.0\n")
    (tmp_path / "pins.lock").write_text(
        f"--no-index\n--find-links={folder}\nlikenumpy==1.0 --hash=sha256:{hashes['likenumpy']}\n"
    )
    monkeypatch.setattr(remote, "PINS", tmp_path / "pins.txt")
    monkeypatch.setattr(remote, "LOCK", tmp_path / "pins.lock")
    monkeypatch.setattr(remote, "TORCH", ("liketorch==", "--no-index"))
    monkeypatch.setattr(remote, "LOCKED_FOR", (sys.version_info[:2], sys.platform, os.uname().machine))
    monkeypatch.setenv("EXPERIMENT_SHARED", str(tmp_path / "shared"))
    return folder


def test_packages_are_installed_once_beside_the_runs(wheels: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert remote.install() == 0
    python = remote.environment() / "bin/python"
    assert python.parent.parent.parent == wheels.parent / "shared"
    subprocess.run([python, "-c", "import liketorch, likenumpy"], check=True)
    assert remote.install() == 0
    assert "installed before" in capfd.readouterr().out


def test_a_package_with_another_hash_is_refused_and_nothing_counts_as_installed(wheels: Path) -> None:
    lock = remote.LOCK.read_text()
    remote.LOCK.write_text(re.sub("sha256:[0-9a-f]{4}", "sha256:0000", lock))
    assert remote.install() != 0
    assert not (remote.environment() / remote.DONE).exists()
    remote.LOCK.write_text(lock)
    assert remote.install() == 0, "the next try begins afresh"


def test_other_machines_install_by_version(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOCKED_FOR", ())
    first, second, last = remote.pip_commands("python")
    assert first[-3:] == ["--no-index", f"--find-links={wheels}", "liketorch==1.0"]
    assert second[-1] == "likenumpy==1.0"
    assert last[-1] == "check"


@pytest.mark.parametrize("arguments", [[], ["what"], ["train", "data"]])
def test_another_word_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert remote.main(arguments) == 2
    assert "install|data|train" in capsys.readouterr().err


def test_an_old_python_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(remote, "TRAINING_PYTHON", (99, 0))
    assert remote.main(["data"]) == 2
    assert "set remote.python to 3.11 or newer" in capsys.readouterr().err


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What `train` puts in its own place, as words; nothing is started."""
    words: list[list[str]] = []

    def put_in_place(program: str, arguments: list[str]) -> None:
        words.append(arguments)
        raise SystemExit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", put_in_place)
    monkeypatch.setenv("EXPERIMENT_SHARED", str(tmp_path / "shared"))
    monkeypatch.setenv("EXPERIMENT_RESULTS", str(tmp_path / ".runs/pod7"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINING_LAB_INSTALL", raising=False)
    return words


def test_several_gpus_are_trained_on_by_torchrun(executed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_LAB_PROCESSES", "4")
    with pytest.raises(SystemExit):
        remote.train()
    (words,) = executed
    assert words[:5] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone"]
    assert words[5:7] == ["-m", "training_lab"]
    assert words[7:] == trained()


@pytest.mark.parametrize("processes", [1, 8])
def test_several_machines_are_trained_on_by_one_torchrun_each(
    processes: int, executed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINING_LAB_PROCESSES", str(processes))
    for name, value in Node(1, 2, "127.0.0.1", 29501).environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with pytest.raises(SystemExit):
        remote.train()
    (words,) = executed
    options = words[3 : words.index("-m", 3)]
    assert options == [
        f"--nproc-per-node={processes}", "--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1",
        "--master-port=29501", "--rdzv-conf=timeout=7200",
    ]  # fmt: skip
    assert words[-len(trained()) :] == trained()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "the network on which the first machine is reached"


def test_one_gpu_is_trained_on_in_this_process(executed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setenv("TRAINING_LAB_PROCESSES", "1")

    def lab(words: list[str]) -> int:
        asked.append(words)
        return 7

    monkeypatch.setattr(cli, "main", lab)
    assert remote.train() == 7, "the exit code is the training's"
    assert (executed, asked) == ([], [trained()])


def trained() -> list[str]:
    return ["train", "--config", "remote-config.json", "--runs", str(Path(".runs").resolve()), "--run-id", "pod7"]
