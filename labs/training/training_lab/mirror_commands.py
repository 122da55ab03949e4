"""The commands `wandb push` and `csv`: a run's metrics elsewhere, from its folder."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiment_runner.durable import write_atomically
from training_lab.command import add_command, add_run
from training_lab.config import TrackingConfig
from training_lab.csv_export import metrics_table
from training_lab.errors import UserError
from training_lab.mirrors.mode import choose_wandb
from training_lab.record import find_run


def add_mirror_commands(commands: Any) -> None:
    """Adds `wandb push` and `csv`."""
    wandb = add_command(commands, "wandb", None, "Send a run to Weights & Biases.", "")
    actions = wandb.add_subparsers(title="commands", metavar="COMMAND", required=True)
    push = add_command(
        actions,
        "push",
        push_command,
        "Make a clean W&B run of a run's folder, whatever became of its mirror while it went.",
        "examples:\n"
        "  python -m training_lab wandb push latest\n"
        "  python -m training_lab wandb push latest --mode offline\n\n"
        "Exit codes: 0 W&B has everything, 1 it has not, 2 wrong input.",
    )
    add_run(push)
    push.add_argument("--mode", choices=("online", "offline"), default="online", help="offline: into files")
    push.add_argument("--project", default="", metavar="NAME", help="default: WANDB_PROJECT, else llm-training-lab")
    push.add_argument("--entity", default="", metavar="NAME", help="default: WANDB_ENTITY, else the key's own")
    push.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="the longest that its end may take (300)"
    )
    push.add_argument("--json", action="store_true", help="a JSON object, for programs")
    table = add_command(
        commands,
        "csv",
        csv_command,
        "Print a run's metrics as CSV, one line an update.",
        "example:\n  python -m training_lab csv latest > metrics.csv",
    )
    add_run(table)
    table.add_argument("--output", type=Path, metavar="FILE", help="write a file instead")


def push_command(options: argparse.Namespace) -> int:
    """`wandb push`."""
    run = find_run(options.runs, options.RUN)
    if not 0 < options.timeout <= 86400:
        raise UserError(f"--timeout {options.timeout:g}: must be above 0 and at most 86400 seconds")
    if run.is_locked():
        raise UserError(f"{run.path}: is being trained now; push it when it has ended")
    tracking = replace(TrackingConfig(), wandb=options.mode, project=options.project, entity=options.entity)
    choice = choose_wandb(tracking, os.environ, asked_by="--mode")
    from training_lab.mirrors.push import push_run

    state = push_run(run, choice, options.timeout)
    is_complete = state["state"] == "complete"
    if options.json:
        print(json.dumps(state, ensure_ascii=False))
    elif is_complete:
        where = state["url"] or f"files; to send them: {state['sync_command']}"
        print(f"{state['rows_sent']:,} rows of {run.run_id} are in {where}")
    else:
        print(f"error: W&B is {state['state']}: {state['message']}", file=sys.stderr)
    return 0 if is_complete else 1


def csv_command(options: argparse.Namespace) -> int:
    """`csv`."""
    table = metrics_table(find_run(options.runs, options.RUN))
    if options.output is None:
        sys.stdout.write(table)
    elif not options.output.parent.is_dir():
        raise UserError(f"--output {options.output}: there is no folder {options.output.parent}")
    else:
        write_atomically(options.output, table.encode("utf-8"))
    return 0
