"""A run's folder as plain data. Whatever is missing, damaged or of an earlier version is told, and the rest is used."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from training_lab import record
from training_lab.record import RunFolder
from training_lab.report.reading import at, clean, mapping, number, words
from training_lab.tracking import Row, is_resume, parse_row

Keys = dict[str, type]

EXPECTED: dict[str, Keys] = {
    record.CONFIG: {
        "name": str, "identity": str, "arguments": list, "files": list, "values": dict, "origins": dict, "model": dict,
    },
    record.SOURCE: {"files": dict, "sha256": str},
    record.ENVIRONMENT: {"processes": list},
    record.DATA_MANIFEST: {"identity": str, "source": dict, "tokenizer": dict, "split": dict, "validation": dict},
    record.DATA_STATS: {"lengths": dict, "duplicates": dict, "split": dict, "pieces": dict},
    record.SUMMARY: {
        "state": str, "updates": int, "planned_updates": int, "loss": dict, "val_loss": dict, "initial_loss": dict,
        "throughput": dict, "utilisation": dict, "memory": dict, "wall_clock": dict, "last_process": dict,
    },
}  # fmt: skip
"""What every run has, and what must be in it."""

OPTIONAL: dict[str, Keys] = {
    record.WANDB: {"mode": str, "state": str},
    record.MEMORY_EVENTS: {"phases": list, "curve": dict},
    record.MANIFEST: {"files": dict},
}
"""What some runs have."""

OWN = (record.REPORT, record.REPORT_DATA)
"""The report does not describe itself: the same folder gives the same report."""
MOST_FILE_BYTES = 256 << 20
MOST_NOTES_BYTES = 256 << 10
MOST_UPDATE = 2**53
"""Where floats stop telling one update from the next; a row beyond is damage."""


class Damage(NamedTuple):
    """Something that is not as a record should be."""

    file: str
    message: str


class FileFacts(NamedTuple):
    """A file of the folder, or one that should be there."""

    name: str
    bytes: int | None
    """None: it is not there."""
    sha256: str
    """As the manifest says; empty if it does not."""
    problem: str
    """How it differs from the manifest; empty if it does not."""


@dataclass
class Gathered:
    """What a folder holds."""

    run_id: str
    state: str
    files: list[FileFacts] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The JSON files by name; empty for one that is missing or damaged."""
    notes: str = ""
    updates: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    num_superseded: int = 0
    """Rows of updates and evaluations that a resume superseded."""

    @property
    def is_closed(self) -> bool:
        """Whether the last process said how it ended, so that the summary is that of the whole run."""
        return self.state not in ("running", "killed", "damaged")

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.objects.get(name, {})


def gather(folder: RunFolder) -> Gathered:
    """Reads a folder. Raises nothing for what is wrong inside it."""
    is_readable = folder.file(record.SUMMARY).is_file()
    found = Gathered(clean(folder.run_id), words(clean(folder.state()), 100) if is_readable else "damaged")
    for name, keys in {**EXPECTED, **OPTIONAL}.items():
        found.objects[name] = read_object(folder.file(name), name, keys, name in EXPECTED, found.damage)
    found.notes = read_notes(folder.file(record.NOTES), found.damage)
    read_rows(folder.file(record.METRICS), found)
    found.files = list(compare_files(folder, found))
    return found


def read_object(path: Path, name: str, keys: Keys, is_expected: bool, damage: list[Damage]) -> dict[str, Any]:
    """The object in a JSON file, without the keys that are not what they should be."""
    content = read_bytes(path, name, is_expected, damage)
    if content is None:
        return {}
    odd: list[str] = []
    try:
        value = clean(json.loads(content.decode("utf-8"), parse_constant=odd.append))
    except (ValueError, RecursionError) as error:
        damage.append(Damage(name, f"damaged: {error}"))
        return {}
    if not isinstance(value, dict):
        damage.append(Damage(name, "damaged: not a JSON object"))
        return {}
    if odd:
        damage.append(Damage(name, "holds NaN or an infinity, which JSON does not have"))
    absent = [key for key in keys if key not in value]
    wrong = [key for key, kind in keys.items() if key in value and not is_of(value[key], kind)]
    if absent:
        damage.append(Damage(name, f"does not say: {', '.join(absent)} (damaged, or of an earlier version of the lab)"))
    if wrong:
        damage.append(Damage(name, f"damaged: not what it should be: {', '.join(wrong)}"))
    return {key: one for key, one in value.items() if key not in wrong}


def is_of(value: Any, kind: type) -> bool:
    """Whether a value is of a type, `True` not being a number."""
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def read_bytes(path: Path, name: str, is_expected: bool, damage: list[Damage]) -> bytes | None:
    """The content of an ordinary file; None, and told, if there is none that can be read."""
    try:
        if not path.is_file():
            if path.exists():
                damage.append(Damage(name, "not a file"))
            elif is_expected:
                damage.append(Damage(name, "missing"))
            return None
        if path.stat().st_size > MOST_FILE_BYTES:
            damage.append(Damage(name, f"too large to be what it should be: {path.stat().st_size:,} bytes"))
            return None
        return path.read_bytes()
    except OSError as error:
        damage.append(Damage(name, f"cannot be read: {error.strerror}"))
        return None


def read_notes(path: Path, damage: list[Damage]) -> str:
    """The person's own words; the beginning of them if they are very many."""
    content = read_bytes(path, record.NOTES, False, damage) or b""
    if len(content) > MOST_NOTES_BYTES:
        damage.append(Damage(record.NOTES, f"only the first {MOST_NOTES_BYTES:,} of its bytes are shown"))
    return content[:MOST_NOTES_BYTES].decode("utf-8", "replace")


def read_rows(path: Path, found: Gathered) -> None:
    """The rows that count, as `tracking.read_metrics` gives them, but with damaged lines passed over and told.

    A line that a killed process left unfinished is no damage: it is the last one, or a `resume` follows it.
    """
    content = read_bytes(path, record.METRICS, True, found.damage)
    rows: list[Row | None] = []
    broken: list[int] = []
    for line_number, line in enumerate((content or b"").decode("utf-8", "replace").split("\n"), start=1):
        row = parse_row(line) if line else None
        row = clean(row) if row is not None and is_sane(row) else None
        if row is not None and is_resume(row):
            if broken and broken[-1] == line_number - 1:
                broken.pop()
            supersede(rows, row, found)
        if row is None and line:
            broken.append(line_number)
        rows.append(row)
    if broken and not (content or b"").endswith(b"\n") and broken[-1] == len(rows):
        broken.pop()
    if broken:
        more = f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        lines = ", ".join(map(str, broken[:5]))
        found.damage.append(Damage(record.METRICS, f"damaged lines, passed over: {lines}{more}"))
    kept = [row for row in rows if row is not None]
    found.updates = [row for row in kept if row["kind"] == "update"]
    found.evaluations = [row for row in kept if row["kind"] == "evaluation"]
    found.events = [row for row in kept if row["kind"] == "event"]


def is_sane(row: Row) -> bool:
    """Whether a row's update is a number that an update can have."""
    update = row.get("update", 0)
    is_number = isinstance(update, int) and not isinstance(update, bool)
    return row["kind"] == "event" or (is_number and 0 <= update < MOST_UPDATE)


def supersede(rows: list[Row | None], resume: Row, found: Gathered) -> None:
    """Takes out the rows that a resume says are superseded."""
    first = resume.get("supersedes_from_line")
    if not isinstance(first, int) or first < 0:
        found.damage.append(Damage(record.METRICS, "a resume does not say what it supersedes"))
        return
    for index in range(first, len(rows)):
        row = rows[index]
        if row is not None and row["kind"] != "event":
            rows[index] = None
            found.num_superseded += 1


def compare_files(folder: RunFolder, found: Gathered) -> Iterator[FileFacts]:
    """Every file, its size compared with the manifest's. No content is read: that is `verify`'s work."""
    listed = {name: mapping(entry) for name, entry in mapping(found[record.MANIFEST].get("files")).items()}
    there: dict[str, int] = {}
    with contextlib.suppress(OSError):  # a file that goes away while it is looked at is not there
        for name in folder.content():
            there[clean(name)] = folder.file(name).stat().st_size
    wanted = {*EXPECTED, record.METRICS} - {*there}
    for name in sorted({*listed, *there, *wanted} - {*OWN}):
        size, entry = there.get(name), listed.get(name)
        expected = number(at(entry, "bytes"))
        if size is None:
            problem = "missing"
        elif entry is None:
            problem = "not in the manifest" if listed else ""
        else:
            problem = "" if size == expected else f"has {size:,} bytes, had {expected or 0:,}"
        yield FileFacts(name, size, words((entry or {}).get("sha256"), 64), problem)
