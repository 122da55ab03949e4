"""The commands `runs` and `mark`. Standard library only, Python 3.9."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import Any

from training_lab.command import add_command, add_runs, need_packages
from training_lab.errors import UserError
from training_lab.ledger import MARKS, add_judgement, read_ledger, read_studies
from training_lab.record import find_run

INDEX = "index.html"


def add_ledger_commands(commands: Any) -> None:
    """Adds `runs` and `mark`."""
    runs = add_command(
        commands,
        "runs",
        runs_command,
        "List studies and runs, newest first.",
        "examples:\n"
        "  python -m training_lab runs --state finished --config baseline\n"
        "  python -m training_lab runs --mark keep --grep muon\n"
        "  python -m training_lab runs --html                   a page with links to every report: .runs/index.html",
    )
    runs.add_argument("--state", metavar="STATE", help="only runs in this state, such as finished, killed, failed")
    runs.add_argument("--mark", metavar="MARK", choices=MARKS, help="only runs with this mark; none: without one")
    runs.add_argument("--config", metavar="NAME", help="only runs of this config")
    runs.add_argument("--study", metavar="NAME", help="only runs of this study")
    runs.add_argument("--grep", metavar="TEXT", help="only runs with this in id, question or notes")
    runs.add_argument("--html", action="store_true", help="write a page of all of them into the folder of the runs")
    runs.add_argument("--json", action="store_true", help="a JSON list, for programs")
    add_runs(runs)

    mark = add_command(
        commands,
        "mark",
        mark_command,
        "Say what you make of runs: keep, discard, crash, or a note. The runs stay as they are.",
        "examples:\n"
        "  python -m training_lab mark keep latest --note 'the new reference'\n"
        "  python -m training_lab mark discard RUN RUN\n"
        "  python -m training_lab mark none RUN                 takes the mark back\n"
        "  python -m training_lab mark note RUN --note 'grad norm jumps at update 15'",
    )
    mark.add_argument("MARK", choices=(*MARKS, "note"), help="keep, discard, crash, none, or only a note")
    mark.add_argument("RUN", nargs="+", help="a run's id, the beginning of one, its folder, or `latest`")
    mark.add_argument("--note", default="", metavar="TEXT", help="a line of yours")
    add_runs(mark)


def mark_command(options: argparse.Namespace) -> int:
    """`mark`."""
    if options.MARK == "note" and not options.note.strip():
        raise UserError("mark note: needs --note TEXT")
    runs = [find_run(options.runs, text) for text in options.RUN]
    for run in runs:
        if run.path.resolve().parent != options.runs.resolve():
            raise UserError(f"{run.path}: is not in {options.runs}; give its folder with --runs")
    add_judgement(options.runs, runs, "" if options.MARK == "note" else options.MARK, options.note.strip())
    for run in runs:
        print(f"{run.run_id}: {options.MARK}{': ' + options.note.strip() if options.note.strip() else ''}")
    return 0


def runs_command(options: argparse.Namespace) -> int:
    """`runs`."""
    described = [run for run in read_ledger(options.runs) if is_wanted(run, options)]
    studies = read_studies(options.runs)
    if options.html:
        need_packages(vl_convert="vl-convert-python")
        from training_lab.report.index import write_index

        path = write_index(options.runs, studies, described)
        print(f"{len(described)} runs, {len(studies)} studies: {path.resolve().as_uri()}")
        return 0
    if options.json:
        print(json.dumps(described, indent=2, ensure_ascii=False))
        return 0
    is_filtered = any((options.state, options.mark, options.config, options.study, options.grep))
    if not described:
        what = "No such runs" if is_filtered else "No runs"
        print(f"{what} in {options.runs}. Start one with: python -m training_lab train --config smoke")
        return 0
    if studies and not is_filtered:
        print_studies(studies)
    print_runs(described)
    return 0


def is_wanted(run: dict[str, Any], options: argparse.Namespace) -> bool:
    """Whether a run passes the filters."""
    words = " ".join([run["run"], run["question"], *run["notes"]]).lower()
    return (
        (options.state is None or run["state"].startswith(options.state))
        and (options.mark is None or run["mark"] == (options.mark if options.mark != "none" else ""))
        and (options.config is None or run["config"] == options.config)
        and (options.study is None or run["study"] == options.study)
        and (options.grep is None or options.grep.lower() in words)
    )


def print_studies(studies: list[dict[str, Any]]) -> None:
    """The studies, each with its question and verdicts."""
    width = max(len("study"), *(len(study["study"]) for study in studies))
    print(f"{'study':<{width}}  {'state':<8}  {'runs':>7}  question")
    for study in studies:
        runs = f"{study['with_outcome']}/{len(study['runs'])}"
        print(cut(f"{study['study']:<{width}}  {study['state']:<8}  {runs:>7}  {study['question']}"))
        for verdict in study["verdicts"]:
            print(cut(f"{'':<{width}}  {'':<8}  {'':>7}  {verdict}"))
    print()


def print_runs(described: list[dict[str, Any]]) -> None:
    """The runs, a line each."""
    width = max(len(run["run"]) for run in described)
    print(f"{'run':<{width}}  {'state':<22}  {'mark':<7}  {'updates':>13}  {'val_loss':>8}  {'tokens/s':>10}  question")
    for run in described:
        updates = f"{run['updates']}/{run['planned_updates']}" if run["updates"] is not None else ""
        val_loss = f"{run['val_loss']:.4f}" if isinstance(run["val_loss"], float) else ""
        speed = f"{run['target_tokens_per_s']:,.0f}" if isinstance(run["target_tokens_per_s"], float) else ""
        words = "; ".join([*run["notes"], run["question"]])
        figures = f"{run['mark']:<7}  {updates:>13}  {val_loss:>8}  {speed:>10}"
        print(cut(f"{run['run']:<{width}}  {run['state']:<22}  {figures}  {words}").rstrip())


def cut(line: str) -> str:
    """A line as wide as the terminal, if it is one that a person looks at."""
    columns = shutil.get_terminal_size().columns
    return line if len(line) <= columns or not sys.stdout.isatty() else f"{line[: columns - 1]}…"
