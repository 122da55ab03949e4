"""Turns a config into a job for the runner: the files that leave this machine, the steps there, what comes home.

The machine gets the lab's modules, the resolved config and the description of the source they came from; nothing else
of the checkout. Standard library only, Python 3.9.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from experiment_runner.durable import json_text
from experiment_runner.job import Files, Job, Limits, Results, Step
from experiment_runner.parsing import Seconds
from training_lab.config import Config
from training_lab.config_remote import RemoteConfig
from training_lab.errors import UserError
from training_lab.footprint import (
    VOCABULARIES,
    kind_on_gpu,
    memory_of_gpu,
    memory_parts,
    micro_batches_to_fit,
    share_out,
)
from training_lab.gpus import find_gpu
from training_lab.mirrors.mode import DEFAULT_PROJECT
from training_lab.provenance import SENT_SOURCE, describe_source
from training_lab.record import MANIFEST, RunFolder
from training_lab.resolve import Resolved

TRAINING = Path(__file__).resolve().parent.parent
LABS = TRAINING.parent
CONFIG_FILE = "remote-config.json"
RECORDS = ("remote.json", "remote-log.txt")
"""What the runner adds to a run's folder."""
INSTALL_TIMEOUT, DATA_TIMEOUT = Seconds(3600.0), Seconds(7200.0)


def build_job(resolved: Resolved, keys: dict[str, str]) -> Job:
    """The job of a config. `keys` has settings for W&B that are no secrets.

    Raises UserError for what cannot be run there.
    """
    config, remote = resolved.config, resolved.config.remote
    need_fit(config, resolved.name)
    python, training = remote.python, "training"

    def step(name: str, timeout: Seconds, *secrets: str) -> Step:
        return Step(name, f"{python} -m training_lab.remote {name}", timeout, training, secrets)

    steps = [step("install", INSTALL_TIMEOUT)] if remote.install == "gpu" else []
    steps += [step("data", DATA_TIMEOUT, "HF_TOKEN")]
    steps += [step("train", Seconds(remote.max_hours * 3600), "WANDB_API_KEY")]
    return Job(
        name=resolved.name[:24].strip(".-_") or "run",
        steps=tuple(steps),
        files=files_of(resolved),
        results=Results(
            path=f"{training}/.runs/{{id}}",
            required=("summary.json", "metrics.jsonl", MANIFEST),
            live=("metrics.jsonl",),
            exclude=(".lock", ".unfinished-*", "*/.unfinished-*"),
            max_gb=float(remote.volume_gb),
        ),
        limits=Limits(max_hours=remote.max_hours, max_usd=remote.max_usd, max_usd_per_hour=remote.max_usd_per_hour),
        env=environment_of(config, keys),
        provider=remote.provider,
        settings={remote.provider: provider_settings(remote)},
    )


def files_of(resolved: Resolved) -> Files:
    """The allow-list: modules of the lab, pins, the resolved config, and text files where the config reads such."""
    return Files(
        root=str(LABS),
        include=(
            "runner/experiment_runner/**/*.py",
            "training/training_lab/*.py",
            "training/training_lab/*/*.py",
            "training/training_lab/report/*.css",
            "training/training_lab/report/*.js",
            "training/requirements-gpu.txt",
            "training/requirements-gpu.lock",
            *texts_of(resolved.config),
        ),
        inline={
            f"training/{CONFIG_FILE}": json_text(resolved.record()),
            f"training/{SENT_SOURCE}": json_text(describe_source()),
        },
        max_mb=resolved.config.remote.max_upload_mb,
    )


def texts_of(config: Config) -> tuple[str, ...]:
    """The patterns of the text files that a config reads. They must be where they can be found by the same names."""
    if config.data.source != "files":
        return ()
    patterns = []
    for pattern in config.data.paths:
        path = Path(os.path.normpath(Path.cwd() / pattern))
        if Path(pattern).is_absolute() or Path.cwd() != TRAINING or TRAINING not in path.parents:
            raise UserError(
                f"data.paths: {pattern}: files for another machine must be inside {TRAINING} and named from there; "
                "copy them into it, and give the command there"
            )
        inside = path.relative_to(LABS).as_posix()
        patterns.append(f"{inside}/**/*" if path.is_dir() else inside)
    return tuple(patterns)


def environment_of(config: Config, keys: dict[str, str]) -> dict[str, str]:
    """What every step finds in its environment."""
    tracking = config.tracking
    found = {
        "PYTHONUNBUFFERED": "1",
        "WANDB_PROJECT": tracking.project or keys.get("WANDB_PROJECT") or DEFAULT_PROJECT,
        "WANDB_ENTITY": tracking.entity or keys.get("WANDB_ENTITY", ""),
        "WANDB_BASE_URL": keys.get("WANDB_BASE_URL", ""),
        "WANDB_MODE": os.environ.get("WANDB_MODE", ""),
        "TRAINING_LAB_IMAGE": config.remote.image if config.remote.provider == "runpod" else "",
        "TRAINING_LAB_INSTALL": config.remote.install,
        "TRAINING_LAB_PROCESSES": str(config.remote.gpu_count),
    }
    return {name: value for name, value in found.items() if value}


def provider_settings(remote: RemoteConfig) -> dict[str, Any]:
    """The config's values as the provider calls them."""
    if remote.provider == "ssh" and remote.hosts:
        meeting = {"master": remote.master, "master_port": remote.master_port}
        return {"nodes": [{"host": host} for host in remote.hosts], **meeting, "python": remote.python}
    if remote.provider == "ssh":
        return {"host": remote.host, "python": remote.python}
    if remote.provider == "local":
        return {"python": remote.python}
    same = ("image", "gpu_count", "min_cuda", "cloud", "disk_gb", "volume_gb", "network_volume", "python")
    others = {"gpus": list(remote.gpus), "data_centers": list(remote.data_centers), "work": remote.volume_path}
    return {**{name: getattr(remote, name) for name in same}, **others}


def predicted_memory(config: Config, gpu: str) -> tuple[int, int, int | None] | None:
    """The bytes that an update takes on a GPU, those that are there, and the fewest micro-batches that fit if it does
    not; None where that cannot be known without the text, or the lab does not know the GPU."""
    known, vocab_size = find_gpu(gpu), VOCABULARIES.get(config.data.tokenizer)
    if known is None or vocab_size is None:
        return None
    kind, there, split = kind_on_gpu(config, known), memory_of_gpu(known), share_out(config, config.remote.gpu_count)
    needed = sum(memory_parts(split, vocab_size, kind).values())
    return needed, there, micro_batches_to_fit(split, vocab_size, kind, there) if needed > there else None


def describe_memory(config: Config) -> list[str]:
    """Whether an update fits, for each GPU."""
    if config.remote.provider != "runpod":
        return []
    lines = []
    for gpu in config.remote.gpus:
        found = predicted_memory(config, gpu)
        if found is None:
            lines.append(f"memory    {gpu}: not known to the lab, or the vocabulary follows from the text")
        else:
            needed, there, _ = found
            lines.append(
                f"memory    {gpu}: an update takes {needed / 2**30:.1f} GiB, and {there / 2**30:.1f} are there"
            )
    return lines


def need_fit(config: Config, name: str) -> None:
    """Raises UserError if an update surely does not fit into a GPU, or cannot occupy all of them: no machine is rented
    for that."""
    share_out(config, config.remote.gpu_count)
    if config.remote.provider != "runpod":
        return
    for gpu in config.remote.gpus:
        found = predicted_memory(config, gpu)
        if found is not None and found[0] > found[1]:
            needed, there, enough = found
            advice = f"--set batch.micro_batches={enough} (the update stays the same)" if enough else "a smaller model"
            sizes = f"an update takes about {needed / 2**30:.1f} GiB, and {gpu} has {there / 2**30:.1f}"
            raise UserError(f"{name}: {sizes}: use {advice}")


def add_to_manifest(output: Path) -> None:
    """Takes the runner's own files into the manifest of the run that came home."""
    if (output / MANIFEST).is_file():
        RunFolder(output).refresh_manifest(*(name for name in RECORDS if (output / name).is_file()))
