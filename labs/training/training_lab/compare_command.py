"""The command `compare`. Standard library only, Python 3.9; what compares is imported when the input was checked."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from training_lab.command import add_command, add_runs, need_training_packages
from training_lab.errors import LabError, UserError
from training_lab.record import find_run

FAILED = 3
ASPECTS = ("finished runs", "code", "training text", "split", "definition of the loss", "precision", "initial weights",
           "order of the data", "hardware", "threads", "software", "kernels", "measurement window")  # fmt: skip


def add_compare_command(commands: Any) -> None:
    """Adds `compare`."""
    compare = add_command(
        commands,
        "compare",
        compare_command,
        "Compare runs: what was changed, whether they may be compared, and what the change did beyond the noise.",
        "examples:\n"
        "  python -m training_lab compare RUN RUN\n"
        "  python -m training_lab compare A1 A2 A3 B1 B2 B3      repetitions of two configs with other seeds\n"
        "  python -m training_lab compare RUN RUN --allow code   though their code differs\n\n"
        "Runs of one config with other seeds are repetitions of one arm; the first run's arm is what the others are\n"
        "compared with. Exit codes: 0 the endpoint differs, 1 indistinguishable, 2 not comparable, 3 an error.",
    )
    compare.add_argument("RUN", nargs="+", help="a run's id, the beginning of one, its folder, or `latest`")
    add_runs(compare)
    compare.add_argument(
        "--allow", action="append", default=[], metavar="ASPECT", choices=ASPECTS,
        help=f"compare although this differs: {', '.join(ASPECTS)}",
    )  # fmt: skip
    compare.add_argument(
        "--delta", type=float, metavar="NATS", help="the smallest loss that matters (0.5 %% of the first)"
    )
    compare.add_argument("--json", action="store_true", help="a JSON object, for programs")


def compare_command(options: argparse.Namespace) -> int:
    """`compare`: 0 different, 1 indistinguishable, 2 not comparable, 3 an error."""
    try:
        if options.delta is not None and not 0 < options.delta < float("inf"):
            raise UserError(f"--delta {options.delta}: must be above 0")
        folders = [find_run(options.runs, text) for text in options.RUN]
        need_training_packages()
        from training_lab.comparing.compare import as_json, compare_runs, in_lines

        comparison = compare_runs(folders, tuple(options.allow), options.delta)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    if options.json:
        print(json.dumps(as_json(comparison), indent=2, ensure_ascii=False))
    else:
        print("\n".join(in_lines(comparison)))
    return comparison.exit_code
