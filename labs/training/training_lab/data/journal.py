"""The journal of a build: a line for each block that was appended, from which a killed build goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from training_lab.identity import identity_of


@dataclass
class Tally:
    """What is known of all blocks so far; with a line of the journal for each it can be had again."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    rejected_examples: list[list[str]] = field(default_factory=list)
    counts_checked: int = 0
    counts_wrong: int = 0
    counts_examples: list[dict[str, Any]] = field(default_factory=list)
    is_full: bool = False
    """Whether a limit of the config is reached."""


def sha256_of(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def journal_line(content: Sequence[bytes], tally: Tally, rule: list[int]) -> bytes:
    """What the journal says of a block, after its `content` was appended to the files."""
    entry = {
        "rule": rule,
        "bytes": [len(data) for data in content],
        "content": sha256_of(content),
        "tally": vars(tally),
    }
    return json.dumps({**entry, "sha256": identity_of(entry)}).encode("utf-8") + b"\n"


def resume(files: Sequence[IO[bytes]], journal: IO[bytes], rule: list[int]) -> tuple[int, Tally]:
    """How many blocks of an earlier process are good, and their tally; what follows them is cut off."""
    good, tally = 0, Tally()
    ends = [0] * (len(files) + 1)
    for file in (*files, journal):
        file.seek(0)
    for line in journal:
        try:
            entry = json.loads(line)
            if entry.pop("sha256") != identity_of(entry):
                break
            content = [file.read(size) for file, size in zip(files, entry["bytes"], strict=True)]
            found = Tally(**entry["tally"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            break
        is_same_rule = entry.get("rule") == rule
        if not is_same_rule or not line.endswith(b"\n") or sha256_of(content) != entry.get("content"):
            break
        good, tally = good + 1, found
        ends = [end + size for end, size in zip(ends, [*entry["bytes"], len(line)], strict=True)]
    for file, end in zip((*files, journal), ends, strict=True):
        file.truncate(end)
        file.seek(end)
    return good, tally
