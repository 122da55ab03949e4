"""Comparisons: what differs is named, and nothing else; no comparison is ever silent about what it rests on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from arms_made import change, close, make_arm, make_run, noise
from tiny import TINY, run, train_tiny

from training_lab import record
from training_lab.comparing.comparability import LEARNING, NOTHING, SPEED
from training_lab.comparing.compare import Comparison, Pair, as_json, compare_runs, read_run
from training_lab.comparing.effects import Question, at, reach
from training_lab.comparing.noise_floor import find_floor, keep_floor
from training_lab.comparing.words import in_lines
from training_lab.errors import LabError, UserError
from training_lab.record import RunFolder

OTHER = "f" * 64


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pair_of(*folders: RunFolder, allowed: tuple[str, ...] = (), question: Question | None = None) -> Pair:
    comparison = compare_runs(folders, allowed, question)
    assert len(comparison.pairs) == 1
    return comparison.pairs[0]


def text_of(comparison: Comparison) -> str:
    return "\n".join(in_lines(comparison))


def word_of(pair: Pair) -> str:
    verdict = pair.effects[0].verdict
    assert verdict is not None
    return verdict.word


def differing(pair: Pair, *matters: str) -> list[str]:
    return [aspect.name for aspect in pair.judged.aspects if not aspect.is_same and aspect.matters_for in matters]


# --- what makes runs not comparable ---


def test_two_runs_that_differ_in_one_setting_are_a_controlled_comparison() -> None:
    comparison = compare_runs([make_run("a"), make_run("b", lr=1e-3)])
    (pair,) = comparison.pairs
    assert all(aspect.is_same for aspect in pair.judged.aspects), pair.judged.aspects
    assert pair.judged.is_paired
    assert [str(one) for one in pair.chosen] == ["optimizer.max_lr: 0.0006 → 0.001"]
    assert "Controlled: one change, optimizer.max_lr: 0.0006 → 0.001" in text_of(comparison)


@pytest.mark.parametrize(
    ("name", "file", "path", "value"),
    [
        ("code", record.SOURCE, "files training_lab/engine.py", OTHER),
        ("finished runs", record.SUMMARY, "state", "interrupted"),
        ("tokenizer", record.DATA_MANIFEST, "tokenizer kind", "char"),
        ("validation data", record.DATA_MANIFEST, "validation identity", OTHER),
        ("definition of the loss", record.SUMMARY, "val_loss definition", "another"),
        ("training text", record.DATA_MANIFEST, "cache identity", OTHER),
        ("split", record.DATA_MANIFEST, "split salt", "other"),
        ("tokens seen", record.SUMMARY, "target_tokens", 1),
        ("precision", record.ENVIRONMENT, "processes 0 compute", "bf16"),
        ("initial weights", record.CONFIG, "model initial_weights_sha256", OTHER),
        ("order of the data", record.DATA_MANIFEST, "plan identity", OTHER),
    ],
)
def test_each_thing_that_losses_depend_on_is_named_alone(name: str, file: str, path: str, value: Any) -> None:
    first, second = make_run("a"), make_run("b", lr=1e-3)
    change(second, file, path, value)
    close(second)
    comparison = compare_runs([first, second])
    (pair,) = comparison.pairs
    assert differing(pair, LEARNING, SPEED) == [name]
    assert comparison.exit_code == 2
    assert pair.effects == []
    assert f"Not comparable: {name}: " in text_of(comparison)
    assert pair.obstacles[0].advice


@pytest.mark.parametrize(
    ("name", "file", "path", "value"),
    [
        ("hardware", record.ENVIRONMENT, "processes 0 processor", "another"),
        ("threads", record.ENVIRONMENT, "processes 0 num_threads", 99),
        ("software", record.ENVIRONMENT, "processes 0 torch", "1.0"),
        ("kernels", record.ENVIRONMENT, "processes 0 attention", "other"),
        ("definition of MFU", record.SUMMARY, "utilisation formulas causal", "another"),
    ],
)
def test_what_only_seconds_depend_on_forbids_only_to_compare_seconds(
    name: str, file: str, path: str, value: Any
) -> None:  # fmt: skip
    first, second = make_run("a"), make_run("b", lr=1e-3)
    change(second, file, path, value)
    close(second)
    pair = pair_of(first, second)
    assert differing(pair, LEARNING, SPEED) == [name]
    assert pair.exit_code != 2
    for effect in pair.effects:
        if effect.matters_for == SPEED:
            assert effect.verdict is None
            assert effect.reason == f"not compared: {name} differ"
        else:
            assert effect.verdict is not None
    assert all(effect.verdict for effect in pair_of(first, second, allowed=(name,)).effects)


def test_another_measurement_window_is_a_change_and_forbids_to_compare_seconds() -> None:
    first, second = make_run("a"), make_run("b")
    change(second, record.CONFIG, "values measure warmup_updates", 20)
    close(second)
    assert differing(pair_of(first, second), LEARNING, SPEED) == ["measurement window"]


def test_a_record_that_was_changed_or_damaged_is_not_compared() -> None:
    first, second = make_run("a"), make_run("b", lr=1e-3)
    with open(second.file(record.METRICS), "a", encoding="utf-8") as file:
        file.write('{"kind": "event", "event": "planted"}\n')
    pair = pair_of(first, second)
    assert differing(pair, LEARNING, SPEED) == ["whole records"]
    assert "b: metrics.jsonl: has " in pair.obstacles[0].detail


def test_what_the_change_explains_is_not_held_against_it() -> None:
    first, second = make_run("a"), make_run("b")
    change(second, record.CONFIG, "values batch tokens", 4096)
    change(second, record.DATA_MANIFEST, "plan identity", OTHER)
    change(second, record.SUMMARY, "target_tokens", 100_000)
    close(second)
    pair = pair_of(first, second)
    assert pair.obstacles == []
    assert differing(pair, NOTHING) == ["tokens seen", "order of the data"]
    assert not pair.judged.is_paired, "other batches: the runs do not belong together any more"


def test_an_obstacle_may_be_overlooked_by_hand_and_that_is_said() -> None:
    first, second = make_run("a"), make_run("b", lr=1e-3)
    change(second, record.SOURCE, "files training_lab/engine.py", OTHER)
    close(second)
    comparison = compare_runs([first, second], ("code",))
    assert comparison.exit_code != 2
    assert "ALLOWED BY HAND: code" in text_of(comparison)
    assert "differs: code: training_lab/engine.py" in text_of(comparison)


def test_other_validation_data_can_never_be_overlooked() -> None:
    for name in ("validation data", "tokenizer", "finished runs"):
        done = run("compare", "a", "b", "--allow", name)
        assert done.returncode == 2
        assert "invalid choice" in done.stderr


def test_a_run_whose_code_is_unknown_is_said() -> None:
    first, second = make_run("a"), make_run("b", lr=1e-3)
    change(second, record.SOURCE, "files", None)
    close(second)
    details = {one.name: one.detail for one in pair_of(first, second).obstacles}
    assert details["code"] == "it is not known for b"


def test_what_has_an_effect_only_with_the_change_comes_with_it() -> None:
    first, second = make_run("a"), make_run("b")
    change(second, record.CONFIG, "values optimizer name", "muon")
    change(second, record.CONFIG, "values optimizer muon_lr", 0.04)
    close(second)
    pair = pair_of(first, second)
    assert [str(one) for one in pair.chosen] == ["optimizer.name: adamw → muon"]
    assert "optimizer.muon_lr: none → 0.04" in [str(one) for one in pair.declared]
    change(first, record.CONFIG, "values optimizer muon_lr", 0.5)
    close(first)
    assert compare_runs([first, make_run("c")]).pairs == [], "without muon its rate is nothing"


def test_a_setting_that_an_earlier_version_did_not_have_is_no_change() -> None:
    first, second = make_run("a"), make_run("b", lr=1e-3)
    change(first, record.CONFIG, "values checkpoint restore", None)
    close(first)
    assert [one.key for one in pair_of(first, second).chosen] == ["optimizer.max_lr"]


# --- other tokenizers ---


def test_with_other_tokenizers_losses_of_the_same_text_are_compared_in_bits_a_byte() -> None:
    first, second = make_run("a"), make_run("b")
    for folder, kind, targets in ((first, "byte", 6000), (second, "gpt2", 1500)):
        change(folder, record.CONFIG, "values data tokenizer", kind)
        change(folder, record.DATA_MANIFEST, "tokenizer", {"kind": kind})
        said = {"identity": OTHER[:-1] + kind[0], "target_tokens": targets, "target_bytes": 6000, "text_sha256": "same"}
        change(folder, record.DATA_MANIFEST, "validation", said)
        close(folder)
    pair = pair_of(first, second)
    assert pair.obstacles == []
    endpoint = pair.effects[0]
    assert endpoint.unit == "bits/byte"
    last = [read_run(folder).found.evaluations[-1]["val_loss"] for folder in (first, second)]
    assert endpoint.first == [pytest.approx(last[0] / math.log(2))]
    assert endpoint.second == [pytest.approx(last[1] * 1500 / 6000 / math.log(2))]
    change(second, record.DATA_MANIFEST, "validation text_sha256", "another")
    close(second)
    obstacles = pair_of(first, second).obstacles
    assert [one.name for one in obstacles] == ["tokenizer", "validation data"]
    assert "bits per byte" in obstacles[0].advice


# --- what the change did ---


def test_a_planted_difference_is_found_and_none_is_not() -> None:
    ours, same, worse = noise(5, 0.01, 1), noise(5, 0.01, 2), [0.05 + one for one in noise(5, 0.01, 3)]
    base = make_arm("a", ours, 6e-4)
    pair = pair_of(*base, *make_arm("b", same, 1e-3))
    assert word_of(pair) == "indistinguishable"
    assert pair.exit_code == 1
    pair = pair_of(*base, *make_arm("c", worse, 2e-3))
    assert word_of(pair) == "worse"
    assert pair.exit_code == 0


def test_pairs_that_are_verified_are_compared_as_pairs_in_any_order() -> None:
    shared = noise(4, 0.5, 1)
    ours = make_arm("a", shared, 6e-4)
    theirs = make_arm("b", [one - 0.1 - 0.001 * number for number, one in enumerate(shared)], 1e-3)
    verdict = pair_of(*ours, *reversed(theirs)).effects[0].verdict
    assert verdict is not None
    assert verdict.word == "better", "as two groups the seeds' noise would hide it"
    assert verdict.difference == pytest.approx(-0.1015)
    alone = make_arm("c", [one - 0.1 for one in shared], 1e-3, seeds=[11, 12, 13, 14])
    unpaired = pair_of(*ours, *alone)
    assert not unpaired.judged.is_paired
    assert word_of(unpaired) == "indistinguishable"


def test_a_run_that_is_made_again_with_its_seed_counts_once_for_learning_and_again_for_speed() -> None:
    ours, theirs = make_arm("a", noise(3, 0.01, 1), 6e-4), make_arm("b", noise(3, 0.01, 2), 1e-3)
    again = [make_run(f"a-{seed}-again", seed, 6e-4, shift) for seed, shift in enumerate(noise(3, 0.01, 1), start=1)]
    plain, doubled = pair_of(*ours, *theirs), pair_of(*ours, *theirs, *again)
    assert doubled.judged.is_paired
    for one, other in zip(plain.effects, doubled.effects, strict=True):
        if one.name in ("speed", "peak memory", "MFU, causal"):
            assert (len(one.first), len(other.first)) == (3, 6)
        else:
            assert one.verdict == other.verdict
    assert "3 and 3 runs, compared in pairs" in text_of(compare_runs([*ours, *theirs, *again]))
    assert "3 more with a seed that is among them" in text_of(compare_runs([*ours, *theirs, *again]))


def test_runs_that_diverged_are_an_outcome() -> None:
    ours = make_arm("a", noise(5, 0.01, 1), 6e-4)
    theirs = [make_run(f"b-{s}", s, 1e-3, state="failed: non-finite", updates=30) for s in range(1, 6)]
    pair = pair_of(*ours, *theirs)
    (effect,) = pair.effects
    assert effect.verdict is not None
    assert effect.verdict.word == "worse"
    assert "0 of 5 runs diverged before the change, 5 of 5 with it" in effect.verdict.sentence
    few = pair_of(ours[0], theirs[0])
    assert few.exit_code == 1, "one run each is no proof"


def test_the_endpoint_may_be_time() -> None:
    question = Question("seconds", 0.1)
    pair = pair_of(make_run("a"), make_run("b", lr=1e-3), question=question)
    assert "s of updates" in pair.effects[0].name


def test_a_loss_at_a_place_and_a_place_of_a_loss() -> None:
    curve = [(0.0, 5.0), (100.0, 4.0), (200.0, 4.5), (300.0, 3.0)]
    assert at(curve, 50.0) == 4.5
    assert at(curve, 300.0) == 3.0
    assert at(curve, 301.0) is None
    assert reach(curve, 4.0) == 100.0
    assert reach(curve, 3.5) == pytest.approx(266.6666667)
    assert reach(curve, 2.0) is None


def test_more_arms_than_two_are_each_compared_with_the_first() -> None:
    comparison = compare_runs([make_run("a"), make_run("b", lr=1e-3), make_run("c", lr=2e-3)])
    assert [(pair.first.name, pair.second.name) for pair in comparison.pairs] == [("A", "B"), ("A", "C")]


# --- noise floors ---


def test_one_run_each_is_told_apart_by_a_noise_floor_until_it_expires() -> None:
    seeds = make_arm("n", noise(5, 0.01, 1), 6e-4)
    runs_dir = Path(".runs")
    lone, near, far = make_run("a"), make_run("b", lr=1e-3, shift=0.005), make_run("c", lr=2e-3, shift=0.3)
    assert find_floor(runs_dir, read_run(lone)) is None
    keep_floor(runs_dir, [read_run(folder) for folder in seeds])
    words = {}
    for other in (near, far):
        (pair,) = compare_runs([lone, other], runs_dir=runs_dir).pairs
        assert pair.effects[0].verdict is not None
        words[other.run_id] = pair.effects[0].verdict.word
    assert words == {"b": "indistinguishable", "c": "larger than seed noise"}
    for folder in (lone, far):
        change(folder, record.SOURCE, "sha256", "0" * 64)
        close(folder)
    (pair,) = compare_runs([lone, far], runs_dir=runs_dir).pairs
    assert "has expired: other code" in pair.remark
    assert word_of(pair) == "one run each"


# --- runs that should be the same ---


def test_runs_that_should_be_the_same_part_where_and_because_of_what_they_part() -> None:
    first, same = make_run("a"), make_run("b")
    (parting,) = (parting for *_, parting in compare_runs([first, same]).partings)
    assert parting.is_same

    def parted(**wrong: Any) -> tuple[int | None, str]:
        rows = [json.loads(line) for line in first.file(record.METRICS).read_text("utf-8").splitlines()]
        for row in rows:
            if row["kind"] == "update" and row["update"] >= 17:
                row.update(wrong)
        same.file(record.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        close(same)
        comparison = compare_runs([first, same])
        assert comparison.exit_code == 0
        ((_, _, found),) = comparison.partings
        assert "part at update 17" in text_of(comparison)
        return found.update, found.cause

    assert parted(loss=1.0) == (17, "numerics")
    assert parted(grad_norm=1.0) == (17, "numerics")
    assert parted(loss=1.0, batch_sha256=OTHER) == (17, "data")
    change(same, record.CONFIG, "model initial_weights_sha256", OTHER)
    close(same)
    assert compare_runs([first, same]).partings[0][2].cause == "initial state"


# --- bad input ---


def test_what_is_no_comparison_is_refused() -> None:
    first = make_run("a")
    with pytest.raises(UserError, match="named twice"):
        compare_runs([first, first])
    with pytest.raises(UserError, match="at least two runs"):
        compare_runs([first])
    with pytest.raises(UserError, match="too many"):
        compare_runs([RunFolder(Path(f"runs/{number}")) for number in range(201)])
    other = make_run("b")
    other.file(record.CONFIG).write_text("{", "utf-8")
    with pytest.raises(LabError, match=r"b: cannot be compared: config\.json: damaged"):
        compare_runs([first, other])


def test_one_config_with_other_seeds_is_nothing_to_compare() -> None:
    comparison = compare_runs(make_arm("a", [0.0, 0.01], 6e-4))
    assert comparison.exit_code == 1
    assert "nothing to compare" in text_of(comparison)


def test_a_hundred_runs_are_compared() -> None:
    runs = [
        *make_arm("a", noise(50, 0.01, 1), 6e-4, updates=6, planned=6),
        *make_arm("b", noise(50, 0.01, 2), 1e-3, updates=6, planned=6),
    ]
    pair = pair_of(*runs)
    assert word_of(pair) in ("equivalent", "indistinguishable")


# --- the command ---


def test_the_command_compares_real_runs_and_says_how_in_its_exit_code() -> None:
    for name, rate in (("a1", "1e-2"), ("a2", "1e-2"), ("b1", "3e-2")):
        train_tiny("--new", "--run-id", name, "--set", f"optimizer.max_lr={rate}")
    same = run("compare", "a1", "a2")
    assert same.returncode == 1, same.stderr
    assert "the same bits in all 12 updates and in the last weights" in same.stdout
    one_each = run("compare", "a1", "b1")
    assert one_each.returncode == 1, one_each.stderr
    assert "Controlled: one change, optimizer.max_lr: 0.01 → 0.03" in one_each.stdout
    assert "comes with it: optimizer.min_lr: 0.001 → 0.003" in one_each.stdout
    assert "how much of it is noise, nobody can tell" in one_each.stdout
    said = json.loads(run("compare", "a1", "b1", "--json").stdout)
    assert said == json.loads(json.dumps(as_json(compare_runs([RunFolder(Path(".runs") / n) for n in ("a1", "b1")]))))
    for arguments, code, message in (
        (["a1"], 3, "at least two runs"),
        (["a1", "a1"], 3, "named twice"),
        (["a1", "nothing"], 3, "no such run"),
        (["a1", "b1", "--delta", "-1"], 3, "must be above 0"),
    ):
        done = run("compare", *arguments)
        assert done.returncode == code
        assert message in done.stderr
    text = TINY.read_text("utf-8")
    Path("other.json").write_text(text.replace('"tokens": 512}', '"tokens": 256}'), "utf-8")
    assert run("train", "--config", "other.json", "--new", "--run-id", "c1").returncode == 0
    refused = run("compare", "a1", "c1")
    assert refused.returncode == 2
    assert "Not comparable: validation data: " in refused.stdout
