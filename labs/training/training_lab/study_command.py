"""The commands `study` and `noise`. Standard library only, Python 3.9; what runs is imported when it is needed."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from training_lab.command import add_command, add_config, add_runs, need_packages, need_training_packages
from training_lab.errors import LabError, UserError
from training_lab.output import print_line
from training_lab.progress import make_progress

INCOMPLETE, INTERRUPTED = 4, 130
FEWEST_SEEDS = 2


def add_study_commands(commands: Any) -> None:
    """Adds `study` and `noise`."""
    study = add_command(
        commands,
        "study",
        study_command,
        "Answer one question: run a config and its changes with several seeds, compare, and write down what came out.",
        "examples:\n"
        "  python -m training_lab study muon                    one that ships: labs/training/studies/muon.json\n"
        "  python -m training_lab study my-question.json\n"
        "  python -m training_lab study muon --plan             show what would run\n\n"
        "A file says question, expected, base, changes, seeds, endpoint, delta, where and budget; docs/comparing.md\n"
        "has an example. What is interrupted goes on with the same command; runs that are there already are used if\n"
        "config, code and machine are the same. Exit codes: 0 the endpoint differs, 1 indistinguishable or nothing\n"
        "to compare, 2 wrong input, 3 not comparable, 4 not all runs have an outcome, 130 stopped.",
    )
    study.add_argument("FILE", help="a study's JSON file, or the name of one that ships")
    study.add_argument("--plan", action="store_true", help="show the runs and what is there already; run nothing")
    add_runs(study)

    noise = add_command(
        commands,
        "noise",
        noise_command,
        "Measure the noise floor of a config: the same seed twice, then other seeds.",
        "example:\n  python -m training_lab noise --config smoke --seeds 5\n\n"
        "`compare` uses it for single runs of this config, until config, code, data or machine change. Exit codes: 0\n"
        "measured, and the same seed gave the same bits; 1 it did not; 2 wrong input.",
    )
    add_config(noise)
    noise.add_argument("--seeds", type=int, default=5, metavar="N", help="how many seeds (5)")
    noise.add_argument(
        "--vary", choices=("both", "init", "order"), default="both",
        help="what another seed changes: initial weights, the order of the texts, or both (both)",
    )  # fmt: skip
    add_runs(noise)


def study_command(options: argparse.Namespace) -> int:
    """`study`."""
    need_packages(scipy="scipy", vl_convert="vl-convert-python")
    need_training_packages()
    from training_lab.studying.declaration import find_study, read_study
    from training_lab.studying.making import Stopped
    from training_lab.studying.study import conduct, describe_plan

    study = read_study(find_study(options.FILE))
    if options.plan:
        print("\n".join(describe_plan(study, options.runs)))
        return 0
    print_line(f"{study.name}: {study.question}")
    try:
        with make_progress(as_json=False) as show:
            result = conduct(study, options.runs, show, show.note)
    except Stopped:
        print("stopped; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    print("\n".join(result.lines()))
    if not result.is_complete:
        return INCOMPLETE
    code = result.comparison.exit_code if result.comparison is not None else 1
    return 3 if code == 2 else code


def noise_command(options: argparse.Namespace) -> int:
    """`noise`."""
    if options.seeds < FEWEST_SEEDS:
        raise UserError(f"--seeds {options.seeds}: must be at least {FEWEST_SEEDS}")
    need_packages(scipy="scipy", vl_convert="vl-convert-python")
    need_training_packages()
    from training_lab.studying.making import Stopped
    from training_lab.studying.noise import measure_noise

    try:
        with make_progress(as_json=False) as show:
            noise = measure_noise(
                options.config, options.set, options.seeds, options.vary, options.runs, show, show.note
            )  # fmt: skip
    except Stopped:
        print("stopped; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(noise.lines()))
    return 0 if noise.repeat.is_same else 1
