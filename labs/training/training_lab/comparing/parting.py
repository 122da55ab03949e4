"""Two runs that should be the same: the first update at which they part, and whether the data, the initial state or the
arithmetic parted first. Pure."""

from __future__ import annotations

from typing import NamedTuple

from training_lab.comparing.arms import Run
from training_lab.comparing.comparability import initial_weights

FIGURES = ("loss", "grad_norm")


class Parting(NamedTuple):
    """Where two runs part."""

    update: int | None
    """None: nowhere; 0: before the first update."""
    cause: str
    """`nothing`, `initial state`, `data` or `numerics`."""
    detail: str

    @property
    def is_same(self) -> bool:
        """Whether they part nowhere."""
        return self.cause == "nothing"


def find_parting(first: Run, second: Run) -> Parting:
    """Looks at initial weights, then update by update at the batch and at what was computed from it."""
    ours, theirs = (initial_weights(run) for run in (first, second))
    if ours != theirs:
        return Parting(
            0,
            "initial state",
            f"they part before the first update: the initial weights are {str(ours)[:12]}… and {str(theirs)[:12]}…",
        )
    rows = [{row["update"]: row for row in run.found.updates} for run in (first, second)]
    for update in sorted(rows[0].keys() & rows[1].keys()):
        one, other = rows[0][update], rows[1][update]
        if one.get("batch_sha256") != other.get("batch_sha256"):
            return Parting(update, "data", f"they part at update {update}, in the data: it has another batch")
        wrong = [key for key in FIGURES if one.get(key) != other.get(key)]
        if wrong:
            figures = ", ".join(f"{key} {one.get(key)!r} and {other.get(key)!r}" for key in wrong)
            return Parting(
                update, "numerics", f"they part at update {update}, in the numerics: from the same batch {figures}"
            )
    ends = [run.found["summary.json"].get("weights_sha256") for run in (first, second)]
    last = min(max(found, default=0) for found in rows)
    if len(rows[0]) != len(rows[1]):
        return Parting(None, "nothing", f"the same in the {last} updates that both have")
    if ends[0] != ends[1]:
        return Parting(last, "numerics", "every row is the same, and the last weights are not")
    return Parting(None, "nothing", f"the same bits in all {last} updates and in the last weights")
