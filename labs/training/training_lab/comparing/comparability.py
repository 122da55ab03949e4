"""Are two arms alike but for the declared change? Each thing that they should share, by name, with what to do if they
do not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from training_lab.comparing.arms import Arm, Change, Run, pairs

FINISHED = "finished"
SHORT = 12


class Aspect(NamedTuple):
    """One thing that runs should share to be compared."""

    name: str
    is_same: bool
    detail: str
    """What differs; empty where nothing does."""
    matters_for: str
    """`learning`: losses cannot be compared. `speed`: seconds and memory cannot. `nothing`: good to know."""
    advice: str = ""


class Judged(NamedTuple):
    """What stands against a comparison."""

    aspects: list[Aspect]
    is_paired: bool
    """Whether the runs of the two arms belong together by their seeds, and that is verified."""

    def obstacles(self, matter: str, allowed: tuple[str, ...] = ()) -> list[Aspect]:
        """What forbids to compare losses, or seconds and memory."""
        return [a for a in self.aspects if not a.is_same and a.matters_for == matter and a.name not in allowed]


def judge(first: Arm, second: Arm, declared: list[Change]) -> Judged:
    """Looks at everything. `declared` is the change in the config: what it explains is not held against it."""
    touched = {change.key.partition(".")[0] for change in declared}
    runs = [*first.runs, *second.runs]
    aspects = [
        *(finished(run) for run in runs),
        code(first.runs[0], runs),
        *data(first.runs[0], runs, touched),
        objective(first.runs[0], runs),
        shared("precision", first.runs[0], runs, machine("compute"), explained="precision" in touched,
               advice="run both in the same arithmetic (precision.compute), or make it the change"),
        *hardware(first.runs[0], runs, touched),
    ]  # fmt: skip
    paired = pairs(first, second)
    of_pairs = list(pairing(paired, touched)) if paired else []
    is_paired = bool(paired) and all(aspect.is_same for aspect in of_pairs)
    return Judged([aspect for aspect in (*aspects, *of_pairs) if aspect is not None], is_paired)


def finished(run: Run) -> Aspect:
    """A run that has not ended has no end to compare."""
    state = str(run.found.state)
    detail = "" if state == FINISHED else f"{run.id} is {state!r}"
    return Aspect("finished runs", not detail, detail, "learning", "let it go on with the same `train` command")


def code(first: Run, runs: list[Run]) -> Aspect:
    """The files that ran."""
    ours = first.found["source.json"].get("files")
    for run in runs:
        theirs = run.found["source.json"].get("files")
        if not ours or not theirs:
            return Aspect("code", False, f"it is not known for {run.id}", "learning", "run it again")
        if theirs != ours:
            names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            return Aspect(
                "code", False, shown, "learning", "run both with the same code, or allow it with --allow code"
            )
    return Aspect("code", True, "", "learning")


def data(first: Run, runs: list[Run], touched: set[str]) -> Iterator[Aspect]:
    """Tokenizer, text, split and validation set. A change of the data explains other training text, and never another
    validation set: losses on other texts are other quantities."""
    yield shared(
        "tokenizer", first, runs, lambda run: manifest(run, "tokenizer"), explained=False,
        advice="losses in nats a token mean something else for other tokens; compare bits per byte by hand",
    )  # fmt: skip
    yield shared(
        "validation data", first, runs, lambda run: manifest(run, "validation").get("identity"), explained=False,
        advice="measure both on the same validation set: the same data.*, data.split_salt and eval.*",
    )  # fmt: skip
    yield shared(
        "training text", first, runs, lambda run: manifest(run, "cache").get("identity"), explained="data" in touched,
        advice="train both on the same text, or make it the change",
    )  # fmt: skip
    yield shared(
        "split", first, runs, lambda run: {k: manifest(run, "split").get(k) for k in ("rule", "salt", "val_fraction")},
        explained="data" in touched, advice="use the same data.split_salt and data.val_fraction",
    )  # fmt: skip


def objective(first: Run, runs: list[Run]) -> Aspect:
    """What the validation loss is."""

    def definition(run: Run) -> Any:
        return run.found["summary.json"].get("val_loss", {}).get("definition")

    return shared(
        "definition of the loss", first, runs, definition,
        explained=False, advice="measure both again with the same version: python -m training_lab eval RUN",
    )  # fmt: skip


def hardware(first: Run, runs: list[Run], touched: set[str]) -> Iterator[Aspect]:
    """What seconds and memory depend on."""
    for name, keys in {
        "hardware": ("device", "gpu", "processor", "machine"),
        "threads": ("num_threads", "usable_cpus"),
        "software": ("python", "torch", "cuda", "driver"),
        "kernels": ("attention", "loss", "compile"),
    }.items():
        yield shared(
            name, first, runs, lambda run, keys=keys: {key: machine(key)(run) for key in keys},  # type: ignore[misc]
            explained=name == "kernels" and bool(touched & {"kernels", "precision", "batch"}), matters_for="speed",
            advice="measure both on the same machine, with the same versions",
        )  # fmt: skip
    yield shared(
        "measurement window", first, runs, lambda run: run.settings.get("measure.warmup_updates"),
        explained=False, matters_for="speed", advice="use the same measure.warmup_updates",
    )  # fmt: skip


def pairing(paired: list[tuple[Run, Run]], touched: set[str]) -> Iterator[Aspect]:
    """Whether runs of one seed began from the same weights and saw the same batches, if the change leaves them so."""
    for name, of, explains in (
        ("initial weights", initial_weights, "model"),
        ("order of the data", lambda run: manifest(run, "plan").get("identity"), "batch"),
    ):
        wrong = [one.id for one, other in paired if of(one) != of(other)]
        if wrong and not touched & {explains, "data"}:
            advice = "the seeds are the same, so this is a fault: find out with a run of each config twice"
            yield Aspect(name, False, f"differs for {', '.join(wrong[:3])} and its pair", "learning", advice)
        else:
            yield Aspect(name, not wrong, "" if not wrong else "the change makes other ones", "nothing")


def shared(
    name: str, first: Run, runs: list[Run], of: Callable[[Run], Any], *, explained: bool, advice: str,
    matters_for: str = "learning",
) -> Aspect:  # fmt: skip
    """Whether all runs have the same."""
    mine = of(first)
    for run in runs:
        theirs = of(run)
        if theirs != mine:
            detail = f"{differing(mine, theirs)} ({first.id} and {run.id})"
            if explained:
                return Aspect(name, False, f"{detail}: part of the change", "nothing")
            return Aspect(name, False, detail, matters_for, advice)
    if mine is None:
        return Aspect(name, False, f"the record of {first.id} does not say", matters_for, "run it again")
    return Aspect(name, True, "", matters_for)


def differing(first: Any, second: Any) -> str:
    """Two values side by side; of two mappings only what differs."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        keys = sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
        return ", ".join(f"{key} {short(first.get(key))} and {short(second.get(key))}" for key in keys)
    return f"{short(first)} and {short(second)}"


def short(value: Any) -> str:
    """A value in a sentence; a hash by its beginning."""
    text = str(value)
    return f"{text[:SHORT]}…" if len(text) >= 40 and " " not in text else text


def manifest(run: Run, key: str) -> dict[str, Any]:
    """A part of the data's manifest."""
    found = run.found["data-manifest.json"].get(key)
    return dict(found) if isinstance(found, Mapping) else {}


def initial_weights(run: Run) -> Any:
    """The hash of the weights before the first update."""
    return run.found["config.json"].get("model", {}).get("initial_weights_sha256")


def machine(key: str) -> Callable[[Run], Any]:
    """A fact of the process that ended the run."""

    def of(run: Run) -> Any:
        processes = run.found["environment.json"].get("processes") or [{}]
        return processes[-1].get(key)

    return of
