"""The commands `data prepare`, `data inspect` and `data verify`: their options, and what they print."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from training_lab.command import add_command, add_config, need_training_packages, print_findings
from training_lab.errors import UserError
from training_lab.progress import make_progress
from training_lab.resolve import resolve_config


def add_data_commands(commands: Any) -> None:
    """`data prepare`, `data inspect`, `data verify`."""
    summary = "Prepare, look at and verify the data of a config."
    data = commands.add_parser("data", help=summary, description=summary)
    inner = data.add_subparsers(title="commands", metavar="COMMAND", required=True)

    prepare = add_command(
        inner,
        "prepare",
        prepare_command,
        "Download, tokenise, split and pack the text of a config, and show what came out.",
        "examples:\n"
        "  python -m training_lab data prepare --config baseline\n"
        "  python -m training_lab data prepare --config corrected --workers 8\n\n"
        "What is done already is found and verified, not done again; stopped at any moment, the same command goes on.\n"
        "HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to the hub's own client.\n"
        "Exit codes: 0 good, 1 the network or the disk failed, 2 wrong input.",
    )
    add_config(prepare)
    prepare.add_argument(
        "--workers", type=int, default=0, metavar="N", help="threads that tokenise; the same bytes for any (one a CPU)"
    )
    prepare.add_argument(
        "--fast", action="store_true", help="tokenise with the package gigatoken, checked against tiktoken (gpt2 only)"
    )
    prepare.add_argument("--json", action="store_true", help="manifest and figures as a JSON object, for programs")

    inspect = add_command(
        inner,
        "inspect",
        inspect_command,
        "Print rows of an update, piece by piece with text and labels, and draw lengths and fill.",
        "examples:\n"
        "  python -m training_lab data inspect --config smoke\n"
        "  python -m training_lab data inspect --config corrected --update 7 --row 34 --picture packs.svg",
    )
    add_config(inspect)
    inspect.add_argument("--update", type=int, default=1, metavar="U", help="the update to look at (1)")
    inspect.add_argument("--row", type=int, default=0, metavar="R", help="its first row to print, from 0 (0)")
    inspect.add_argument("--rows", type=int, default=2, metavar="N", help="how many rows to print (2)")
    inspect.add_argument("--characters", type=int, default=400, metavar="N", help="text to show of a piece (400)")
    inspect.add_argument(
        "--picture", type=Path, metavar="FILE", help="where to draw, a .png or .svg (beside the data in the cache)"
    )

    verify = add_command(
        inner,
        "verify",
        verify_data_command,
        "Hash source files, tokenizer files and cache again, and make the plan again.",
        "example:\n  python -m training_lab data verify --config corrected\n\n"
        "Exit codes: 0 all is as it was, 1 something is not, 2 wrong input.",
    )
    add_config(verify)
    verify.add_argument("--json", action="store_true", help="one JSON object a line, for programs")


def prepare_command(options: argparse.Namespace) -> int:
    """`data prepare`."""
    resolved = resolve_config(options.config, options.set)
    if options.workers < 0:
        raise UserError(f"--workers {options.workers}: must be 0 (one a CPU) or more")
    need_training_packages()
    from training_lab.prepared import describe_dataset, prepare

    with make_progress(options.json) as progress:
        dataset, stats = prepare(resolved.config, progress, options.workers, options.fast)
    if options.json:
        print(json.dumps({"manifest": dataset.manifest, "stats": stats}, indent=2, ensure_ascii=False))
        return 0
    print(f"Data of {resolved.name}")
    for word, text in describe_dataset(dataset, stats).items():
        print(f"  {word:<12} {text}")
    return 0


def inspect_command(options: argparse.Namespace) -> int:
    """`data inspect`."""
    resolved = resolve_config(options.config, options.set)
    for name, value, smallest in (
        ("--update", options.update, 1),
        ("--rows", options.rows, 0),
        ("--characters", options.characters, 0),
    ):
        if value < smallest:
            raise UserError(f"{name} {value}: must be at least {smallest}")
    if options.update > resolved.config.train.updates:
        raise UserError(f"--update {options.update}: the config has {resolved.config.train.updates} updates")
    need_training_packages()
    from rich.console import Console

    from training_lab.inspection import describe_rows, draw
    from training_lab.prepared import prepare

    with make_progress(False) as progress:
        dataset, stats = prepare(resolved.config, progress)
    console = Console(highlight=False, soft_wrap=True)
    for line in describe_rows(dataset, options.update, options.row, options.rows, options.characters):
        console.print(line)
    path = options.picture or dataset.folder / "data.png"
    draw(stats, path, f"Data of {resolved.name}")
    console.print(f"lengths and fill are drawn in {path}", markup=False)
    return 0


def verify_data_command(options: argparse.Namespace) -> int:
    """`data verify`."""
    resolved = resolve_config(options.config, options.set)
    need_training_packages()
    from training_lab.prepared import verify_data

    with make_progress(options.json) as progress:
        return print_findings(verify_data(resolved.config, progress), f"data of {resolved.name}", options.json)
