"""The report: a run's folder made into `report.html` and `report.json`.

A pure reader: it changes nothing else in the folder, and the same folder gives the same bytes. It never imports torch.
"""

from __future__ import annotations

from pathlib import Path

from experiment_runner.durable import json_text, write_atomically
from training_lab import record
from training_lab.errors import LabError
from training_lab.record import RunFolder
from training_lab.report.contents import contents
from training_lab.report.gather import gather
from training_lab.report.page import make_page


def write_report(folder: RunFolder, output: Path | None = None) -> Path:
    """Writes the report of a run, whatever state its folder is in, and gives the path of the page.

    It goes into the folder, whose manifest then has its new size and hash, or into the existing folder `output`.
    Raises LabError, and nothing else, if it cannot be made or written: a training ends well without it.
    """
    try:
        said = contents(gather(folder))
        page = make_page(said).encode("utf-8")
        data = json_text(said).encode("utf-8")
    except LabError:
        raise
    except Exception as error:
        raise LabError(f"{folder.path}: the report cannot be made: {type(error).__name__}: {error}") from error
    place = output or folder.path
    write_atomically(place / record.REPORT_DATA, data)
    write_atomically(place / record.REPORT, page)
    if output is None:
        folder.refresh_manifest(record.REPORT, record.REPORT_DATA)
    return place / record.REPORT
