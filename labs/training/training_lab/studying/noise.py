"""The command `noise`: what repetitions of a config differ by: the same seed twice, then other seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from training_lab.comparing.compare import read_run
from training_lab.comparing.noise_floor import keep_floor, last_val_loss
from training_lab.comparing.parting import Parting, find_parting
from training_lab.comparing.significance import prediction_interval, smallest_effect
from training_lab.errors import LabError
from training_lab.progress import Progress
from training_lab.resolve import Resolved, resolve_config
from training_lab.studying.making import Made, Where, make_runs
from training_lab.studying.planned import Planned

VARIED = ("both", "init", "order")
"""What another seed changes: initial weights and dropout, the order of the texts, or both."""


class Noise(NamedTuple):
    """What was measured."""

    made: list[Made]
    repeat: Parting
    """Two runs of one seed."""
    losses: list[float]
    """The last validation losses, by seed."""
    path: Path | None
    """Where the floor is kept; None for one that is not of both kinds of seed."""

    def lines(self) -> list[str]:
        """It, for people."""
        runs = len(self.losses)
        spread, around = statistics.stdev(self.losses), prediction_interval(self.losses)
        smallest = {paired: smallest_effect(runs, paired) * spread for paired in (False, True)}
        kept = f"kept in {self.path}, until config, code, data or machine change" if self.path else "not kept"
        return [
            f"same seed twice   {self.repeat.detail}",
            f"other seeds       n = {runs}, mean {statistics.fmean(self.losses):.6f}, s = {spread:.3g}",
            f"one more run      falls between {around.low:.4f} and {around.high:.4f} (95 %)",
            f"to be seen        with {runs} + {runs} runs a difference of {smallest[False]:.3g} "
            "(four times out of five)",
            f"noise floor       {kept}",
        ]


def measure_noise(
    config: str, overrides: list[str], seeds: int, vary: str, runs_dir: Path, show: Progress, say: Callable[[str], None]
) -> Noise:
    """Runs a config with its own seed twice, then with other seeds. Raises LabError if a run does not finish."""
    base = resolve_config(config, overrides)
    plan = []
    for number in range(seeds):
        plan.append(plan_run(config, overrides, base, number, vary))
    first = plan[0]
    plan.insert(1, first._replace(stem=f"{first.stem}-again", is_repeat=True))
    made = make_runs(plan, Where(runs_dir), show, say)
    for one in made:
        if one.state != "finished":
            raise LabError(f"{one.folder.path}: {one.state}{': ' + one.message if one.message else ''}")
    runs = [read_run(one.folder) for one in made]
    repeat = find_parting(runs[0], runs[1])
    repetitions = [runs[0], *runs[2:]]
    losses = [loss for loss in map(last_val_loss, repetitions) if loss is not None]
    path = keep_floor(runs_dir, repetitions) if vary == "both" else None
    return Noise(made, repeat, losses, path)


def plan_run(config: str, overrides: list[str], base: Resolved, number: int, vary: str) -> Planned:
    """The run with one of the seeds: the first is the config's own."""
    seeds = {"train.seed": base.config.train.seed, "data.order_seed": base.config.data.order_seed}
    if vary in ("both", "init"):
        seeds["train.seed"] += number
    if vary in ("both", "order"):
        seeds["data.order_seed"] += number
    changed = [f"{key}={seed}" for key, seed in seeds.items()] if number else []
    chosen = (*overrides, *changed)
    seed = base.config.train.seed + number
    stem = f"noise-{base.name}-{vary}-s{seed}" if number else f"noise-{base.name}-s{seed}"
    return Planned(base.name, seed, stem, Path(config), chosen, resolve_config(config, chosen))
