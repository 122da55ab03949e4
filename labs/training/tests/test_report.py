"""The report says what the record says, whatever state the folder is in, and changes nothing else in it."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_folders as folders
from report_folders import HOSTILE, STATES

from training_lab import record
from training_lab.errors import LabError
from training_lab.record import RunFolder
from training_lab.report import write_report
from training_lab.report.charts import render
from training_lab.report.contents import is_link
from training_lab.report.curves import MOST_POINTS, exponential_mean, ranges, thinned
from training_lab.report.drawn import make_charts
from training_lab.report.gather import gather
from training_lab.report.html import foreign, shown, table, tag
from training_lab.report.notes import set_notes
from training_lab.report.page import json_for_script, make_page
from training_lab.report.verdicts import STATES as STATE_WORDS
from training_lab.report.verdicts import verdicts
from training_lab.report_command import add_report_commands, report_command


class Page(HTMLParser):
    """The elements and the text of a page, as a browser takes them in."""

    VOID = ("br", "hr", "meta", "link", "input", "img")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._in_script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if not self._in_script:
            self.text += data

    def named(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name in names]


def report_of(folder: RunFolder) -> dict[str, Any]:
    write_report(folder)
    return folder.read_json(record.REPORT_DATA)


def verdict_of(said: dict[str, Any], name: str) -> dict[str, str]:
    return next(one for one in said["verdicts"] if one["name"] == name)


# --- what it says ---


@pytest.mark.parametrize("kind", STATES)
def test_each_state_says_itself_at_the_top(kind: str) -> None:
    folder = STATES[kind]()
    page = write_report(folder).read_text("utf-8")
    top = Page(page[page.index("<header>") : page.index("</header>")]).text
    assert STATE_WORDS[folder.state()] in top
    said = folder.read_json(record.REPORT_DATA)
    assert said["state"] == folder.state()
    expected = {"finished": "good", "damaged": "unknown"}.get(folder.state(), "bad")
    assert verdict_of(said, "Finished")["verdict"] == expected


def test_a_whole_record_has_no_bad_verdict_and_a_damaged_one_names_what_is_damaged() -> None:
    assert {one["verdict"] for one in report_of(folders.finished())["verdicts"]} == {"good"}
    said = report_of(folders.damaged())
    assert {one["file"] for one in said["damage"]} == {record.SUMMARY, record.METRICS}
    assert verdict_of(said, "Record complete")["verdict"] == "bad"
    assert verdict_of(said, "Each update recorded once")["verdict"] == "bad"


def test_numbers_on_the_page_equal_those_of_the_record() -> None:
    folder = folders.on_gpu()
    page = Page(write_report(folder).read_text("utf-8"))
    summary = folder.read_json(record.SUMMARY)
    on_page = {float(str(one["value"])) for one in page.named("data")}
    expected = [
        summary["val_loss"]["first"], summary["val_loss"]["last"], math.exp(summary["val_loss"]["last"]),
        summary["loss"]["first"], summary["loss"]["last"], summary["target_tokens"],
        summary["throughput"]["target_tokens_per_s"], summary["throughput"]["measured_updates"],
        summary["utilisation"]["mfu"]["causal"], summary["utilisation"]["mfu"]["full"],
        summary["utilisation"]["matmul_share"]["causal"], summary["memory"]["scopes"]["updates"]["allocated_bytes"],
        folder.read_json(record.CONFIG)["model"]["parameters"], summary["timeline"]["busy"]["share"],
    ]  # fmt: skip
    assert set(expected) <= on_page
    for text in (f"{summary['val_loss']['last']:.4f}", f"{summary['throughput']['target_tokens_per_s']:,.0f}"):
        assert text in page.text
    assert "without sparsity" in page.text, "the peak comes with its source"


def test_curves_are_the_rows_of_the_metrics() -> None:
    folder = folders.resumed()
    rows = [json.loads(line) for line in folder.file(record.METRICS).read_text("utf-8").splitlines()]
    counted = {row["update"]: row for row in rows if row["kind"] == "update"}  # the later of two that are the same
    said = report_of(folder)["curves"]
    loss = said["figures"]["loss"]
    assert loss["update"] == sorted(counted)
    assert loss["loss"] == [counted[update]["loss"] for update in loss["update"]]
    assert loss["tokens"][-1] == sum(row["target_tokens"] for row in counted.values())
    assert loss["seconds"][-1] == pytest.approx(sum(row["seconds"] for row in counted.values()))
    assert said["resumes"]["update"] == [20.5, 45.5]


def test_a_resumed_run_says_where_and_what_was_superseded() -> None:
    said = report_of(folders.resumed())
    assert "resumed after update 20, 45" in verdict_of(said, "One environment")["seen"]
    assert "4 rows superseded" in verdict_of(said, "Each update recorded once")["seen"]


def test_processes_that_differ_are_named() -> None:
    folder = folders.resumed()
    environment = folder.read_json(record.ENVIRONMENT)
    environment["processes"][1]["num_threads"] = 8
    folder.write_json(record.ENVIRONMENT, environment)
    one = verdict_of(report_of(folder), "One environment")
    assert one["verdict"] == "bad"
    assert "num_threads" in one["seen"]


def test_a_run_that_was_not_closed_is_measured_by_its_rows() -> None:
    folder = folders.killed()
    said = report_of(folder)
    assert folder.read_json(record.SUMMARY)["updates"] == 0, "the summary is that of the beginning"
    assert said["figures"]["updates"] == 33
    assert said["figures"]["throughput"]["measured_updates"] == 33 - 10 - 3
    assert said["damage"] == [], "a line that a killed process left unfinished is no damage"


def test_a_summary_that_says_other_numbers_than_the_rows_is_found_out() -> None:
    folder = folders.finished()
    summary = folder.read_json(record.SUMMARY)
    summary["val_loss"]["last"] -= 1
    folder.write_json(record.SUMMARY, summary)
    one = verdict_of(report_of(folder), "Each update recorded once")
    assert (one["verdict"], "last validation loss" in one["seen"]) == ("bad", True)


def test_a_validation_loss_that_is_not_finite_is_found_out() -> None:
    folder = folders.interrupted()
    with open(folder.file(record.METRICS), "a", encoding="utf-8") as file:
        file.write('{"kind": "evaluation", "update": 42, "val_loss": null, "target_tokens": 1, "seconds": 1}\n')
    one = verdict_of(report_of(folder), "No non-finite value")
    assert (one["verdict"], "1 of 7 validation losses" in one["seen"]) == ("bad", True)


def test_an_earlier_version_says_what_it_did_not_record() -> None:
    said = report_of(folders.older())
    assert [one["file"] for one in said["damage"]] == [record.SUMMARY]
    assert "utilisation, memory, wall_clock" in said["damage"][0]["message"]
    assert said["figures"]["memory"]["process_peak_bytes"] == 1_231_794_176


def test_config_shows_what_differs_from_its_base_first() -> None:
    folder = folders.finished()
    said = report_of(folder)["config"]
    origins = folder.read_json(record.CONFIG)["origins"]
    assert set(said["chosen"]) == {key for key, one in origins.items() if one in ("--set", "experiments/profile.json")}
    assert "model.num_layers" not in said["chosen"], "that one is its base's, smoke"
    page = Page(write_report(folder).read_text("utf-8")).text
    assert page.index("measure.matmul_probe") < page.index(f"All {len(origins)} settings") < page.index("data.source")


def test_the_commands_make_the_run_again() -> None:
    said = report_of(folders.finished())["again"]
    assert "python -m training_lab verify cpu-20261201-100000-aaaa" in said.values()
    assert any("--config .runs/cpu-20261201-100000-aaaa/config.json --new" in command for command in said.values())
    assert any("--config profile --set train.updates=60" in command for command in said.values())


# --- what it is made of ---


@pytest.mark.parametrize("kind", ["finished", "gpu", "resumed", "hostile", "damaged"])
def test_the_same_folder_gives_the_same_bytes_twice(kind: str) -> None:
    folder = STATES[kind]()
    first = [write_report(folder).read_bytes(), folder.file(record.REPORT_DATA).read_bytes()]
    assert [write_report(folder).read_bytes(), folder.file(record.REPORT_DATA).read_bytes()] == first


def test_a_report_changes_nothing_but_its_own_two_entries_of_the_manifest() -> None:
    folder = folders.finished()
    folder.file(record.SOURCE).write_text("changed since", "utf-8")
    before = {name: folder.file(name).read_bytes() for name in folder.content()}
    listed = folder.read_json(record.MANIFEST)["files"]
    write_report(folder)
    now = folder.read_json(record.MANIFEST)["files"]
    assert {name: folder.file(name).read_bytes() for name in before} == before
    assert {name: one for name, one in now.items() if name in listed} == listed
    assert set(now) - set(listed) == {record.REPORT, record.REPORT_DATA}
    bad = [finding.subject for finding in folder.verify_manifest() if not finding.is_good]
    assert bad == [record.SOURCE], "a file that was changed must stay detectable"


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"files": 7}'])
def test_a_folder_without_a_good_manifest_gets_none(manifest: str | None) -> None:
    folder = folders.finished()
    folder.file(record.MANIFEST).unlink()
    if manifest is not None:
        folder.file(record.MANIFEST).write_text(manifest, "utf-8")
    write_report(folder)
    is_there = folder.file(record.MANIFEST).exists()
    assert (folder.file(record.MANIFEST).read_text("utf-8") if is_there else None) == manifest


def test_report_json_is_strict_and_holds_the_numbers_of_the_page() -> None:
    folder = folders.hostile()
    write_report(folder)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    said = json.loads(folder.file(record.REPORT_DATA).read_bytes().decode("utf-8"), parse_constant=refuse)
    assert make_page(said) == folder.file(record.REPORT).read_text("utf-8"), "the page shows report.json alone"


def test_no_torch_is_imported(tmp_path: Path) -> None:
    folder = folders.finished()
    program = (
        "import sys; from pathlib import Path; from training_lab.report import write_report; "
        "from training_lab.record import RunFolder; write_report(RunFolder(Path(sys.argv[1]))); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(folder.path)], check=True)


def test_ten_thousand_updates_stay_small_and_lose_no_extreme() -> None:
    folder = folders.long()
    page = write_report(folder)
    assert page.stat().st_size < 2_000_000
    said = folder.read_json(record.REPORT_DATA)["curves"]
    rows = gather(folder).updates
    for name, key in (("loss", "loss"), ("grad_norm", "grad_norm"), ("lr", "lr"), ("memory", "memory_bytes")):
        drawn = said["figures"][name][name]
        values = [row[key] for row in rows]
        assert len(drawn) <= MOST_POINTS
        assert (min(drawn), max(drawn), drawn[0], drawn[-1]) == (min(values), max(values), values[0], values[-1])
    assert "at most 500 points" in Page(page.read_text("utf-8")).text


# --- hostile texts ---


def test_hostile_texts_appear_as_texts() -> None:
    page = Page(write_report(folders.hostile()).read_text("utf-8"))
    assert len(page.named("script")) == 3, "the data, the chart library, the page's own"
    assert not page.named("img", "iframe", "object", "base", "form")
    events = [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert events == []
    links = [str(one["href"]) for one in page.named("a", "link")]
    assert all(link.startswith(("#", "https://")) for link in links)
    assert shown(HOSTILE) in page.text
    assert not set("\u202e\u2028\x1b\x00") & set(page.text)


def test_the_policy_lets_nothing_in_and_only_the_labs_own_scripts_run() -> None:
    page = Page(write_report(folders.finished()).read_text("utf-8"))
    policy = next(str(one["content"]) for one in page.named("meta") if "http-equiv" in one)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.partition("style-src")[0]
    addresses = [value for _, one in page.elements for key, value in one.items() if key in ("src", "srcset", "data")]
    assert addresses == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x00b\x1b[1m", "a\\x00b\\x1b[1m"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("한국어 عربى 👩\u200d💻\u3000", "한국어 عربى 👩\u200d💻\u3000"),
        ("a\u2028b\x85", "a\\u2028b\\x85"),
    ],
)
def test_control_characters_are_shown_and_writing_is_left_alone(text: str, expected: str) -> None:
    assert shown(text) == expected
    assert unescape(foreign(text)) == f"<bdi>{expected}</bdi>"


def test_what_is_not_markup_is_escaped_wherever_it_is_put() -> None:
    assert tag("p", "<b>", title='"<') == '<p title="&quot;&lt;">&lt;b&gt;</p>'
    assert "<i>" not in table("<i>", ["<i>"], [["<i>"]])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://wandb.ai/a/b", True), ("http://127.0.0.1:8080/x?y=1", True), ("javascript:alert(1)", False),
        ("https://a b", False), ("data:text/html,x", False), ("//host/x", False), ('https://a"onclick=x', False),
        ("HTTPS\x00://a", False), ("", False), ("file:///etc/passwd", False),
    ],
)  # fmt: skip
def test_only_addresses_on_the_web_become_links(url: str, expected: bool) -> None:
    assert is_link(url) is expected


def test_notes_are_set_with_restraint_and_skip_no_heading() -> None:
    text = "#### Deep\n\n# Top\ntwo\nlines\n\n1. one\n2. two\n   more\n\n- a\n\n```\n# no heading\n<b>\n```\n**bold** [l](http://x)"
    page = Page(set_notes(text))
    assert [name for name, _ in page.elements if name.startswith("h")] == ["h3", "h3"]
    assert [name for name, _ in page.elements if name in ("ul", "ol", "li", "pre", "a", "b")] == [
        "ol", "li", "li", "ul", "li", "pre",
    ]  # fmt: skip
    assert "# no heading\n<b>" in page.text
    assert "**bold** [l](http://x)" in page.text


def test_what_the_scripts_are_given_ends_no_script() -> None:
    said = report_of(folders.on_gpu())
    said["memory_events"]["phases"][0]["name"] = "</script><!--\u2028"
    given = json_for_script(said, list(make_charts(said).values()))
    assert not set("<>&\u2028") & set(given)
    names = json.loads(given)["charts"]["memory-events"]["data"]["phases"]["name"]
    assert names[0].startswith("</script><!--")


def test_two_points_of_the_same_time_are_not_added_up() -> None:
    said = report_of(folders.on_gpu())
    said["memory_events"]["curve"] = {"s": [0.0, 0.1, 0.1, 0.2], "bytes": [2**30, 8 * 2**30, 8 * 2**30, 2**30]}
    picture = render(make_charts(said)["memory-events"])
    labels = [float(label) for label in re.findall(r">(\d+(?:\.\d+)?)</text>", picture)]
    gibibytes = [label for label in labels if label <= 20]
    assert max(gibibytes) <= 10


# --- accessibility of the markup ---


@pytest.mark.parametrize("kind", ["finished", "gpu", "killed", "older", "hostile"])
def test_headings_come_in_order_and_every_figure_has_a_text_and_a_table(kind: str) -> None:
    page = Page(write_report(STATES[kind]()).read_text("utf-8"))
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    names = [name for name, _ in page.elements]
    figures = [index for index, name in enumerate(names) if name == "figure"]
    for begin, end in zip(figures, [*figures[1:], len(names)], strict=True):
        inside = page.elements[begin:end]
        assert next(one for _, one in inside if one.get("role") == "img")["aria-label"]
        assert {"figcaption", "svg", "details", "table"} <= {name for name, _ in inside}
    assert {"header", "nav", "main", "footer"} <= set(names)
    ids = [one["id"] for _, one in page.elements if one.get("id")]
    assert len(ids) == len(set(ids))
    assert {str(one["href"])[1:] for one in page.named("a") if str(one["href"]).startswith("#")} <= set(ids)


# --- the pure middle ---


def test_thinning_keeps_the_first_the_last_and_the_extremes() -> None:
    values: list[float | None] = [math.sin(i) for i in range(5000)]
    values[1234], values[3210], values[7] = 9.0, -9.0, None
    kept = thinned(values, 100)
    assert len(kept) <= 100
    assert kept == sorted(set(kept))
    assert {0, 1234, 3210, 4999} <= set(kept)
    assert 7 not in kept
    assert thinned(values[:100], 100) == [i for i in range(100) if i != 7]
    assert thinned([None, None]) == []


def test_the_running_mean_halves_a_weight_over_its_half_life_and_is_not_pulled_to_zero() -> None:
    assert exponential_mean([3.0] * 5, 2) == pytest.approx([3.0] * 5)
    means = exponential_mean([1.0] + [0.0] * 2000, 10)
    assert means[1010] == pytest.approx((means[1000] or 0) / 2, rel=1e-6)
    assert exponential_mean([None, 2.0, None], 2) == [None, 2.0, 2.0]


def test_updates_that_follow_each_other_for_the_same_reason_are_one_range() -> None:
    excluded = [(1, "a"), (2, "a"), (3, "b"), (5, "b"), (6, "b")]
    spans = [(one["from"], one["to"], one["reason"]) for one in ranges(excluded)]
    assert spans == [(1, 2, "a"), (3, 3, "b"), (5, 6, "b")]


def test_verdicts_have_each_a_rule_in_words() -> None:
    for one in verdicts(gather(folders.finished())):
        assert one["rule"].endswith(".")
        assert one["seen"]


# --- the command ---


def run_command(*arguments: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    add_report_commands(parser.add_subparsers())
    return report_command(parser.parse_args(["report", *arguments]))


def test_the_command_says_where_the_report_is_and_how_to_open_it(capsys: pytest.CaptureFixture[str]) -> None:
    folder = folders.finished()
    assert run_command("latest") == 0
    said = capsys.readouterr().out
    assert str(folder.file(record.REPORT)) in said
    assert folder.file(record.REPORT).resolve().as_uri() in said


def test_the_command_writes_elsewhere_and_leaves_the_folder_alone(capsys: pytest.CaptureFixture[str]) -> None:
    folder = folders.finished()
    before = {name: folder.file(name).read_bytes() for name in [*folder.content(), record.MANIFEST]}
    assert run_command("cpu", "--output", "else/where") == 0
    assert sorted(path.name for path in Path("else/where").iterdir()) == [record.REPORT, record.REPORT_DATA]
    assert {name: folder.file(name).read_bytes() for name in [*folder.content(), record.MANIFEST]} == before


@pytest.mark.parametrize("arguments", [("nosuch",), ("cpu", "--output", "file/x"), ("latest", "--runs", "nowhere")])
def test_wrong_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    folders.finished()
    Path("file").write_text("", "utf-8")
    with pytest.raises(LabError) as caught:
        run_command(*arguments)
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) == 1
