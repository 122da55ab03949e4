"""The report's own entries in the manifest of a closed run."""

from __future__ import annotations

from collections.abc import Iterable

from training_lab import record
from training_lab.errors import LabError
from training_lab.identity import sha256_of_file
from training_lab.record import RunFolder


def update_manifest(folder: RunFolder, names: Iterable[str]) -> None:
    """Brings the entries of these files up to date, and no others: what was damaged since stays seen.

    A folder without a manifest gets none, and a damaged one is left as it is. Raises LabError if it cannot be written.
    """
    try:
        manifest = folder.read_json(record.MANIFEST, files=dict)
    except LabError:
        return
    for name in names:
        path = folder.file(name)
        manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
    manifest["files"] = dict(sorted(manifest["files"].items()))
    folder.write_json(record.MANIFEST, manifest)
