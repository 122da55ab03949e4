"""The command `watch`: its options, and how a run is shown again and again: on a terminal, in plain lines, or once."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from training_lab.command import add_command, add_run
from training_lab.errors import UserError
from training_lab.record import METRICS, find_run

if TYPE_CHECKING:
    from rich.text import Text

    from training_lab.watch import Seen, Watched

INTERVAL_S = 1.0
TICK_S = 0.2
"""How long a key or another size of the terminal may wait for its effect."""

MOST_BYTES = 8 * 2**20
"""Of the metrics in one go on a terminal: a third of a second. A longer file shows how far it is read."""

SUSPEND = "\x1a"


def add_watch_command(commands: Any) -> None:
    """`watch`."""
    watch = add_command(
        commands,
        "watch",
        watch_command,
        "Watch a run while it goes: progress, figures, curves, events; reads its folder and changes nothing.",
        "examples:\n"
        "  python -m training_lab watch latest\n"
        "  python -m training_lab watch latest --once\n\n"
        "On a terminal q or Ctrl-C leaves, and the run goes on; elsewhere a line whenever something new has come.\n"
        "When the run ends, so does the command. Exit codes: 0 the run ended or you left, 1 its folder has gone,\n"
        "2 wrong input.",
    )
    add_run(watch)
    watch.add_argument("--once", action="store_true", help="show the run as it is now, and leave")
    watch.add_argument("--json", action="store_true", help="as it is now, as a JSON object, for programs")
    watch.add_argument(
        "--interval", type=float, metavar="S", help=f"seconds from one look to the next ({INTERVAL_S:g})"
    )


def watch_command(options: argparse.Namespace) -> int:
    """`watch`."""
    is_once = options.once or options.json
    if options.interval is not None:
        if not 0.05 <= options.interval <= 86400:
            raise UserError(f"--interval {options.interval:g}: must be from 0.05 to 86400 seconds")
        if is_once:
            raise UserError(f"--interval {options.interval:g}: has no effect with --once or --json")
    run = find_run(options.runs, options.RUN)
    from training_lab.watch import Watched

    watched = Watched(run)
    if options.json:
        print(json.dumps(for_programs(watched.look()), ensure_ascii=False, allow_nan=False))
    elif options.once:
        print_view(watched.look())
    else:
        interval_s = INTERVAL_S if options.interval is None else options.interval
        is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        with contextlib.suppress(KeyboardInterrupt):
            (watch_on_terminal if is_terminal else watch_in_lines)(watched, interval_s)
    return 0


def for_programs(seen: Seen) -> dict[str, Any]:
    """The figures of a run as JSON."""
    tally = seen.tally
    return {
        "run": seen.run_id,
        "folder": seen.folder,
        "config": seen.config,
        "purpose": seen.purpose,
        "state": seen.state,
        "has_ended": seen.has_ended,
        "updates": seen.update,
        "planned_updates": seen.planned_updates,
        **{key: tally.update.get(key) for key in ("loss", "lr", "grad_norm")},
        "val_loss": {
            "last": tally.evaluation.get("val_loss"),
            "last_update": tally.evaluation.get("update"),
            "best": tally.best.get("val_loss"),
            "best_update": tally.best.get("update"),
        },
        "throughput": {"target_tokens_per_s": seen.tokens_per_s, "of": seen.speed_of},
        "memory_bytes": seen.memory_bytes,
        "wandb": seen.wandb,
        "elapsed_s": seen.elapsed_s,
        "left_s": seen.left_s,
        "last_row_age_s": seen.age_s,
        "is_silent": seen.is_silent,
        "warnings": [*seen.problems, *tally.warnings],
        "events": list(tally.events),
    }


def print_view(seen: Seen) -> None:
    """Prints the view as it is now."""
    need_rich()
    from rich.console import Console, Group

    console = Console(highlight=False)
    console.print(Group(*view_lines(seen, console.width, console.height - 1)))


def view_lines(seen: Seen, width: int, height: int, hint: str = "") -> list[Text]:
    """The view of a run in at most `height` lines, to be printed on `width` columns; `hint` says how to leave it."""
    from rich.text import Text

    from training_lab.braille import charts

    def line(*parts: str | tuple[str, str]) -> Text:
        return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")

    name = f"  ({seen.config})" if seen.config else ""
    lines = [line((seen.state, style_of(seen.state)), "  ", (seen.run_id, "bold"), (name, "dim"))]
    if seen.purpose and height >= 16:
        lines.append(line((seen.purpose, "dim")))
    lines.append(line((progress_text(seen, width), "cyan")))
    flowing = flow([f"{name} {value}" for name, value in figures(seen)], width)
    lines += [line(text) for text in flowing[: max(1, height // 3)]]
    lines.append(line((news(seen), "yellow" if seen.is_silent else ""), (f"   {hint}" if hint else "", "dim")))
    warnings = [*seen.problems, *seen.tally.warnings]
    lines += [line((text, "yellow")) for text in warnings[-max(1, height // 10) :]]
    room = height - len(lines)
    events = list(seen.tally.events)[-max(1, room // 5) :]
    drawn = charts({name: curve.buckets for name, curve in seen.tally.curves.items()}, width, room - len(events))
    lines += [line((text, "cyan")) for text in drawn]
    lines += [line((text, "dim")) for text in events]
    return lines[:height]


def style_of(state: str) -> str:
    """The colour of a state."""
    styles = {"running": "bold cyan", "starting": "bold cyan", "finished": "bold green"}
    return styles.get(state, "bold red" if state.startswith(("failed", "damaged")) else "bold yellow")


def progress_text(seen: Seen, width: int) -> str:
    """A bar of the updates, as far as there is room for one."""
    from training_lab.console import duration

    if seen.planned_updates is None:
        return f"{of_planned(seen)} updates"
    share = min(1.0, seen.update / seen.planned_updates)
    text = f"  {of_planned(seen)}  {share:.0%}"
    if seen.left_s is not None:
        text += f"  {duration(seen.left_s)} left"
    room = width - len(text)
    return "█" * round(share * room) + "░" * (room - round(share * room)) + text if room >= 4 else text.strip()


def figures(seen: Seen) -> Iterator[tuple[str, str]]:
    """The latest figures with their names, the most important first."""
    from training_lab.console import duration, number

    update, evaluation, best = seen.tally.update, seen.tally.evaluation, seen.tally.best
    if update:
        yield "loss", number(update["loss"])
    if evaluation:
        yield "val_loss", number(evaluation["val_loss"])
    if best:
        yield "best", f"{best['val_loss']:.4f} at update {best['update']:,}"
    if update:
        norm = update["grad_norm"]
        yield "lr", f"{update['lr'] or 0.0:.3g}"
        yield "grad_norm", "overflow" if norm is None else f"{norm:.3f}"
        yield (
            "tokens/s",
            f"{'none yet' if seen.tokens_per_s is None else f'{seen.tokens_per_s:,.0f}'} ({seen.speed_of})",
        )
    if seen.memory_bytes:
        yield "memory", f"{seen.memory_bytes / 2**20:,.0f} MiB"
    yield "elapsed", duration(seen.elapsed_s)
    if seen.wandb:
        yield "W&B", seen.wandb


def flow(texts: list[str], width: int) -> list[str]:
    """Texts beside each other as far as they fit, and on more lines."""
    lines = [""]
    for text in texts:
        joined = f"{lines[-1]}   {text}" if lines[-1] else text
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(text)
    return lines


def news(seen: Seen) -> str:
    """How old the last row is, and what that means."""
    from training_lab.console import duration

    age = duration(seen.age_s or 0.0)
    if seen.share_read < 1:
        return f"reading {METRICS}: {seen.share_read:.0%}"
    if seen.has_ended:
        return f"{seen.state}; last row {age} ago" if seen.tally.num_rows else f"{seen.state} before its first row"
    if not seen.tally.num_rows:
        return "no row yet: it prepares, compiles or measures the loss before training"
    if seen.state not in ("running", "starting"):
        return f"{seen.state}; its process is closing the folder"
    if seen.is_silent:
        return f"nothing has come for {age} (the last rows took at most {seen.tally.slowest_s:.1f}s each)"
    return f"last row {age} ago"


def need_rich() -> None:
    """Raises UserError if the package that draws on terminals is not there."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"the view needs rich ({error}); pip install rich, or use --json, or a pipe: `watch RUN | cat`"
        ) from error


def watch_in_lines(watched: Watched, interval_s: float) -> None:
    """Lines whenever something new has come, until the run ends."""
    lines = Lines()
    while True:
        seen = watched.look()
        for text in lines.about(seen):
            print(text, flush=True)
        if seen.has_ended:
            return
        time.sleep(interval_s)


class Lines:
    """What is new about a run, in plain lines."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._num_events = self._num_figures = -1

    def about(self, seen: Seen) -> Iterator[str]:
        """The lines to print now; the figures are one of them, however many updates there were."""
        tally = seen.tally
        num_figures = tally.num_rows - tally.num_events
        if self._num_events < 0:
            yield f"Run {seen.run_id}: {seen.state}" + (f": {seen.purpose}" if seen.purpose else "")
        yield from (f"warning: {text}" for text in seen.problems if text not in self._problems)
        num_new = tally.num_events - max(0, self._num_events)
        yield from list(tally.events)[-num_new:] if num_new > 0 else ()
        if num_figures not in (self._num_figures, 0):
            yield status_text(seen)
        self._problems, self._num_events, self._num_figures = seen.problems, tally.num_events, num_figures
        if seen.has_ended:
            yield f"Run {seen.run_id}: {seen.state} after {of_planned(seen)} updates"


def status_text(seen: Seen) -> str:
    """The latest figures in a line."""
    from training_lab.console import duration

    left = f"  {duration(seen.left_s)} left" if seen.left_s is not None else ""
    shown = "  ".join(f"{name} {value}" for name, value in figures(seen) if name != "elapsed")
    return f"update {of_planned(seen)}  {shown}{left}"


def of_planned(seen: Seen) -> str:
    """How many updates were made, of how many."""
    return f"{seen.update:,}/{'?' if seen.planned_updates is None else f'{seen.planned_updates:,}'}"


def watch_on_terminal(watched: Watched, interval_s: float) -> None:
    """The view on the whole screen until the run ends or the person leaves; Ctrl-Z suspends it."""
    need_rich()
    key = SUSPEND
    with ending_by_sigterm():
        while key == SUSPEND:
            try:
                key = show_until_key(watched, interval_s)
            except KeyboardInterrupt:
                key = "q"
            if key == SUSPEND:
                os.killpg(os.getpgrp(), signal.SIGTSTP)
    seen = watched.look()
    if seen.has_ended:
        print_view(seen)
    else:
        print(f"{seen.run_id}: {seen.state}; {status_text(seen)}")


def show_until_key(watched: Watched, interval_s: float) -> str:
    """Shows the view until the run ends (then ""), or one of the keys q and Ctrl-Z is pressed (then that)."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    with reading_keys() as read_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            seen = watched.look(MOST_BYTES)
            if seen.has_ended:
                return ""
            size, until = console.size, time.monotonic() + (interval_s if seen.share_read == 1 else 0.0)
            live.update(Group(*view_lines(seen, size.width, size.height, "q leaves")), refresh=True)
            while True:
                key = read_key(max(0.0, min(TICK_S, until - time.monotonic())))
                if key in ("q", "Q", SUSPEND):
                    return key
                if time.monotonic() >= until or console.size != size:
                    break


@contextlib.contextmanager
def reading_keys() -> Iterator[Callable[[float], str]]:
    """Gives a function that waits for a key so many seconds, "" if none came. Keys come at once and are not shown."""
    if os.name == "nt" or sys.stdin is None or not sys.stdin.isatty():
        yield no_key
        return
    import termios
    import tty

    def read_key(seconds: float) -> str:
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return ""
        return os.read(sys.stdin.fileno(), 1).decode("latin-1") or "q"  # nobody is there any more

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        modes = termios.tcgetattr(sys.stdin)
        modes[6][termios.VSUSP] = b"\0"  # Ctrl-Z comes as a key: the screen is left before the process stops
        termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)
        yield read_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def no_key(seconds: float) -> str:
    """Waits where there is no keyboard."""
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """While this is entered, SIGTERM ends the process only after the terminal is as it was."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
