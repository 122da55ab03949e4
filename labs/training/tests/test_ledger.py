"""Marks and notes: they are kept, found by, and change nothing of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_folders import Recipe, write_run
from tiny import run

from training_lab.ledger import LEDGER, read_judgements
from training_lab.record import RunFolder

RUNS = Path(".runs")


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunFolder]:
    monkeypatch.chdir(tmp_path)
    return [write_run(Recipe(name)) for name in ("alpha", "beta", "gamma")]


def listed(*filters: str) -> set[str]:
    return {one["run"] for one in json.loads(run("runs", "--json", *filters).stdout)}


def test_marks_and_notes_are_kept_and_found_by(runs: list[RunFolder]) -> None:
    before = {path: path.read_bytes() for one in runs for path in one.path.rglob("*") if path.is_file()}
    assert run("mark", "keep", "alpha", "--note", "the Reference").returncode == 0
    assert run("mark", "discard", "beta", "gamma").returncode == 0
    assert run("mark", "note", "alpha", "--note", "tuned on seed 7").returncode == 0
    assert run("mark", "none", "gamma").returncode == 0
    assert listed("--mark", "keep") == {"alpha"}
    assert listed("--mark", "discard") == {"beta"}
    assert listed("--mark", "none") == {"gamma"}
    assert listed("--grep", "reference") == {"alpha"}
    assert listed("--state", "finished") == {"alpha", "beta", "gamma"}
    assert listed("--state", "failed") == set()
    assert listed("--config", "profile", "--mark", "keep") == {"alpha"}
    assert read_judgements(RUNS)["alpha"].notes == ["the Reference", "tuned on seed 7"]
    assert "the Reference; tuned on seed 7" in run("runs", "--mark", "keep").stdout
    assert {path: path.read_bytes() for one in runs for path in one.path.rglob("*") if path.is_file()} == before
    assert all(finding.is_good for one in runs for finding in one.verify_manifest())


def test_a_line_that_was_cut_off_costs_no_other(runs: list[RunFolder]) -> None:
    run("mark", "keep", "alpha")
    with open(RUNS / LEDGER, "a", encoding="utf-8") as file:
        file.write('{"utc": "2026')
    run("mark", "discard", "beta")
    assert {name: one.mark for name, one in read_judgements(RUNS).items()} == {"alpha": "keep", "beta": "discard"}


def test_what_is_wrong_is_said_and_nothing_is_written(runs: list[RunFolder]) -> None:
    for arguments, message in (
        (("keep", "alpha", "nothing"), "no such run"),
        (("note", "alpha"), "needs --note"),
        (("best", "alpha"), "invalid choice"),
        (("keep", ".runs/alpha", "--runs", "elsewhere"), "is not in elsewhere"),
    ):
        done = run("mark", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
    assert not (RUNS / LEDGER).exists()


def test_the_index_links_every_report_and_says_what_was_marked(runs: list[RunFolder]) -> None:
    run("mark", "keep", "alpha", "--note", "<b>bold</b>")
    for one in runs[:2]:
        one.file("report.html").write_text("<p>report</p>", "utf-8")
    study = RUNS / "studies/question"
    study.mkdir(parents=True)
    said = {"declared": {"question": "Why?"}, "runs": [{"run": "alpha", "state": "finished"}], "is_complete": True}
    (study / "study.json").write_text(json.dumps({**said, "verdicts": ["A → B: better"]}), "utf-8")
    (study.parent / "broken").mkdir()
    (study.parent / "broken/study.json").write_text("{", "utf-8")
    assert run("runs", "--html").returncode == 0
    page = (RUNS / "index.html").read_text("utf-8")
    for text in ('href="alpha/report.html"', 'href="beta/report.html"', "Why?", "A → B: better", "broken", "damaged",
                 "&lt;b&gt;bold&lt;/b&gt;"):  # fmt: skip
        assert text in page
    assert 'href="gamma/report.html"' not in page
    assert "<b>bold" not in page
    assert listed("--study", "question") == {"alpha"}
