"""What the person sees while a run goes: a live line on a terminal, plain lines elsewhere, JSON for programs.

All three are fed the same finished values and change nothing.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import time
from collections.abc import Iterable
from typing import Any, Protocol

from training_lab.output import forget_output, print_line
from training_lab.progress import BarProgress, LineProgress, NoProgress, Progress
from training_lab.record import REPORT, RunFolder
from training_lab.tracking import Row

SPARKS = "▁▂▃▄▅▆▇█"

MILESTONE_FORMATS = {"loss": ".4f", "val_loss": ".4f", "lr": ".3g", "grad_norm": ".3f"}

EVENT_TEXTS = {
    "checkpoint": "update {update:>6}  saved {path}",
    "copied": "update {update:>6}  copied to {address}",
    "not copied": "warning: not copied: {message}",
    "timeline": "update {update:>6}  operations recorded in {path}",
    "memory": "update {update:>6}  allocations recorded in {path}",
    "not recorded": "warning: {path} was not recorded: {message}",
    "failure": "{state}: {message}",
    "implausible initial loss": "warning: the loss before training is {measured}, expected {expected:.4f}: "
    "likely a bug in the model, its initialisation or the labels",
}


class Console(Protocol):
    """Where finished values are shown. Entered for as long as it shows something live."""

    def __enter__(self) -> Console: ...

    def __exit__(self, *_: object) -> None: ...

    def note(self, message: str) -> None:
        """Something that was decided before any work."""

    def preparing(self, what: str) -> Progress:
        """Before work that takes seconds or more; shows how far it is."""

    def begin(self, facts: dict[str, Any], command: str) -> None:
        """Before the first update: what will be trained, and the command that continues it."""

    def row(self, row: Row) -> None:
        """A row of the metrics, just made."""

    def warn(self, message: str) -> None:
        """Something that the person should know and that stops nothing."""

    def end(self, summary: dict[str, Any], losses: list[float], folder: RunFolder, command: str, prompt: str) -> None:
        """After the last update: what came out, the loss of every update, where it is, the command that continues, and
        a text to sample from."""


def make_console(as_json: bool) -> Console:
    """The console for this process's output."""
    if as_json:
        return JsonConsole()
    return LiveConsole() if sys.stdout.isatty() else PlainConsole()


class JsonConsole:
    """One JSON object a line on standard output: the rows of the metrics between `begin` and `end`."""

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, message: str) -> None:
        """Programs read it in `begin`."""

    def preparing(self, what: str) -> Progress:
        """Programs wait for `begin`."""
        return NoProgress()

    def begin(self, facts: dict[str, Any], command: str) -> None:
        self.row({"kind": "begin", **facts, "continue_with": command})

    def row(self, row: Row) -> None:
        print_line(json.dumps(row, ensure_ascii=False, allow_nan=False))

    def warn(self, message: str) -> None:
        self.row({"kind": "warning", "message": message})

    def end(self, summary: dict[str, Any], losses: list[float], folder: RunFolder, command: str, prompt: str) -> None:
        self.row({"kind": "end", "folder": str(folder.path), **summary})


class PlainConsole:
    """Lines for files and pipes: each update of a short run, about every twentieth part of a long one."""

    make_progress: type[LineProgress | BarProgress] = LineProgress

    def __init__(self) -> None:
        self.figures = Figures()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, message: str) -> None:
        self.print(message)

    def preparing(self, what: str) -> Progress:
        self.print(f"{what} …")
        return self.make_progress()

    def begin(self, facts: dict[str, Any], command: str) -> None:
        self.figures.begin(facts)
        for text in opening_lines(facts, command):
            self.print(text)

    def row(self, row: Row) -> None:
        self.figures.take(row)
        if row["kind"] == "update":
            self.update(row)
        elif row["kind"] == "evaluation":
            self.print(f"update {row['update']:>6}  val_loss {number(row['val_loss'])}")
        elif row["event"] in EVENT_TEXTS:
            self.print(EVENT_TEXTS[row["event"]].format(**row))

    def update(self, row: Row) -> None:
        every = max(1, self.figures.updates // 20)
        if row["update"] % every == 0 or row["update"] == self.figures.first_update:
            self.print(f"update {row['update']:>6}  {self.figures.text()}")

    def warn(self, message: str) -> None:
        self.print(f"warning: {message}")

    def end(self, summary: dict[str, Any], losses: list[float], folder: RunFolder, command: str, prompt: str) -> None:
        for text in closing_lines(summary, losses, folder, command, prompt):
            self.print(text)

    def print(self, text: str) -> None:
        print_line(text)


class LiveConsole(PlainConsole):
    """A progress bar with the latest figures, and above it what should stay."""

    make_progress = BarProgress

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self.rich = RichConsole(highlight=False)
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[figures]}")]
        self.bar = RichProgress(*columns, TimeElapsedColumn(), console=self.rich, transient=True)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, facts: dict[str, Any], command: str) -> None:
        super().begin(facts, command)
        done = facts["continues_after_update"] or 0
        self.task = self.bar.add_task("", total=facts["updates"], completed=done, figures="")
        self.bar.start()

    def update(self, row: Row) -> None:
        description = f"{row['update']}/{self.figures.updates}"
        self.bar.update(self.task, completed=row["update"], description=description, figures=self.figures.text())

    def end(self, summary: dict[str, Any], losses: list[float], folder: RunFolder, command: str, prompt: str) -> None:
        self.bar.stop()
        super().end(summary, losses, folder, command, prompt)

    def print(self, text: str) -> None:
        try:
            self.rich.print(text, markup=False, soft_wrap=True)
        except OSError:
            forget_output()


class Figures:
    """The latest figures of a run as it goes."""

    def __init__(self) -> None:
        self.updates = 0
        self.first_update = 1
        self.row: Row = {}
        self.val_loss: float | None = None
        self._done = 0
        self._tokens_per_s = 0.0
        self._began = time.monotonic()

    def begin(self, facts: dict[str, Any]) -> None:
        self.updates = facts["updates"]
        self.first_update = (facts["continues_after_update"] or 0) + 1

    def take(self, row: Row) -> None:
        if row["kind"] == "evaluation":
            self.val_loss = row["val_loss"]
        elif row["kind"] == "update":
            if not self._done:
                self._began = time.monotonic() - row["seconds"]
            self._done += 1
            self.row = row
            latest = row["target_tokens"] / row["seconds"]
            self._tokens_per_s = latest if self._done == 1 else 0.8 * self._tokens_per_s + 0.2 * latest

    def seconds_left(self) -> float:
        """What the rest of the run takes if it goes on as it went in this process."""
        left: int = self.updates - self.row["update"]
        return (time.monotonic() - self._began) / self._done * left

    def text(self) -> str:
        row = self.row
        val = f"  val {self.val_loss:.4f}" if self.val_loss is not None else ""
        norm = "overflow" if row["grad_norm"] is None else f"{row['grad_norm']:.3f}"
        return (
            f"loss {row['loss']:.4f}{val}  lr {row['lr']:.3g}  grad_norm {norm}  "
            f"{self._tokens_per_s:,.0f} tokens/s  {duration(self.seconds_left())} left"
        )


def opening_lines(facts: dict[str, Any], command: str) -> Iterable[str]:
    """What is about to be trained, in a few lines."""
    if facts["continues_after_update"] is None:
        yield f"Run {facts['run']}"
    else:
        yield f"Continuing run {facts['run']} from update {facts['continues_after_update'] + 1}"
    if facts["purpose"]:
        yield f"  {facts['purpose']}"
    for message in facts["damaged_checkpoints"]:
        yield f"warning: {message}; set aside, an older one is used"
    for message in facts["warnings"]:
        yield f"warning: {message}"
    yield f"  model      {facts['parameters']:,} parameters, vocabulary {facts['vocab_size']:,}"
    yield (
        f"  data       {facts['source']}, {facts['tokenizer']} tokens: {facts['train_tokens']:,} in "
        f"{facts['train_documents']:,} documents to train on, {facts['val_target_tokens']:,} held back to measure on"
    )
    if facts["packing"]:
        packing, pieces = facts["packing"], facts["packing"]["pieces_per_pack"]
        yield (
            f"  packs      {packing['packs']:,} an epoch, {packing['fill']:.2%} full, with {pieces['mean']:.1f} pieces "
            f"each (at most {pieces['max']})"
        )
    yield f"  training   {facts['updates']:,} updates of {facts['tokens_per_update']:,} tokens"
    if facts["world_size"] > 1:
        yield (
            f"  processes  {facts['world_size']} on {facts['machines']} machine{'s' if facts['machines'] > 1 else ''} "
            f"({facts['parallel']}), which share the {facts['micro_batches']} micro-batches of each update"
        )
    yield f"  device     {facts.get('gpu', facts['device'])} ({facts['device_reason']}), {facts['num_threads']} threads"
    yield f"  precision  {facts['compute']} ({facts['compute_reason']})"
    yield f"  attention  {facts['attention']} ({facts['attention_reason']})"
    yield f"  loss       {facts['loss']} ({facts['loss_reason']})"
    yield f"  compile    {'on' if facts['compile'] else 'off'} ({facts['compile_reason']})"
    if facts["wandb"] != "off":
        yield f"  W&B        {facts['wandb']}, project {facts['wandb_project']} ({facts['wandb_reason']})"
    yield f"  expected loss before training: {facts['expected_initial_loss']:.4f} (ln V + d·0.02²/2)"
    yield f"  saved every {facts['checkpoint_every']:,} updates and at the end, in {facts['folder']}"
    yield f"  if it is stopped, this continues it: {command}"


def closing_lines(
    summary: dict[str, Any], losses: list[float], folder: RunFolder, command: str, prompt: str
) -> Iterable[str]:
    """What came out, and what to do next."""
    yield ""
    done, planned = summary["updates"], summary["planned_updates"]
    yield f"Run {folder.run_id}: {summary['state']} after {done:,} of {planned:,} updates"
    if "failure" in summary:
        yield f"  {summary['failure']['message']}"
    yield f"  {'update':>8}  {'loss':>8}  {'val_loss':>8}  {'lr':>9}  {'grad_norm':>9}"
    for row in summary["milestones"]:
        cells = [format(row[key], spec) if row[key] is not None else "" for key, spec in MILESTONE_FORMATS.items()]
        yield f"  {row['update']:>8}  {cells[0]:>8}  {cells[1]:>8}  {cells[2]:>9}  {cells[3]:>9}"
    if len(losses) > 1:
        yield f"  loss             {sparkline(losses)}"
    speed, measured = summary["throughput"]["target_tokens_per_s"], summary["throughput"]["measured_updates"]
    figure = f"{speed:,.0f} target tokens/s over {measured} updates" if speed else "not measured: too few updates"
    yield f"  speed            {figure}"
    yield from utilisation_lines(summary["utilisation"])
    if summary["last_process"]["peak_memory"]["bytes"]:
        yield f"  peak memory      {summary['last_process']['peak_memory']['bytes'] / 2**20:,.0f} MiB"
    yield f"  elapsed          {duration(summary['last_process']['elapsed_s'])}"
    yield f"  folder           {folder.path}"
    yield "Next:"
    if folder.file(REPORT).exists():
        yield f"  python -m training_lab report {folder.as_typed()} --open"
    if summary["state"] == "finished":
        yield f"  python -m training_lab verify {folder.as_typed()}"
        yield f"  python -m training_lab sample {folder.as_typed()} --prompt {shlex.quote(prompt)}"
    elif "failure" in summary:
        yield "  change a setting as said above, with --set or in the config; the same command would meet the same"
    else:
        yield f"  {command}"


def utilisation_lines(utilisation: dict[str, Any]) -> Iterable[str]:
    """How much of the device was used, as far as that is known."""
    mfu, share, peak, probe = (utilisation[key] for key in ("mfu", "matmul_share", "peak", "matmul_probe"))
    if mfu:
        of = f"of {peak['tflops']:g} TFLOP/s {peak['dtype']}"
        yield f"  MFU              {mfu['causal']:.2%} (full squares: {mfu['full']:.2%}) {of}"
    if share:
        of = f"of {probe['tflops']:.3g} TFLOP/s {probe['dtype']}, the best product measured here"
        yield f"  matmul share     {share['causal']:.1%} (full squares: {share['full']:.1%}) {of}"


def number(value: float | None) -> str:
    """A loss, or that it was not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    """Seconds as 7s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def sparkline(values: list[float], width: int = 60) -> str:
    """A curve in a line of text; a long one is thinned to means of neighbours."""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(SPARKS[round((v - low) / (high - low or 1) * (len(SPARKS) - 1))] for v in means)
