"""Are two arms alike but for the declared change? Each thing that they should share, by name, with what to do if they
do not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from training_lab import record
from training_lab.comparing.arms import Arm, Change, Run, compared, pairs
from training_lab.identity import identity_of

LEARNING, SPEED, NOTHING = "learning", "speed", "nothing"
FINISHED = "finished"
SHORT = 12
SAME_TOKENS = 0.01
SAME_MACHINE = "measure both on the same machine, with the same versions"
HARDWARE = {
    "hardware": ("device", "gpu", "processor", "machine"),
    "threads": ("num_threads", "usable_cpus"),
    "software": ("python", "torch", "cuda", "driver"),
    "kernels": ("attention", "loss", "compile"),
}
"""What seconds and memory depend on, by the names in environment.json."""


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
    paired = pairs(first, second)
    of_pairs = list(pairing(paired, touched)) if paired else []
    aspects = [
        whole(runs),
        finished(runs),
        code(runs),
        *data(runs, touched),
        *amount(runs, touched),
        *hardware(runs, touched),
        *of_pairs,
    ]
    return Judged(aspects, bool(paired) and all(aspect.is_same for aspect in of_pairs))


def whole(runs: list[Run]) -> Aspect:
    """A record that was damaged or changed says nothing."""
    for run in runs:
        wrong = [f"{one.file}: {one.message}" for one in run.found.damage]
        wrong += [f"{one.name}: {one.problem}" for one in run.found.files if one.problem and one.name != record.NOTES]
        if wrong:
            return Aspect("whole records", False, f"{run.id}: {wrong[0]}", LEARNING, "see `verify`, and train it again")
    return Aspect("whole records", True, "", LEARNING)


def finished(runs: list[Run]) -> Aspect:
    """A run that has not ended has no end to compare; one that diverged has."""
    for run in runs:
        if run.found.state != FINISHED and not run.has_diverged:
            advice = "let it go on with the same `train` command"
            return Aspect("finished runs", False, f"{run.id} is {str(run.found.state)!r}", LEARNING, advice)
    return Aspect("finished runs", True, "", LEARNING)


def code(runs: list[Run]) -> Aspect:
    """The files that ran."""
    ours = runs[0].found[record.SOURCE].get("files")
    for run in runs:
        theirs = run.found[record.SOURCE].get("files")
        if not ours or not theirs:
            return Aspect(
                "code", False, f"it is not known for {(run if ours else runs[0]).id}", LEARNING, "run it again"
            )
        if theirs != ours:
            names = changed_code(runs[0], run)
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            advice = "run both with the same code, or allow it with --allow code"
            return Aspect("code", False, f"{shown} ({runs[0].id} and {run.id})", LEARNING, advice)
    return Aspect("code", True, "", LEARNING)


def changed_code(first: Run, second: Run) -> list[str]:
    """The files that are not the same in two runs."""
    ours, theirs = (dict(run.found[record.SOURCE].get("files") or {}) for run in (first, second))
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def data(runs: list[Run], touched: set[str]) -> Iterator[Aspect]:
    """Tokenizer, text, split, validation set, and what the loss is. A change of the data explains other training text,
    and never another validation set: losses on other texts are other quantities."""
    is_of_data, others = "data" in touched, have_other_tokenizers(runs)
    texts = {manifest(run, "validation").get("text_sha256") for run in runs}
    is_same_text = len(texts) == 1 and None not in texts
    yield shared(
        "tokenizer", runs, tokenizer, is_explained=is_of_data and is_same_text, more="; losses in bits a byte",
        advice="losses in nats a token mean something else for other tokens; bits per byte are compared where both "
               "measured the same text: with eval.tokens above that of the whole held-back text",
    )  # fmt: skip
    yield shared(
        "validation data", runs,
        lambda run: manifest(run, "validation").get("text_sha256" if others and is_same_text else "identity"),
        advice="measure both on the same validation set: the same data.*, data.split_salt, eval.* and "
               "model.max_positions",
    )  # fmt: skip
    yield shared(
        "definition of the loss", runs,
        lambda run: run.found[record.SUMMARY].get("val_loss", {}).get("definition"),
        advice="train both with the same version",
    )  # fmt: skip
    yield shared(
        "training text", runs, lambda run: manifest(run, "cache").get("identity"), is_explained=is_of_data,
        advice="train both on the same text, or make it the change",
    )  # fmt: skip
    yield shared(
        "split", runs, lambda run: {key: manifest(run, "split").get(key) for key in ("rule", "salt", "val_fraction")},
        is_explained=is_of_data, advice="use the same data.split_salt and data.val_fraction",
    )  # fmt: skip


def amount(runs: list[Run], touched: set[str]) -> Iterator[Aspect]:
    """How much was trained on, in which arithmetic."""
    if all(run.found.state == FINISHED for run in runs):
        yield tokens_seen(runs, touched)
    yield shared(
        "precision", runs, machine("compute"), is_explained="precision" in touched,
        advice="run both in the same arithmetic (precision.compute), or make it the change",
    )  # fmt: skip


def tokens_seen(runs: list[Run], touched: set[str]) -> Aspect:
    """All target tokens of a run. Packs hold some more or less by the order of the texts, which is the seed's."""
    name = "tokens seen"
    seen = [run.found[record.SUMMARY].get("target_tokens") for run in runs]
    counts = [count for count in seen if isinstance(count, int)]
    if len(counts) < len(seen):
        return Aspect(name, False, "the record does not say", LEARNING, "run it again")
    fewest, most = min(counts), max(counts)
    if most - fewest <= SAME_TOKENS * most:
        return Aspect(name, True, "", LEARNING)
    detail = f"{fewest:,} ({runs[counts.index(fewest)].id}) and {most:,} ({runs[counts.index(most)].id})"
    if touched & {"train", "batch", "data", "model"}:
        return Aspect(name, False, f"{detail}: part of the change; losses are compared at the fewer", NOTHING)
    return Aspect(name, False, detail, LEARNING, "train both for the same train.updates on the same batches")


def hardware(runs: list[Run], touched: set[str]) -> Iterator[Aspect]:
    """What seconds and memory depend on."""
    for name, keys in HARDWARE.items():
        yield shared(
            name, runs, facts_of_machine(keys), matters_for=SPEED, advice=SAME_MACHINE,
            is_explained=name == "kernels" and bool(touched & {"kernels", "precision", "batch"}),
        )  # fmt: skip
    yield shared(
        "measurement window", runs, lambda run: run.settings.get("measure.warmup_updates"),
        matters_for=SPEED, advice="use the same measure.warmup_updates",
    )  # fmt: skip
    yield shared(
        "definition of MFU", runs, lambda run: run.found[record.SUMMARY].get("utilisation", {}).get("formulas"),
        matters_for=SPEED, advice="measure both with the same version",
    )  # fmt: skip


def pairing(paired: list[tuple[Run, Run]], touched: set[str]) -> Iterator[Aspect]:
    """Whether runs of one seed began from the same weights and saw the same batches, if the change leaves them so."""
    for name, of, explains in (
        ("initial weights", initial_weights, {"model", "data"}),
        ("order of the data", lambda run: manifest(run, "plan").get("identity"), {"batch", "data", "model"}),
    ):
        wrong = [one.id for one, other in paired if of(one) != of(other)]
        if wrong and not touched & explains:
            advice = "the seeds are the same, so this is a fault: run each config twice, and compare those"
            yield Aspect(name, False, f"differs for {', '.join(wrong[:3])} and its pair", LEARNING, advice)
        else:
            yield Aspect(name, not wrong, "the change makes other ones" if wrong else "", NOTHING)


def shared(
    name: str, runs: list[Run], of: Callable[[Run], Any], *, advice: str, matters_for: str = LEARNING,
    is_explained: bool = False, more: str = "",
) -> Aspect:  # fmt: skip
    """Whether all runs have the same."""
    first = runs[0]
    mine = of(first)
    for run in runs:
        theirs = of(run)
        if theirs != mine:
            detail = f"{differing(mine, theirs)} ({first.id} and {run.id})"
            if is_explained:
                return Aspect(name, False, f"{detail}: part of the change{more}", NOTHING)
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
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{text[:SHORT]}…" if len(text) >= 40 and " " not in text else text


def tokenizer(run: Run) -> dict[str, Any]:
    """Which tokenizer a run had."""
    return manifest(run, "tokenizer")


def have_other_tokenizers(runs: list[Run]) -> bool:
    """Whether the tokens of some runs are not those of others."""
    return any(tokenizer(run) != tokenizer(runs[0]) for run in runs)


def manifest(run: Run, key: str) -> dict[str, Any]:
    """A part of the data's manifest."""
    found = run.found[record.DATA_MANIFEST].get(key)
    return dict(found) if isinstance(found, Mapping) else {}


def initial_weights(run: Run) -> Any:
    """The hash of the weights before the first update."""
    return run.found[record.CONFIG].get("model", {}).get("initial_weights_sha256")


def last_process(run: Run) -> dict[str, Any]:
    """The process that ended the run, as its environment was recorded."""
    processes = run.found[record.ENVIRONMENT].get("processes") or [{}]
    return dict(processes[-1]) if isinstance(processes[-1], Mapping) else {}


def machine(key: str) -> Callable[[Run], Any]:
    """A fact of that process."""
    return lambda run: last_process(run).get(key)


def facts_of_machine(keys: tuple[str, ...]) -> Callable[[Run], dict[str, Any]]:
    """Several of them."""
    return lambda run: {key: last_process(run).get(key) for key in keys}


def noise_identity(run: Run) -> dict[str, str]:
    """What a noise floor belongs to, part by part; where one has changed, the floor has expired."""
    machine_facts = {key: last_process(run).get(key) for keys in HARDWARE.values() for key in keys}
    return {
        "config": identity_of(compared(run.settings)),
        "code": str(run.found[record.SOURCE].get("sha256")),
        "data": identity_of([manifest(run, "cache").get("identity"), manifest(run, "validation").get("identity")]),
        "machine": identity_of(machine_facts),
    }
