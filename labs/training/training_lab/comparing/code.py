"""What differs between the code of two runs, from their folders alone."""

from __future__ import annotations

import difflib
import zipfile
from collections.abc import Iterator

from training_lab import record
from training_lab.comparing.arms import Run
from training_lab.comparing.comparability import changed_code


def code_diffs(first: Run, second: Run) -> Iterator[tuple[str, list[str]]]:
    """Each file that is not the same, with its differences as lines; none where a folder does not hold the file."""
    names = changed_code(first, second)
    if not names:
        return
    before, after = packed_source(first), packed_source(second)
    ours, theirs = (dict(run.found[record.SOURCE].get("files") or {}) for run in (first, second))
    for name in names:
        is_known = all(name in packed or name not in listed for packed, listed in ((before, ours), (after, theirs)))
        old, new = before.get(name, "").splitlines(), after.get(name, "").splitlines()
        yield name, list(difflib.unified_diff(old, new, first.id, second.id, lineterm="")) if is_known else []


def packed_source(run: Run) -> dict[str, str]:
    """The files that ran, by name, as far as the folder holds them."""
    if run.folder is None:
        return {}
    try:
        with zipfile.ZipFile(run.folder.file(record.SOURCE_ARCHIVE)) as archive:
            return {name: archive.read(name).decode("utf-8", "replace") for name in archive.namelist()}
    except (OSError, ValueError, zipfile.BadZipFile):
        return {}
