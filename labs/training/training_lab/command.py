"""What several commands share: their help, the options that choose a config, how findings are printed."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from training_lab.errors import UserError
from training_lab.record import Finding

TRAINING_PYTHON = (3, 11)


def add_command(commands: Any, name: str, run: Any, summary: str, epilog: str) -> argparse.ArgumentParser:
    """A command with its help."""
    added: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    added.set_defaults(run=run)
    return added


def add_config(parser: argparse.ArgumentParser, is_required: bool = True) -> None:
    """The options that choose a config."""
    parser.add_argument(
        "--config", required=is_required, metavar="NAME|FILE", help="an experiment's name, or a JSON or YAML file"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one setting; may be given again"
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """The options that choose a run."""
    parser.add_argument("RUN", help="a run's id, the beginning of one, its folder, or `latest`")
    add_runs(parser)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Where the runs are."""
    parser.add_argument("--runs", type=Path, default=Path(".runs"), metavar="DIR", help="folder of the runs (.runs)")


def print_findings(findings: Iterable[Finding], subject: str, as_json: bool) -> int:
    """Prints what was looked at, each as soon as it is known. Returns the exit code."""
    num_bad = num_good = 0
    for finding in findings:
        num_bad += not finding.is_good
        num_good += finding.is_good
        if as_json:
            print(json.dumps(finding._asdict(), ensure_ascii=False), flush=True)
        else:
            print(f"{'ok ' if finding.is_good else 'BAD'}  {finding.subject}: {finding.message}", flush=True)
    if not as_json:
        print(f"{subject}: " + ("as recorded" if not num_bad else f"{num_bad} of {num_good + num_bad} checks failed"))
    return 1 if num_bad else 0


def need_training_packages() -> None:
    """Raises UserError if this Python cannot train, with what to do."""
    # Read when torch is loaded: its profiler announces itself on standard error, and its CPU allocator complains of
    # what was there before it.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    need_packages(torch="torch")


def need_packages(**modules: str) -> None:
    """Raises UserError if this Python is too old or lacks a module; each is given with the package that has it."""
    if sys.version_info < TRAINING_PYTHON:
        have, need = (".".join(map(str, version)) for version in (sys.version_info[:2], TRAINING_PYTHON))
        raise UserError(
            f"this command needs Python {need} or newer, this is {have}; use the environment of `make smoke`"
        )
    for module, package in modules.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"this command needs {package} ({error}); `make smoke` in the repository's root installs it"
            ) from error
