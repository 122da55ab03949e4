"""A config becomes a job: what leaves this machine, which step knows which secret, what is refused before it costs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_python39 import find_python39
from tiny import TINY, TRAINING

from experiment_runner.bundle import gather
from experiment_runner.job import Job, job_from_json
from experiment_runner.redaction import Secrets
from training_lab.cli import main
from training_lab.config_remote import IMAGE
from training_lab.errors import UserError
from training_lab.provenance import describe_source
from training_lab.record import RunFolder
from training_lab.resolve import resolve_config
from training_lab.runpod import add_to_manifest, build_job, predicted_memory

KEYS = {"RUNPOD_API_KEY": "rpa_" + "k" * 40, "WANDB_API_KEY": "w" * 40}
LABS = TRAINING.parent


def job_of(*overrides: str, config: str = "smoke") -> Job:
    return build_job(resolve_config(config, overrides), {})


def sent_paths(job: Job) -> list[str]:
    return [file.path for file in gather(job.files, LABS, Secrets({})).files]


def test_what_leaves_this_machine_are_modules_pins_and_the_config() -> None:
    sent = sent_paths(job_of())
    allowed = re.compile(
        r"(runner/experiment_runner|training/training_lab)/[\w/]+\.(py|css|js)"
        r"|training/(requirements-gpu\.(txt|lock)|remote-config\.json|sent-source\.json)"
    )
    assert [path for path in sent if not allowed.fullmatch(path)] == []
    modules = {path.relative_to(LABS).as_posix() for path in (TRAINING / "training_lab").rglob("*.py")}
    assert modules <= set(sent)


def test_each_secret_is_for_one_step_and_the_accounts_key_for_none() -> None:
    job = job_of()
    assert {step.name: step.secrets for step in job.steps} == {
        "install": (), "data": ("HF_TOKEN",), "train": ("WANDB_API_KEY",),
    }  # fmt: skip
    assert "RUNPOD_API_KEY" not in json.dumps(job.to_json())


def test_a_job_survives_its_own_json() -> None:
    job = job_of("remote.max_usd=7")
    assert job_from_json(json.loads(json.dumps(job.to_json())), "state") == job
    assert job.limits.max_usd == 7


def test_the_image_is_pinned_and_what_runs_in_it_is_recorded() -> None:
    job = job_of()
    assert job.settings["runpod"]["image"] == IMAGE == job.env["TRAINING_LAB_IMAGE"]
    assert re.search(r"cu128\d-torch280.*@sha256:[0-9a-f]{64}$", IMAGE)


def test_the_config_that_is_sent_is_the_same_experiment(tmp_path: Path) -> None:
    here = resolve_config("corrected", ["optimizer.max_lr=1e-3"])
    sent = tmp_path / "remote-config.json"
    sent.write_text(build_job(here, {}).files.inline["training/remote-config.json"], "utf-8")
    there = resolve_config(str(sent))
    assert (there.name, there.identity, there.config) == (here.name, here.identity, here.config)
    assert there.warnings() == here.warnings(), "what nobody chose is not warned about"


def test_the_source_keeps_its_commit_where_no_commit_can_be_asked_for(tmp_path: Path) -> None:
    job = job_of()
    for file in gather(job.files, LABS, Secrets({})).files:
        path = tmp_path / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
    script = "import json; from training_lab.provenance import describe_source; print(json.dumps(describe_source()))"
    command = [sys.executable, "-c", script]
    environment = {"PYTHONPATH": f"{tmp_path}/training:{tmp_path}/runner", "PATH": os.environ["PATH"]}

    def described() -> dict[str, object]:
        done = subprocess.run(command, env=environment, capture_output=True, check=True, cwd=tmp_path)
        return dict(json.loads(done.stdout))

    assert described() == describe_source()
    (tmp_path / "training/training_lab/loss.py").write_text("changed there\n")
    assert described()["commit"] is None, "the description is believed only for what it describes"


def test_what_a_training_uses_of_the_runner_is_what_its_record_names() -> None:
    script = (
        "import sys, training_lab.train; from training_lab.provenance import OF_THE_RUNNER; "
        "used = {m.__file__ for name, m in sys.modules.items() if name.partition('.')[0] == 'experiment_runner'}; "
        "print(used == set(map(str, OF_THE_RUNNER)), used)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.startswith("True"), done.stdout


def test_texts_of_ones_own_are_sent_from_inside_the_lab_and_refused_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = ("data.source=files", 'data.paths=["requirements-gpu.txt"]')
    monkeypatch.chdir(TRAINING)
    assert "training/requirements-gpu.txt" in sent_paths(job_of(*settings))
    for paths in ('["/etc/hostname"]', '["../runner/pyproject.toml"]'):
        with pytest.raises(UserError, match=r"^data\.paths: .*must be inside"):
            job_of("data.source=files", f"data.paths={paths}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="must be inside"):
        job_of(*settings)


def test_what_cannot_fit_is_refused_before_a_machine_is_rented(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["runpod", "--config", "corrected", "--set", 'remote.gpus=["NVIDIA GeForce RTX 4090"]']
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "48.2 GiB, and NVIDIA GeForce RTX 4090 has 21.4: use --set batch.micro_batches=5" in error
    assert not Path(".runpod").exists()


@pytest.mark.parametrize(("gpus", "micro_batches", "same_as"), [(1, 1, 1), (2, 1, 2), (2, 3, 4), (8, 1, 8), (8, 9, 16)])
def test_what_must_fit_is_a_micro_batch_of_an_update_that_all_gpus_share(
    gpus: int, micro_batches: int, same_as: int
) -> None:
    def needed(*settings: str) -> int:
        found = predicted_memory(resolve_config("corrected", ["batch.packs=144", *settings]).config, "NVIDIA H200")
        assert found is not None
        return found[0]

    many = needed(f"remote.gpu_count={gpus}", f"batch.micro_batches={micro_batches}")
    assert many == needed(f"batch.micro_batches={same_as}")


@pytest.mark.parametrize("provider", ["runpod", "ssh", "local"])
def test_every_machine_is_told_how_many_processes_train(provider: str) -> None:
    settings = (f"remote.provider={provider}", "remote.gpu_count=2", *(["remote.host=box"] * (provider == "ssh")))
    resolved = resolve_config("smoke", settings)
    assert build_job(resolved, {}).env["TRAINING_LAB_PROCESSES"] == "2"
    assert not any("gpu_count" in warning for warning in resolved.warnings())


def test_several_hosts_become_the_nodes_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("remote.provider=ssh", 'remote.hosts=["gpu-a","me@10.0.0.2"]', "remote.gpu_count=8")
    job = job_of(*settings)
    assert job.settings["ssh"]["nodes"] == [{"host": "gpu-a"}, {"host": "me@10.0.0.2"}]
    assert main(["runpod", "--config", "smoke", *(w for s in settings for w in ("--set", s)), "--dry-run"]) == 0
    assert "nodes\n  0 gpu-a\n  1 me@10.0.0.2\n  they meet at gpu-a, port 29500" in capsys.readouterr().out
    assert resolve_config("smoke", ["remote.master=a"]).warnings() != []


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["remote.provider=ssh"], "remote.host: ssh needs the name of a host"),
        (['remote.hosts=["a","b"]'], "remote.hosts: several machines are for ssh, and remote.provider is 'runpod'"),
        (["remote.provider=ssh", 'remote.hosts=["a","b"]', "remote.host=c"], "remote.hosts: 'c' is in remote.host"),
        (["remote.provider=ssh", 'remote.hosts=["a","b","a"]'], "remote.hosts: 'a' is named twice"),
        (["remote.provider=ssh", 'remote.hosts=["a",""]'], "remote.hosts: must be names of hosts"),
        (["remote.gpus=[]"], "remote.gpus: must name at least one GPU"),
        (["remote.volume_path=workspace"], "remote.volume_path: must be an absolute path"),
        (["remote.gpu=H100"], "remote.gpu: unknown key; the nearest is remote.gpus"),
    ],
)
def test_wrong_settings_are_named(settings: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runpod", "--config", "smoke", *(w for s in settings for w in ("--set", s)), "--dry-run"]) == 2
    assert error in capsys.readouterr().err
    assert not Path(".runpod").exists()


def test_without_a_key_nothing_is_begun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    assert main(["runpod", "--config", "smoke"]) == 2
    assert "RUNPOD_API_KEY is not set; put it into .env (see .env.example)" in capsys.readouterr().err


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout with nothing installed: the files of `labs` that Git would have, and no more."""
    copied = tmp_path / "labs"
    for part in ("runner/experiment_runner", "training/training_lab", "training/experiments"):
        shutil.copytree(LABS / part, copied / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".env.example", "requirements-gpu.txt", "requirements-gpu.lock"):
        shutil.copy(TRAINING / name, copied / "training" / name)
    return copied / "training"


@pytest.mark.parametrize("config", ["smoke", "profile", "corrected", "baseline"])
def test_the_dry_run_of_a_bare_checkout_shows_everything_and_makes_nothing(config: str, bare: Path) -> None:
    python = find_python39()
    if python is None:
        pytest.skip("needs Python 3.9: none is called python3.9, and pyenv has none")
    shutil.copy(bare / ".env.example", bare / ".env")
    (bare / ".env").chmod(0o600)
    before = sorted(bare.rglob("*"))
    done = subprocess.run(
        [python, "-m", "training_lab", "runpod", "--config", config, "--dry-run"], cwd=bare, check=False,
        capture_output=True, encoding="utf-8", env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(bare.rglob("*")) == before
    for part in ("train.updates = ", "training_lab/engine.py", IMAGE, "WANDB_API_KEY (not set)", "max_usd: 12",
                 "an update takes", "without RUNPOD_API_KEY prices and stock are not known"):  # fmt: skip
        assert part in done.stdout, part
    assert "commit" not in done.stderr


def test_the_runners_files_become_part_of_the_run_and_verify_is_content() -> None:
    folder = RunFolder(Path("run"))
    folder.path.mkdir()
    folder.write_json("summary.json", {"state": "finished"})
    folder.write_manifest()
    Path("run/remote.json").write_text("{}")
    Path("run/remote-log.txt").write_text("log")
    assert [finding.subject for finding in folder.verify_manifest() if not finding.is_good] == [
        "remote-log.txt", "remote.json",
    ]  # fmt: skip
    add_to_manifest(folder.path)
    assert all(finding.is_good for finding in folder.verify_manifest())
    add_to_manifest(Path("nothing"))


def test_a_training_takes_the_name_that_it_is_given() -> None:
    assert main(["train", "--config", str(TINY), "--run-id", "pod123", "--stop-after", "1"]) == 0
    assert Path(".runs/pod123/summary.json").exists()
    assert main(["train", "--config", str(TINY), "--run-id", "pod123"]) == 0, "the same command goes on"
    assert [path.name for path in Path(".runs").iterdir()] == ["pod123"]


@pytest.mark.parametrize("run_id", ["a/b", "..", "", "a b"])
def test_a_name_that_is_none_is_refused(run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", str(TINY), "--run-id", run_id]) == 2
    assert "--run-id" in capsys.readouterr().err
