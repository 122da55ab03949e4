"""Whatever is in a run's folder, its report is made, says what is wrong, and runs nothing of it."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_folders as folders
from tiny import TINY, TRAINING, run

from training_lab import record
from training_lab.errors import LabError
from training_lab.record import RunFolder, list_runs
from training_lab.report import write_report
from training_lab.report.charts import render
from training_lab.report.contents import contents
from training_lab.report.drawn import make_charts
from training_lab.report.gather import EXPECTED, OPTIONAL, gather
from training_lab.report.html import foreign
from training_lab.report.page import make_page
from training_lab.report.reading import clean


def make_folder_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a list": lambda path: path.write_text("[1, 2]", "utf-8"),
    "a number": lambda path: path.write_text("1e999", "utf-8"),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 40),
    "nested too deep": lambda path: path.write_text("[" * 100_000, "utf-8"),
    "a folder": lambda path: make_folder_of(path),
    "other types": lambda path: path.write_text(json.dumps(other_types(path)), "utf-8"),
    "nothing known": lambda path: path.write_text("{}", "utf-8"),
}


def other_types(path: Path) -> Any:
    """The top of a file's object with each value of a type that it should not have."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError:
        return 7
    odd: list[Any] = [None, True, "text", [None, 3], {"": {}}, 10**40, -1]
    return {key: odd[number % len(odd)] for number, key in enumerate(value)} if isinstance(value, dict) else 7


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A folder with everything a folder can have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        return RunFolder(folders.on_gpu().path.resolve())


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", [*EXPECTED, *OPTIONAL, record.METRICS, record.NOTES])
def test_any_damaged_file_still_gives_a_report_that_says_so(name: str, kind: str, whole: RunFolder) -> None:
    shutil.copytree(whole.path, "copy")
    folder = RunFolder(Path("copy"))
    assert folder.file(name).is_file()
    DAMAGE[kind](folder.file(name))
    said = contents(gather(folder))
    json.dumps(said, allow_nan=False).encode("utf-8")
    page = make_page_without_pictures(said)
    assert "<h1>" in page
    if name != record.MANIFEST and name != record.NOTES:
        assert next(one["verdict"] for one in said["verdicts"] if one["name"] == "Record complete") == "bad"
    if name in EXPECTED:
        assert name in [one["file"] for one in said["damage"]]


def make_page_without_pictures(said: dict[str, Any]) -> str:
    """The page with an empty chart library: what remains is quick to make a hundred times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training_lab.report.page.chart_library", lambda: "")
        patch.setattr("training_lab.report.page.render", lambda chart: foreign(chart.summary))
        return make_page(said)


@pytest.mark.parametrize("seed", range(40))
def test_any_value_of_any_type_anywhere_still_gives_a_report(seed: int, whole: RunFolder) -> None:
    import random

    chance = random.Random(seed)
    odd: list[Any] = [None, True, "x\u2028\ud800", [], {}, -1, 0, 1.5, 10**40, [[]], {"a": [1]}, "NaN", [None]]

    def spoiled(value: Any) -> Any:
        if chance.random() < 0.06:
            return chance.choice(odd)
        if isinstance(value, dict):
            return {key: spoiled(one) for key, one in value.items() if chance.random() > 0.03}
        return [spoiled(one) for one in value] if isinstance(value, list) else value

    shutil.copytree(whole.path, "copy")
    folder = RunFolder(Path("copy"))
    for name in [*EXPECTED, *OPTIONAL]:
        value = json.loads(folder.file(name).read_text("utf-8"))
        changed = {key: spoiled(one) for key, one in value.items()}
        folder.file(name).write_text(json.dumps(changed), "utf-8")
    lines = folder.file(record.METRICS).read_text("utf-8").splitlines()
    spoiled_lines = [json.dumps(spoiled(json.loads(line))) for line in lines]
    folder.file(record.METRICS).write_text("\n".join(spoiled_lines), "utf-8")
    said = contents(gather(folder))
    json.dumps(said, allow_nan=False).encode("utf-8")
    assert "<h1>" in make_page_without_pictures(said)
    if seed < 4:
        for chart in make_charts(said).values():
            assert render(chart).startswith("<svg")


def test_numbers_that_are_none_pass_as_none() -> None:
    assert clean({"a": [float("nan"), float("inf"), 10**400, 3, 2.5, True]}) == {"a": [None, None, None, 3, 2.5, True]}
    assert clean("\ud800") == "\\ud800"


def test_what_goes_wrong_in_making_a_report_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.finished()

    def fail(_: object) -> str:
        raise ZeroDivisionError("what nobody thought of")

    monkeypatch.setattr("training_lab.report.make_page", fail)
    with pytest.raises(LabError, match="the report cannot be made: ZeroDivisionError"):
        write_report(folder)
    assert not folder.file(record.REPORT).exists()


def test_a_report_that_cannot_be_written_is_one_clear_error() -> None:
    folder = folders.finished()
    folder.file(record.REPORT).mkdir()
    with pytest.raises(LabError, match=re.escape(record.REPORT)):
        write_report(folder)


def test_a_snapshot_from_somewhere_is_never_unpickled() -> None:
    folder = folders.on_gpu()
    folder.file(record.MEMORY_SNAPSHOT).write_bytes(b"cbuiltins\nopen\n(S'unpickled'\nS'w'\ntR.")
    pickle.loads(folder.file(record.MEMORY_SNAPSHOT).read_bytes()).close()
    assert Path("unpickled").exists(), "whoever unpickles it makes this file"
    Path("unpickled").unlink()
    write_report(folder)
    assert not Path("unpickled").exists()


def test_a_training_ends_with_its_report_and_ends_well_without_it() -> None:
    done = run("train", "--config", str(TINY), "--set", "tracking.report=true")
    assert done.returncode == 0, done.stderr
    (folder,) = list_runs(Path(".runs"))
    assert f"report {folder.run_id} --open" in done.stdout
    assert {record.REPORT, record.REPORT_DATA} <= folder.read_json(record.MANIFEST)["files"].keys()
    said = folder.read_json(record.REPORT_DATA)
    assert [one["name"] for one in said["verdicts"] if one["verdict"] == "bad"] == []
    assert run("verify", folder.run_id).returncode == 0
    assert run("report", folder.run_id).returncode == 0
    assert run("verify", folder.run_id).returncode == 0
    Path("broken").mkdir()
    Path("broken/sitecustomize.py").write_text("import sys\nsys.modules['vl_convert'] = None\n")
    path = os.pathsep.join([str(TRAINING), "broken"])
    words = ("train", "--config", str(TINY), "--set", "tracking.report=true", "--new")
    without = run(*words, env={"PYTHONPATH": path})
    assert without.returncode == 0, without.stderr
    assert "the report cannot be made" in without.stdout
