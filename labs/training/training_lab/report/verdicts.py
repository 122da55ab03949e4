"""What a run's record stands for, each with the rule in words: good, bad, or not known. Pure."""

from __future__ import annotations

from collections import Counter

from training_lab import record
from training_lab.report.figures import done_of, planned_of, throughput
from training_lab.report.gather import Gathered
from training_lab.report.reading import at, mapping, number, records, words

GOOD, BAD, UNKNOWN = "good", "bad", "unknown"

STATES = {
    "finished": "finished",
    "running": "is being trained now",
    "stopped": "stopped as it was asked to; the same command goes on",
    "interrupted": "interrupted, and its state saved; the same command goes on",
    "killed": "ended without saying so: killed, or the machine went down; the same command goes on",
    "failed: non-finite": "failed: a loss or gradient was not finite",
    "failed: out of memory": "failed: out of memory",
    "failed: error": "failed with an error",
    "damaged": "not known: summary.json is missing or damaged",
}

DIFFERS_BY_NATURE = ("segment", "compile_state")
"""What two processes of a run may differ in without a doubt about their bits."""


def verdict(name: str, is_good: bool | None, seen: str, rule: str) -> dict[str, str]:
    """One line of the strip; None: not known."""
    word = UNKNOWN if is_good is None else GOOD if is_good else BAD
    return {"name": name, "verdict": word, "seen": seen, "rule": rule}


def verdicts(found: Gathered) -> list[dict[str, str]]:
    """All of them, in the order in which they are read."""
    return [
        of_state(found),
        of_files(found),
        of_initial_loss(found),
        of_numbers(found),
        of_rows(found),
        of_processes(found),
        of_measurement(found),
    ]


def of_state(found: Gathered) -> dict[str, str]:
    """Whether the run reached its end."""
    done, planned = done_of(found), planned_of(found)
    of = f", {done or 0:,} of {planned:,} updates" if planned is not None else ""
    is_good = None if found.state in ("running", "damaged") else found.state == "finished"
    said = "not known" if found.state == "damaged" else found.state
    return verdict("Finished", is_good, f"{said}{of}", "The run reached its last update and said so.")


def of_files(found: Gathered) -> dict[str, str]:
    """Whether everything that a run has is there and as long as it was."""
    rule = (
        "Every file of a run is there and can be read, with the size that manifest.json gives. "
        "Sizes alone are compared here; the command `verify` compares every SHA-256."
    )
    wrong = [f"{file.name}: {file.problem}" for file in found.files if file.problem]
    wrong += [f"{one.file}: {one.message}" for one in found.damage if not one.message.startswith("missing")]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return verdict("Record complete", False, "; ".join(wrong[:3]) + more, rule)
    if not found[record.MANIFEST]:
        is_open = found.state in ("running", "killed")
        seen = "no manifest.json: the run was not closed" if is_open else "no manifest.json"
        return verdict("Record complete", None if is_open else False, seen, rule)
    size = sum(file.bytes or 0 for file in found.files)
    return verdict("Record complete", True, f"{len(found.files)} files, {size / 2**20:,.1f} MiB, all as listed", rule)


def of_initial_loss(found: Gathered) -> dict[str, str]:
    """Whether the loss began where that of a model that knows nothing does."""
    said = mapping(found[record.SUMMARY].get("initial_loss"))
    measured, expected = number(said.get("measured")), number(said.get("expected"))
    rule = (
        "Before the first update the validation loss is near ln V + d·0.02²/2, as of a model that knows nothing. "
        "Far from it, the model, its initialisation or the labels are likely wrong."
    )
    if not found.is_closed and measured is None and found.evaluations and found.evaluations[0]["update"] == 0:
        measured = number(found.evaluations[0].get("val_loss"))
    if measured is None or expected is None:
        return verdict("Initial loss plausible", None, "not measured" if measured is None else f"{measured:.4f}", rule)
    is_plausible = said.get("is_plausible")
    seen = f"{measured:.4f}, expected {expected:.4f}"
    return verdict("Initial loss plausible", is_plausible if isinstance(is_plausible, bool) else None, seen, rule)


def of_numbers(found: Gathered) -> dict[str, str]:
    """Whether every recorded figure is a number."""
    rule = (
        "Every recorded loss is a finite number, and so is every gradient norm, but for updates that FP16's "
        "loss scaler passed over."
    )
    losses = [number(row.get("loss")) for row in found.updates]
    evaluated = [number(row.get("val_loss")) for row in found.evaluations]
    if found.state == "failed: non-finite":
        return verdict("No non-finite value", False, "training stopped at one", rule)
    if not losses and not evaluated:
        return verdict("No non-finite value", None, "nothing was recorded", rule)
    bad, bad_evaluated = losses.count(None), evaluated.count(None)
    passed = sum(number(row.get("grad_norm")) is None for row in found.updates)
    seen = f"{len(losses):,} losses and {len(evaluated):,} validation losses, all finite"
    if bad or bad_evaluated:
        seen = (
            f"not finite: {bad:,} of {len(losses):,} losses, {bad_evaluated:,} of {len(evaluated):,} validation losses"
        )
    if passed:
        seen += f"; {passed:,} updates without a gradient norm (overflow)"
    return verdict("No non-finite value", not bad and not bad_evaluated, seen, rule)


def of_rows(found: Gathered) -> dict[str, str]:
    """Whether each update is recorded once, and the summary agrees."""
    rule = "metrics.jsonl has each update from 1 to the last once, and summary.json says the same last ones."
    recorded = [row["update"] for row in found.updates]
    if not recorded:
        return verdict("Each update recorded once", None, "no update was recorded", rule)
    counted = Counter(recorded)
    absent = sorted({*range(1, min(max(recorded), 10**7) + 1)} - {*counted})
    twice = sorted(update for update, count in counted.items() if count > 1)
    differing = [] if not found.is_closed else differences(found)
    problems = [f"missing: {some(absent)}"] if absent else []
    problems += [f"twice: {some(twice)}"] if twice else []
    problems += [f"summary.json says another {', '.join(differing)}"] if differing else []
    if not problems and recorded != sorted(recorded):
        problems = ["out of order"]
    superseded = f"; {found.num_superseded:,} rows superseded by a resume" if found.num_superseded else ""
    seen = "; ".join(problems) or f"1 to {recorded[-1]:,}{superseded}"
    return verdict("Each update recorded once", not problems, seen, rule)


def differences(found: Gathered) -> list[str]:
    """In what the summary and the rows differ, among what both say."""
    summary = found[record.SUMMARY]
    pairs = [
        ("number of updates", summary.get("updates"), found.updates[-1]["update"]),
        ("last loss", at(summary, "loss", "last"), found.updates[-1].get("loss")),
    ]
    if found.evaluations:
        pairs.append(("last validation loss", at(summary, "val_loss", "last"), found.evaluations[-1].get("val_loss")))
    return [name for name, said, seen in pairs if number(said) is not None and said != seen]


def some(updates: list[int]) -> str:
    """The first of many updates."""
    shown = ", ".join(f"{update:,}" for update in updates[:5])
    return f"{shown} and {len(updates) - 5:,} more" if len(updates) > 5 else shown


def of_processes(found: Gathered) -> dict[str, str]:
    """Whether every process of the run computed in the same way."""
    rule = (
        "A run that was resumed equals one that never stopped where every process had the same packages, device, "
        "threads, arithmetic and kernels."
    )
    described = records(found[record.ENVIRONMENT].get("processes"))
    if not described:
        return verdict("One environment", None, "environment.json does not say", rule)
    if len(described) == 1:
        return verdict("One environment", True, "one process, never resumed", rule)
    first = described[0]
    differing = sorted(
        {
            key
            for other in described[1:]
            for key in {*first, *other} - {*DIFFERS_BY_NATURE}
            if first.get(key) != other.get(key)
        }
    )
    starts = [number(row.get("from_update")) for row in found.events if row.get("event") == "resume"]
    places = ", ".join(f"{start:,}" for start in starts[:5] if start is not None)
    seen = f"{len(described)} processes" + (f"; resumed after update {places}" if places else "")
    if differing:
        seen += f"; they differ in {words(', '.join(differing), 300)}"
    return verdict("One environment", not differing, seen, rule)


def of_measurement(found: Gathered) -> dict[str, str]:
    """Whether there is a speed, and what was left out of it."""
    rule = "tokens/s is that of the steady state: each update that is left out has its reason."
    said = throughput(found)
    measured = number(said.get("measured_updates"))
    if measured is None:
        return verdict("Speed measured", None, "the record does not say", rule)
    reasons = Counter(one["reason"] for one in said["excluded"])
    left_out = ", ".join(f"{count:,} × {reason}" for reason, count in reasons.items())
    seen = f"over {measured:,} updates" + (f"; left out: {left_out}" if left_out else "; none left out")
    return verdict("Speed measured", measured > 0, seen, rule)
