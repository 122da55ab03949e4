"""The command `report`: its options, and what it prints."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from training_lab.command import add_command, add_run, need_packages
from training_lab.errors import UserError
from training_lab.record import find_run


def add_report_commands(commands: Any) -> None:
    """`report`."""
    report = add_command(
        commands,
        "report",
        report_command,
        "Make the report of a run from its folder: one page that needs no network, and its numbers as JSON.",
        "examples:\n"
        "  python -m training_lab report latest --open\n"
        "  python -m training_lab report smoke-2026 --output ~/reports\n\n"
        "A run that is unfinished, failed or damaged has a report too, which says so. Nothing else in the folder is\n"
        "changed. Exit codes: 0 good, 1 it cannot be written, 2 wrong input.",
    )
    add_run(report)
    report.add_argument(
        "--output", type=Path, metavar="DIR", help="write report.html and report.json there, not in the run's folder"
    )
    report.add_argument("--open", action="store_true", help="show it in the browser")


def report_command(options: argparse.Namespace) -> int:
    """`report`."""
    run = find_run(options.runs, options.RUN)
    need_packages(vl_convert="vl-convert-python")
    if options.output is not None:
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {options.output}: cannot be made: {error.strerror}") from error
    from training_lab.report import write_report

    path = write_report(run, options.output)
    print(
        f"Report of {run.run_id}: {path} ({path.stat().st_size / 2**20:.1f} MiB), its numbers in report.json beside it"
    )
    address = path.resolve().as_uri()
    if options.open and webbrowser.open(address):
        return 0
    print(f"  open it in a browser: {address}")
    print("  it is one file and needs no network: it can be sent, printed, or kept as it is")
    return 0
