"""The command line: `python -m experiment_runner`. A program that builds its own jobs takes the same commands with
`add_state_commands`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiment_runner import commands, launch
from experiment_runner.commands import Done, Here
from experiment_runner.console import Console
from experiment_runner.errors import InputError, RunnerError
from experiment_runner.job import Files, Job, Step, job_from_json
from experiment_runner.parsing import read_json_file
from experiment_runner.providers import make_provider
from experiment_runner.providers.base import Provider

EXIT_CODES = (
    "exit codes: 0 the job succeeded, its results are here and verified, and the machine is gone; 2 wrong input;\n"
    "10 the job failed, the rest is well; 20 results are incomplete, and the machine is kept; 30 a machine may still\n"
    "cost money; 40 no machine, or none at the price; 50 the provider refused before anything was made;\n"
    "130 interrupted, and the machine is stopped."
)
PLACES = {"runpod": {"image": "none"}, "ssh": {"host": ""}, "local": {}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = make_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except RunnerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m experiment_runner",
        description="Runs a job on a rented, a remote or this machine, brings its results home, leaves nothing on.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    adding = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run = add(
        adding, "run", run_command, "Run a job: get a machine, send files, run steps, fetch results, remove it.",
        "examples:\n  python -m experiment_runner run job.json --dry-run\n"
        f"  python -m experiment_runner run job.json --provider local\n\n{EXIT_CODES}",
    )  # fmt: skip
    run.add_argument("JOB", type=Path, help="the job's JSON file")
    run.add_argument("--provider", choices=sorted(PLACES), help="run it there, with the job's settings for it")
    add_run_options(run)
    add_state_commands(adding, lambda file: None)
    return parser


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that begins a run."""
    parser.add_argument("--dry-run", action="store_true", help="show and check everything; nothing is made")
    parser.add_argument("--detach", action="store_true", help="come back when the job is at work; `monitor` goes on")
    parser.add_argument(
        "--output", default=commands.RUNS, metavar="DIR", help=f"where the results go ({commands.RUNS})"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for programs")


def add_state_commands(adding: Any, done: Done) -> None:
    """Adds the commands that go on with a run; `done` is called with its state after each."""
    for name, act, summary in (
        ("monitor", "", "Go on with a run: follow the job, fetch the results, remove the machine."),
        ("stop", "stop", "End a run's job, fetch what exists, and stop its machine with the disk kept."),
        ("start", "start", "Start a run's stopped machine again, to collect or to go on."),
    ):
        one = add(adding, name, going_on(act, done), summary, f"example:\n  {name} .runpod/STATE.json\n\n{EXIT_CODES}")
        add_state(one)
    collect = add(
        adding, "collect", collecting(done), "Fetch and verify a run's results; the machine stays as it is.",
        f"example:\n  collect .runpod/STATE.json --output .runs/recovered\n\n{EXIT_CODES}",
    )  # fmt: skip
    add_state(collect)
    collect.add_argument("--output", default="", metavar="DIR", help="another folder for them")
    end = add(
        adding, "terminate", terminating(done), "Delete a run's machine, and look whether it is gone.",
        f"examples:\n  terminate .runpod/STATE.json\n  terminate --id POD --yes\n\n{EXIT_CODES}",
    )  # fmt: skip
    end.add_argument("STATE", type=Path, nargs="?", help="the run's state file, in .runpod")
    end.add_argument("--id", metavar="ID", help="a machine of this runner, by its id, where there is no state file")
    end.add_argument("--yes", action="store_true", help="even if results are lost with it")
    add_place(end)
    cost = add(
        adding, "cost", costing(done), "Ask what was really billed for a run.", "example:\n  cost .runpod/STATE.json"
    )
    add_state(cost)
    for name, run, summary in (
        ("ls", listing, "List the machines of this runner that exist, with or without a state file."),
        ("gc", cleaning, "Delete the machines of this runner whose time is over."),
        ("doctor", examining, "Check what a remote run needs: Python, ssh, keys, the provider."),
    ):
        one = add(adding, name, run, summary, f"example:\n  {name}")
        add_place(one)
        one.add_argument("--json", action="store_true", help="one JSON object a line, for programs")
        if name == "gc":
            one.add_argument("--yes", action="store_true", help="do it; without this it only says what it would do")


def add(adding: Any, name: str, run: Any, summary: str, epilog: str) -> argparse.ArgumentParser:
    """A command with its help."""
    added: argparse.ArgumentParser = adding.add_parser(
        name, help=summary, description=summary, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    added.set_defaults(run=run)
    return added


def add_state(parser: argparse.ArgumentParser) -> None:
    """The state file that a command goes on from."""
    parser.add_argument("STATE", type=Path, help="the run's state file, in .runpod")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for programs")


def add_place(parser: argparse.ArgumentParser) -> None:
    """Where to look, without a run's state."""
    parser.add_argument("--provider", choices=sorted(PLACES), default="runpod", help="where to look (runpod)")
    parser.add_argument("--host", default="", help="the host, for --provider ssh")


def read_job(path: Path, provider: str | None) -> Job:
    """The job in a file, for another provider if one is named."""
    job = job_from_json(read_json_file(path), str(path))
    return replace(job, provider=provider) if provider else job


def run_command(options: argparse.Namespace) -> int:
    """`run`."""
    job, place = read_job(options.JOB, options.provider), commands.here(Console(options.json), lambda file: None)
    base, label = options.JOB.resolve().parent, str(options.JOB)
    if options.dry_run:
        return launch.describe_dry_run(job, label, base, place, [])
    return launch.start_run(job, label, base, options.output, place, is_detached=options.detach)


def going_on(act: str, done: Done) -> Any:
    """`monitor`, `stop`, `start`."""
    return lambda options: launch.go_on(options.STATE, commands.here(Console(options.json), done), act)


def collecting(done: Done) -> Any:
    """`collect`."""
    return lambda options: launch.go_on(
        options.STATE, commands.here(Console(options.json), done), "collect", output=options.output
    )


def terminating(done: Done) -> Any:
    """`terminate`."""

    def run(options: argparse.Namespace) -> int:
        here = commands.here(Console(), done)
        if (options.STATE is None) == (options.id is None):
            raise InputError("terminate: give a state file, or --id with the id of a machine")
        if options.id is not None:
            if not options.yes:
                raise InputError("terminate --id: nothing is known of its results; give --yes to delete it")
            return commands.terminate_by_id(provider_at(options, here), options.id, here)
        return launch.terminate(options.STATE, here, options.yes)

    return run


def costing(done: Done) -> Any:
    """`cost`."""
    return lambda options: launch.refresh_cost(options.STATE, commands.here(Console(options.json), done))


def listing(options: argparse.Namespace) -> int:
    """`ls`."""
    here = commands.here(Console(options.json), lambda file: None)
    return commands.list_machines(provider_at(options, here), here)


def cleaning(options: argparse.Namespace) -> int:
    """`gc`."""
    here = commands.here(Console(options.json), lambda file: None)
    return commands.collect_garbage(provider_at(options, here), here, options.yes)


def examining(options: argparse.Namespace) -> int:
    """`doctor`."""
    here = commands.here(Console(options.json), lambda file: None)
    return commands.doctor(lambda: provider_at(options, here), here)


def provider_at(options: argparse.Namespace, here: Here) -> Provider:
    """A provider without a job, to look around at."""
    settings = {**PLACES[options.provider], **({"host": options.host} if options.provider == "ssh" else {})}
    job = Job("look", (Step("look", "true"),), Files(inline={"nothing": ""}), provider=options.provider,
              settings={options.provider: settings})  # fmt: skip
    return make_provider(job, "the command line", here.keys)
