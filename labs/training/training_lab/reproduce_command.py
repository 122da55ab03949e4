"""The command `reproduce`. Standard library only, Python 3.9; what trains is imported when the input was checked."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from training_lab.command import add_command, add_run, need_packages, need_training_packages
from training_lab.errors import UserError
from training_lab.output import print_line
from training_lab.progress import make_progress
from training_lab.record import Finding, find_run

INTERRUPTED = 130


def add_reproduce_command(commands: Any) -> None:
    """Adds `reproduce`."""
    reproduce = add_command(
        commands,
        "reproduce",
        reproduce_command,
        "Train a run again from its folder alone, with the source that it was trained with, and compare.",
        "examples:\n"
        "  python -m training_lab reproduce latest\n"
        "  python -m training_lab reproduce /media/usb/baseline-20261202-101500-1a2b --updates 20\n\n"
        "The source is unpacked from the folder, each file checked by its hash; what differs between the machines is\n"
        "named; the data are built again and checked. `verify` is the quick check, without training. Exit codes: 0\n"
        "bit-identical, 1 the same within the noise floor, 2 wrong input, 3 it parts, or could not be made again.",
    )
    add_run(reproduce)
    reproduce.add_argument("--updates", type=int, metavar="N", help="only the first N updates")
    reproduce.add_argument("--json", action="store_true", help="one JSON object a line, for programs")


def reproduce_command(options: argparse.Namespace) -> int:
    """`reproduce`."""
    run = find_run(options.runs, options.RUN)
    if options.updates is not None and options.updates < 1:
        raise UserError(f"--updates {options.updates}: must be at least 1")
    need_packages(scipy="scipy")
    need_training_packages()
    from training_lab.errors import LabError
    from training_lab.reproduce import PARTED, reproduce
    from training_lab.studying.making import Stopped

    def say(finding: Finding) -> None:
        if options.json:
            print_line(json.dumps(finding._asdict(), ensure_ascii=False))
        else:
            show.note(f"{'same   ' if finding.is_good else 'differs'}  {finding.subject}: {finding.message}")

    try:
        with make_progress(options.json) as show:
            result = reproduce(run, options.runs, options.updates, show, say)
    except Stopped:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except UserError:
        raise
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return PARTED
    if options.json:
        print_line(json.dumps(result._asdict(), ensure_ascii=False))
    else:
        print_line(f"{run.run_id}: {result.sentence}")
    return result.exit_code
