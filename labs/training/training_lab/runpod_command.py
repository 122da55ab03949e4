"""The command `runpod`, and those that go on with what it began. Standard library only, Python 3.9."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from experiment_runner import commands as runner
from experiment_runner import launch
from experiment_runner.cli import EXIT_CODES, add_run_options, add_state_commands
from experiment_runner.console import Console
from experiment_runner.state import StateFile
from training_lab.command import add_command, add_config
from training_lab.resolve import resolve_config
from training_lab.runpod import LABS, add_to_manifest, build_job, describe_memory


def add_runpod_commands(commands: Any) -> None:
    """Adds `runpod`, `monitor`, `collect`, `terminate` and the rest of the runner's commands."""
    runpod = add_command(
        commands,
        "runpod",
        runpod_command,
        "Run a config on a rented GPU: get a machine, train there, fetch the run, remove the machine.",
        "examples:\n"
        "  python3 -m training_lab runpod --config smoke --dry-run\n"
        "  python3 -m training_lab runpod --config smoke\n"
        "  python3 -m training_lab runpod --config corrected --set 'remote.gpus=[\"NVIDIA H200\"]'\n"
        "  python3 -m training_lab runpod --config smoke --set remote.provider=ssh --set remote.host=gpu-box\n\n"
        f"The key is in .env (see .env.example).\n\n{EXIT_CODES}",
    )
    add_config(runpod)
    add_run_options(runpod)
    add_state_commands(commands, came_home)


def runpod_command(options: argparse.Namespace) -> int:
    """`runpod`: whatever is wrong with config, files or keys is said before anything is rented."""
    resolved = resolve_config(options.config, options.set)
    place = runner.here(Console(options.json), came_home)
    for warning in resolved.warnings():
        place.console.warn(warning)
    job = build_job(resolved, dict(place.keys))
    label = f"the job of {resolved.name}"
    if options.dry_run:
        more = ["", f"config {resolved.identity[:12]}", *(f"  {line}" for line in resolved.changed_lines())]
        return launch.describe_dry_run(job, label, LABS, place, [*more, "", *describe_memory(resolved.config)])
    return launch.start_run(job, label, LABS, options.output, place, is_detached=options.detach)


def came_home(file: StateFile) -> None:
    """After each command: the runner's record is part of the run."""
    add_to_manifest(Path(file.output))
