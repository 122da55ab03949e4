"""The rows of `metrics.jsonl` as mirrors want them, and a reader that follows the file while it grows.

Standard library only, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training_lab.tracking import Row, parse_row, rows_that_count

MIRRORED = ("update", "evaluation")


def mirrored_values(row: Row) -> dict[str, float]:
    """The figures of a row by their names on a mirror; those that are not known are left out."""
    if row["kind"] == "evaluation":
        named = {"val/loss": row.get("val_loss")}
    else:
        seconds, targets = row.get("seconds"), row.get("target_tokens")
        named = {
            "train/loss": row.get("loss"),
            "train/lr": row.get("lr"),
            "train/grad_norm": row.get("grad_norm"),
            "train/target_tokens": targets,
            "speed/target_tokens_per_s": targets / seconds if targets and seconds else None,
            "speed/update_s": seconds,
            "memory/bytes": row.get("memory_bytes"),
            "process": row.get("segment"),
        }
    return {"update": row["update"], **{name: value for name, value in named.items() if value is not None}}


class GrowingRows:
    """The updates and evaluations of a metrics file: first those that count now, then each as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._has_begun = False

    def take(self) -> Iterator[Row]:
        """What has come since the last call; an unfinished last line is left for the next."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:  # not there yet
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.decode("utf-8", errors="replace").splitlines() if whole else []
        rows = [parse_row(line) for line in lines] if self._has_begun else rows_that_count(lines, self.path)
        self._has_begun = True
        yield from (row for row in rows if row is not None and row["kind"] in MIRRORED)
