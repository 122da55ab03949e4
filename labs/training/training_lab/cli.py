"""The command line. What trains or computes is imported only by the command that needs it: the rest starts at once,
and runs on Python 3.9 with nothing installed."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from training_lab.command import add_command, add_config, add_runs, need_training_packages, print_findings
from training_lab.compare_command import add_compare_command
from training_lab.data_command import add_data_commands
from training_lab.errors import LabError, UserError
from training_lab.ledger_command import add_ledger_commands
from training_lab.mirror_commands import add_mirror_commands
from training_lab.output import forget_output
from training_lab.record import find_run
from training_lab.report_command import add_report_commands
from training_lab.reproduce_command import add_reproduce_command
from training_lab.resolve import resolve_config
from training_lab.runpod_command import add_runpod_commands
from training_lab.study_command import add_study_commands
from training_lab.watch_command import add_watch_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 good, 1 it failed, 2 the input is wrong, 130 or 143 stopped."""
    started = time.monotonic()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the locale may know less than the texts that are printed
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    options = make_parser().parse_args(arguments)
    options.started = started
    try:
        code: int = options.run(options)
        return code
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has gone, as in `... | head`
        forget_output()
        return 1
    except OSError as error:
        print(f"error: {error.filename or 'the system'}: {error.strerror}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m training_lab",
        description="A laboratory for LLM pretraining experiments: exact, recorded, comparable.",
        epilog="Start with: python -m training_lab train --config smoke",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Any, summary: str, epilog: str) -> argparse.ArgumentParser:
        added = add_command(commands, name, run, summary, epilog)
        add_runs(added)
        return added

    train = command(
        "train",
        train_command,
        "Train a config; an unfinished run of the same config is continued.",
        "examples:\n"
        "  python -m training_lab train --config smoke\n"
        "  python -m training_lab train --config baseline --set optimizer.max_lr=1e-3\n"
        "  python -m training_lab train --config my.yaml --new\n"
        "  python -m training_lab train --resume latest --set train.updates=400\n"
        "  python -m training_lab train --resume s3://bucket/runs/baseline-20260101-120000-1a2b\n"
        "  torchrun --standalone --nproc-per-node=4 -m training_lab train --config corrected\n\n"
        "Ctrl-C finishes the update and saves; the same command then goes on. Exit codes: 0 finished, 1 failed,\n"
        "2 wrong input, 130 or 143 stopped by SIGINT or SIGTERM.",
    )
    add_config(train, is_required=False)
    train.add_argument(
        "--resume", metavar="RUN|ADDRESS", help="go on with this run, or its copy at s3://...; --set may add updates"
    )
    train.add_argument("--new", action="store_true", help="start another run even if one is unfinished")
    train.add_argument(
        "--run-id", metavar="ID", help="the run's folder, new or to go on with (default: made of the time)"
    )
    train.add_argument(
        "--stop-after", type=int, metavar="K", help="save and stop after update K; the same command goes on"
    )
    train.add_argument("--json", action="store_true", help="one JSON object a line, for programs")

    add_data_commands(commands)

    plan = add_command(
        commands,
        "plan",
        plan_command,
        "Show what a config will train: parameters, kernels, operations, memory, time and cost; nothing runs.",
        "examples:\n"
        "  python -m training_lab plan --config corrected\n"
        "  python -m training_lab plan --config corrected --gpu 'NVIDIA H100 80GB HBM3' --price 2.99\n"
        "  python -m training_lab plan --config baseline --set optimizer.name=muon",
    )
    add_config(plan)
    plan.add_argument("--gpu", metavar="NAME", help="plan for this GPU, which need not be here")
    plan.add_argument("--mfu", type=float, metavar="SHARE", help="share of its peak that is reached, such as 0.4")
    plan.add_argument("--price", type=float, metavar="USD", help="US dollars for an hour of it")
    plan.add_argument("--json", action="store_true", help="a JSON object, for programs")

    add_report_commands(commands)
    add_watch_command(commands)
    add_mirror_commands(commands)
    add_runpod_commands(commands)
    add_compare_command(commands)
    add_study_commands(commands)

    add_ledger_commands(commands)
    add_reproduce_command(commands)

    verify = command(
        "verify",
        verify_command,
        "Check that a run's files are as they were written, and that its data and results come out the same again.",
        "examples:\n"
        "  python -m training_lab verify latest\n"
        "  python -m training_lab verify latest --batch 3 --replay 5\n\n"
        "Exit codes: 0 all as recorded, 1 something differs, 2 wrong input.",
    )
    verify.add_argument("RUN", help="a run's id, the beginning of one, its folder, or `latest`")
    verify.add_argument(
        "--batch", type=int, action="append", default=[], metavar="K",
        help="build the batch of update K again and compare its hash (default: first, middle, last)",
    )  # fmt: skip
    verify.add_argument(
        "--replay", type=int, default=0, metavar="N", help="train N updates again and compare, bit for bit"
    )
    verify.add_argument(
        "--from", dest="start", type=int, metavar="K", help="replay from the checkpoint of update K; 0: the start"
    )
    verify.add_argument("--json", action="store_true", help="one JSON object a line, for programs")

    evaluate = command(
        "eval",
        eval_command,
        "Measure a run's checkpoint on its validation set again.",
        "example:\n  python -m training_lab eval latest",
    )
    evaluate.add_argument("RUN", help="a run's id, the beginning of one, its folder, or `latest`")
    evaluate.add_argument("--update", type=int, metavar="K", help="the checkpoint of update K (default: the newest)")
    evaluate.add_argument("--json", action="store_true", help="a JSON object, for programs")

    sample = command(
        "sample",
        sample_command,
        "Let a trained model go on with a text.",
        "example:\n  python -m training_lab sample latest --prompt 'import ' --temperature 0.8 --top-k 40",
    )
    sample.add_argument("RUN", help="a run's id, the beginning of one, its folder, or `latest`")
    sample.add_argument("--prompt", required=True, metavar="TEXT", help="the text to go on with")
    sample.add_argument("--tokens", type=int, default=200, metavar="N", help="how many tokens to draw (200)")
    sample.add_argument(
        "--temperature", type=float, default=1.0, help="below 1 is more predictable, 0 always the likeliest (1)"
    )
    sample.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest tokens only (0: all)"
    )
    sample.add_argument("--seed", type=int, default=0, help="another seed, another text (0)")
    sample.add_argument("--update", type=int, metavar="K", help="the checkpoint of update K (default: the newest)")
    return parser


def train_command(options: argparse.Namespace) -> int:
    """`train`: the config is checked before torch is even imported."""
    if (options.config is None) == (options.resume is None):
        raise UserError("train: give --config with what to train, or --resume with a run to go on with")
    if options.resume is not None and (options.new or options.run_id):
        raise UserError("--resume: goes on with a run that is there; leave out --new and --run-id")
    resolved = resolve_config(options.config, options.set) if options.config is not None else None
    need_training_packages()
    from training_lab.console import make_console
    from training_lab.train import resume_training, run_training
    from training_lab.wall_clock import WallClock

    clock, console = WallClock(options.started), make_console(options.json)
    if resolved is None:
        return resume_training(options.resume, options.set, options.runs, console, options.stop_after, clock)
    return run_training(resolved, options.runs, console, options.new, options.stop_after, clock, options.run_id)


def plan_command(options: argparse.Namespace) -> int:
    """`plan`."""
    resolved = resolve_config(options.config, options.set)
    if options.mfu is not None and not 0 < options.mfu <= 1:
        raise UserError(f"--mfu {options.mfu}: must be above 0 and at most 1")
    if options.price is not None and not 0 <= options.price < 1e6:
        raise UserError(f"--price {options.price}: must be 0 or more US dollars an hour")
    need_training_packages()
    from training_lab.plan import describe_plan, plan_run

    plan = plan_run(resolved, options.gpu, options.mfu, options.price)
    print(json.dumps(plan, indent=2, ensure_ascii=False) if options.json else "\n".join(describe_plan(plan)))
    return 0


def verify_command(options: argparse.Namespace) -> int:
    """`verify`."""
    run = find_run(options.runs, options.RUN)
    if options.replay < 0:
        raise UserError(f"--replay {options.replay}: must be 0 or more updates")
    if options.start is not None and not options.replay:
        raise UserError(f"--from {options.start}: has no effect without --replay N")
    need_training_packages()
    from training_lab.verify import verify_run

    findings = verify_run(run, options.batch, options.replay, options.start)
    return print_findings(findings, run.run_id, options.json)


def eval_command(options: argparse.Namespace) -> int:
    """`eval`."""
    run = find_run(options.runs, options.RUN)
    need_training_packages()
    from training_lab.remeasure import evaluate_run

    result = evaluate_run(run, options.update)
    warn_of_damage(result["damaged_checkpoints"])
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(
            f"{run.run_id} after update {result['update']}: validation loss {result['val_loss']:.6f} nats "
            f"over {result['target_tokens']:,} tokens ({result['comparison']})"
        )
    return 0 if result["is_as_recorded"] is not False else 1


def sample_command(options: argparse.Namespace) -> int:
    """`sample`."""
    limits = (("--tokens", options.tokens, 1), ("--temperature", options.temperature, 0), ("--top-k", options.top_k, 0))
    for name, value, smallest in limits:
        if not value >= smallest:
            raise UserError(f"{name} {value}: must be at least {smallest}")
    try:
        options.prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError("--prompt: is not UTF-8 text") from error
    if not options.prompt:
        raise UserError("--prompt: must not be empty; the model needs at least one token to go on from")
    run = find_run(options.runs, options.RUN)
    need_training_packages()
    from training_lab.restored import restore_model
    from training_lab.sample import sample_tokens, stream_text

    restored = restore_model(run, options.update)
    warn_of_damage(restored.damaged)
    prompt = [*restored.document_start, *restored.tokenizer.encode([options.prompt])[0].tolist()]
    tokens = sample_tokens(
        restored.model,
        restored.hardware,
        prompt,
        num_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    sys.stdout.write(options.prompt)
    for text in stream_text(restored.tokenizer, tokens):
        sys.stdout.write(text)
        sys.stdout.flush()
    print()
    return 0


def warn_of_damage(damaged: list[str]) -> None:
    """Says which checkpoints were passed over."""
    for message in damaged:
        print(f"warning: {message}; an older checkpoint is used", file=sys.stderr)
