"""The command `compare`. Standard library only, Python 3.9; what compares is imported when the input was checked."""

from __future__ import annotations

import argparse
import json
import sys
import webbrowser
from pathlib import Path
from typing import Any

from training_lab.command import add_command, add_runs, need_packages
from training_lab.errors import LabError, UserError
from training_lab.record import find_run

FAILED = 3
ALLOWABLE = (
    "whole records", "code", "training text", "split", "definition of the loss", "tokens seen", "precision",
    "initial weights", "order of the data", "hardware", "threads", "software", "kernels", "measurement window",
    "definition of MFU",
)  # fmt: skip
"""What a person may overlook. Never the validation data, the tokenizer, or that a run has not ended."""


def add_compare_command(commands: Any) -> None:
    """Adds `compare`."""
    compare = add_command(
        commands,
        "compare",
        compare_command,
        "Compare runs: what was changed, whether they may be compared, and what the change did beyond the noise.",
        "examples:\n"
        "  python -m training_lab compare RUN RUN --open\n"
        "  python -m training_lab compare A1 A2 A3 B1 B2 B3      repetitions of two configs with other seeds\n"
        "  python -m training_lab compare RUN RUN --allow code   though their code differs\n\n"
        "Runs of one config with other seeds are repetitions; the first run's config is what the others are compared\n"
        "with. Exit codes: 0 the endpoint differs, 1 indistinguishable, 2 not comparable, 3 an error.",
    )
    compare.add_argument("RUN", nargs="+", help="a run's id, the beginning of one, its folder, or `latest`")
    add_runs(compare)
    compare.add_argument(
        "--allow", action="append", default=[], metavar="ASPECT", choices=ALLOWABLE,
        help=f"compare although this differs: {', '.join(ALLOWABLE)}",
    )  # fmt: skip
    compare.add_argument(
        "--endpoint", choices=("tokens", "seconds"), default="tokens",
        help="what decides: the validation loss at equal target tokens, or after equal seconds of updates (tokens)",
    )  # fmt: skip
    compare.add_argument(
        "--delta", type=float, metavar="NATS", help="the smallest loss that matters (0.5 %% of the first)"
    )
    compare.add_argument(
        "--html", type=Path, metavar="FILE",
        help="write a page with curves, differences of config, code and environment, and its numbers beside it",
    )  # fmt: skip
    compare.add_argument("--open", action="store_true", help="show the page in the browser (compare.html)")
    compare.add_argument("--json", action="store_true", help="a JSON object, for programs")


def compare_command(options: argparse.Namespace) -> int:
    """`compare`: 0 different, 1 indistinguishable, 2 not comparable, 3 an error."""
    try:
        if options.delta is not None and not 0 < options.delta < float("inf"):
            raise UserError(f"--delta {options.delta}: must be above 0")
        page = options.html or (Path("compare.html") if options.open else None)
        if page is not None and page.suffix != ".html":
            raise UserError(f"--html {page}: must end in .html")
        folders = [find_run(options.runs, text) for text in options.RUN]
        need_packages(scipy="scipy", vl_convert="vl-convert-python")
        from training_lab.comparing.compare import as_json, compare_runs
        from training_lab.comparing.effects import Question
        from training_lab.comparing.page import write_page
        from training_lab.comparing.words import in_lines

        question = Question(options.endpoint, options.delta)
        comparison = compare_runs(folders, tuple(options.allow), question, options.runs)
        if page is not None:
            write_page(comparison, page, "Comparison of runs")
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    if options.json:
        print(json.dumps(as_json(comparison), indent=2, ensure_ascii=False))
    else:
        print("\n".join(in_lines(comparison)))
        if page is not None:
            print(f"\nPage: {page.resolve().as_uri()}")
    if options.open and page is not None:
        webbrowser.open(page.resolve().as_uri())
    return comparison.exit_code
