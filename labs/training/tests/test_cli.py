"""The commands as a person uses them: right input, wrong input, and a machine that gives out."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import TINY, run, train_tiny

from training_lab import cli
from training_lab.identity import identity_of
from training_lab.record import METRICS, SUMMARY, RunFolder, list_runs

FILES = {
    "config.json", "source.json", "source.zip", "environment.json", "data-manifest.json", "data-stats.json",
    "metrics.jsonl", "summary.json", "manifest.json", "checkpoint.pt", "checkpoints", "notes.md", "wandb.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tiny run; tests copy it before they change it."""
    runs = tmp_path_factory.mktemp("finished")
    train_tiny("--runs", str(runs))
    return list_runs(runs)[0].path


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> RunFolder:
    """A copy of the finished run under `.runs` of the current folder."""
    return RunFolder(Path(shutil.copytree(finished, tmp_path / ".runs" / finished.name)))


def test_a_run_leaves_exactly_the_promised_files(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} - {".lock"} == FILES


def test_the_record_says_what_ran_on_what_with_what_and_what_came_out(finished: Path) -> None:
    folder = RunFolder(finished)
    config, source = folder.read_json("config.json"), folder.read_json("source.json")
    assert config["origins"]["optimizer.max_lr"].endswith("tests/tiny.json")
    assert config["origins"]["optimizer.min_lr"] == "derived: a tenth of optimizer.max_lr"
    assert sum(group["values"] for group in config["model"]["optimizer_groups"]) == config["model"]["parameters"]
    assert source["sha256"] == identity_of(source["files"])
    assert "training_lab/engine.py" in source["files"]
    environment = folder.read_json("environment.json")["processes"][0]
    assert environment["num_threads"] == 1
    assert {"torch", "numpy"} <= environment["packages"].keys()
    manifest = folder.read_json("data-manifest.json")
    assert manifest["validation"]["identity"]
    summary = folder.read_json(SUMMARY)
    assert summary["state"] == "finished"
    assert summary["initial_loss"]["is_plausible"] is True
    rows = [json.loads(line) for line in folder.file(METRICS).read_text().splitlines()]
    updates = [row for row in rows if row["kind"] == "update"]
    assert [row["update"] for row in updates] == list(range(1, 13))
    wanted = {"loss", "lr", "grad_norm", "target_tokens", "seconds", "batch_sha256"}
    assert all(wanted <= row.keys() for row in updates)
    assert [row["update"] for row in rows if row["kind"] == "evaluation"] == [0, 4, 8, 12]
    assert summary["target_tokens"] == sum(row["target_tokens"] for row in updates)
    measured = updates[1:]  # measure.warmup_updates is 1
    expected = sum(row["target_tokens"] for row in measured) / sum(row["seconds"] for row in measured)
    assert summary["throughput"]["target_tokens_per_s"] == pytest.approx(expected)
    assert [entry["update"] for entry in summary["throughput"]["excluded"]] == [1]


def test_verify_finds_a_whole_run_good_and_replays_it_bit_for_bit(finished: Path) -> None:
    done = run("verify", str(finished), "--replay", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same bits") == 12
    assert "ok   weights after update 12" in done.stdout
    from_checkpoint = run("verify", str(finished), "--replay", "3", "--from", "9", "--batch", "2", "--json")
    findings = [json.loads(line) for line in from_checkpoint.stdout.splitlines()]
    assert [f["subject"] for f in findings if "replayed" in f["subject"]] == [
        f"replayed update {n}" for n in (10, 11, 12)
    ]
    assert [f["subject"] for f in findings if "batch" in f["subject"]] == ["batch of update 2"]
    assert all(f["is_good"] for f in findings)


def test_verify_names_what_is_missing_changed_or_new(copied: RunFolder) -> None:
    copied.file("environment.json").unlink()
    copied.file("source.json").write_text("{}")
    copied.file("extra.txt").write_text("mine")
    checkpoint = copied.file("checkpoints/update-000012/state.pt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    done = run("verify", copied.run_id)
    assert done.returncode == 1
    bad = [line for line in done.stdout.splitlines() if line.startswith("BAD")]
    subjects = {line.split(":")[0].removeprefix("BAD  ") for line in bad}
    expected = {"environment.json", "source.json", "extra.txt", "checkpoints/update-000012/state.pt", "checkpoint 12"}
    assert subjects - {"checkpoint.pt"} == expected


def test_verify_finds_a_loss_that_was_made_up(copied: RunFolder) -> None:
    lines = copied.file(METRICS).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        if row["kind"] == "update" and row["update"] == 5:
            row["loss"] = math.nextafter(row["loss"], 0)
            row["batch_sha256"] = "0" * 64
    copied.file(METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    copied.write_manifest()  # the forger thinks of the hashes too
    done = run("verify", copied.run_id, "--batch", "5", "--replay", "6", "--from", "0")
    assert done.returncode == 1
    assert "BAD  batch of update 5" in done.stdout
    assert "BAD  replayed update 5" in done.stdout
    assert "ok   replayed update 4" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "latest", "--batch", "13"), "the run has no such update; it has 1 to 12"),
        (("verify", "latest", "--replay", "13"), "can be replayed from update 0, 9, 12"),
        (("verify", "latest", "--replay", "1", "--from", "5"), "can be replayed from update 0, 9, 12"),
        (("verify", "latest", "--replay", "-1"), "must be 0 or more"),
        (("verify", "latest", "--from", "9"), "has no effect without --replay"),
        (("train", "--config", "smoke.cfg"), "smoke.cfg"),
        (("verify", "nonsense"), "no such run in .runs; the newest there is"),
        (("verify", "."), "not the folder of a run"),
        (("eval", "latest", "--update", "5"), "kept are those of update 9, 12"),
        (("sample", "latest", "--prompt", ""), "--prompt: must not be empty"),
        (("sample", "latest", "--prompt", "x", "--temperature", "-1"), "--temperature -1.0: must be at least 0"),
        (("sample", "latest", "--prompt", "x", "--temperature", "nan"), "--temperature nan: must be at least 0"),
        (("sample", "latest", "--prompt", "x", "--tokens", "0"), "--tokens 0: must be at least 1"),
        (("train", "--config", str(TINY), "--stop-after", "13"), "must be from 1 to train.updates = 12"),
        (("train", "--config", str(TINY), "--set", "train.device=cuda"), "cuda is not available"),
        (("train", "--config", str(TINY), "--set", "batch.tokens=10000000"), "needs 10,000,000 tokens, has "),
        (
            ("train", "--config", str(TINY), "--set", "data.source=files", "--set", 'data.paths=["gone.txt"]'),
            "gone.txt",
        ),
        (("train", "--config", str(TINY), "--set", "optimizer.max_lr=fast"), 'must be a number, got the text "fast"'),
    ],
)
def test_wrong_input_gets_one_line_and_2_and_changes_nothing(
    copied: RunFolder, arguments: tuple[str, ...], message: str
) -> None:
    before = sorted(copied.path.parent.rglob("*"))
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert [path for path in sorted(copied.path.parent.rglob("*")) if path.name != ".lock"] == [
        path for path in before if path.name != ".lock"
    ]


DAMAGES = [
    "{",
    "[]",
    "null",
    "3",
    "{}",
    '{"updates": "x"}',
    '{"identity": 1, "files": [], "processes": {}}',
    '{"processes": [3, {}]}',
]


@pytest.mark.parametrize(
    "name", ["config.json", "source.json", "environment.json", "data-manifest.json", "summary.json"]
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_the_record_is_named_without_a_traceback(copied: RunFolder, name: str, damage: str) -> None:
    copied.file(name).write_text(damage)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main(["verify", copied.run_id, "--replay", "1"])
    assert code == 1
    assert name in out.getvalue() + err.getvalue()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["runs"]) == 0
    assert copied.run_id in out.getvalue()


DEEPER = [
    ("data-manifest.json", {"identity": "x", "source": {"files": [3]}}),
    ("data-manifest.json", {"identity": "x", "source": {"files": 3}, "tokenizer": 4}),
    ("source.json", {"files": {"a": 1}}),
    ("metrics.jsonl", {"kind": "update"}),
    ("metrics.jsonl", {"kind": "update", "update": 1}),
]


@pytest.mark.parametrize(("name", "content"), DEEPER)
def test_damage_deeper_in_a_file_gives_no_traceback_either(copied: RunFolder, name: str, content: object) -> None:
    copied.file(name).write_text(json.dumps(content) + "\n")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["verify", copied.run_id, "--replay", "1"]) in (1, 2)  # 2: no row is left to replay
    assert "BAD" in out.getvalue()


def test_a_damaged_newest_checkpoint_is_named_when_an_older_one_is_used(copied: RunFolder) -> None:
    copied.file("checkpoints/update-000012/state.pt").write_bytes(b"")
    done = run("eval", copied.run_id)
    assert "after update 9" in done.stdout
    assert "update-000012: damaged" in done.stderr


def test_eval_measures_what_the_run_recorded(finished: Path) -> None:
    for update in ("12", "9"):
        done = run("eval", str(finished), "--update", update, "--json")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["update"] == int(update)
        assert result["is_as_recorded"] is (True if update == "12" else None)


@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_sample_streams_text_of_every_tokenizer_and_repeats_it_for_a_seed(tokenizer: str) -> None:
    words = ("--set", f"data.tokenizer={tokenizer}", "--set", "train.updates=2", "--set", "schedule.warmup_updates=0")
    train_tiny(*words)
    options = ("--prompt", "kera mos", "--tokens", "20", "--temperature", "0.8", "--top-k", "5")
    one, again, other = (run("sample", "latest", *options, "--seed", seed) for seed in ("1", "1", "2"))
    assert one.returncode == 0, one.stderr
    assert one.stdout.startswith("kera mos")
    assert one.stdout == again.stdout
    assert one.stdout != other.stdout
    if tokenizer == "char":
        refused = run("sample", "latest", "--prompt", "Zebra")
        assert refused.returncode == 2
        assert "no token for 'Z' (U+005A), 'b' (U+0062)" in refused.stderr


def test_korean_names_work_in_a_locale_that_knows_no_utf8(tmp_path: Path) -> None:
    words = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    folder = tmp_path / "글 모음"
    folder.mkdir()
    (folder / "이야기.txt").write_text(
        "\n\n".join(f"{i}번째 이야기에는 낱말이 몇 개 있다" for i in range(200)), encoding="utf-8"
    )
    base = {"extends": str(TINY), "purpose": "한국어", "data": {"source": "files", "paths": ["글 모음/*.txt"]}}
    (tmp_path / "설정.json").write_text(json.dumps(base, ensure_ascii=False), encoding="utf-8")
    options = ("--set", "data.documents=paragraph", "--set", "train.updates=2", "--set", "schedule.warmup_updates=0")
    done = run("train", "--config", "설정.json", "--runs", "실행", *options, env=words)
    assert done.returncode == 0, done.stderr
    assert "한국어" in done.stdout
    listed = run("runs", "--runs", "실행", env=words).stdout
    assert "설정-" in listed
    manifest = list_runs(tmp_path / "실행")[0].read_json("data-manifest.json")
    assert manifest["source"]["files"][0]["name"] == "글 모음/이야기.txt"
    sampled = run("sample", "latest", "--runs", "실행", "--prompt", "이야기", "--tokens", "3", env=words)
    assert sampled.stdout.startswith("이야기")


def test_runs_lists_newest_first_with_states(copied: RunFolder) -> None:
    train_tiny("--stop-after", "2", "--set", "train.seed=9")
    listed = json.loads(run("runs", "--json").stdout)
    assert [entry["state"] for entry in listed] == ["stopped", "finished"]
    assert listed[1]["run"] == copied.run_id
    table = run("runs").stdout
    assert "2/12" in table
    assert "12/12" in table
    assert "No runs in elsewhere" in run("runs", "--runs", "elsewhere").stdout


def test_the_json_lines_are_the_rows_of_the_metrics(finished: Path) -> None:
    lines = train_tiny("--set", "train.updates=4")
    assert lines[0]["kind"] == "begin"
    assert lines[-1]["kind"] == "end"
    (folder,) = list_runs(Path(".runs"))
    assert lines[1:-1] == [json.loads(line) for line in folder.file(METRICS).read_text().splitlines()]


def test_a_run_that_is_not_finite_stops_with_1_and_says_so_in_its_summary() -> None:
    words = ("--set", "optimizer.max_lr=1e30", "--set", "optimizer.grad_clip=0", "--set", "checkpoint.every=1")
    done = run("train", "--config", str(TINY), *words)
    assert done.returncode == 1
    (folder,) = list_runs(Path(".runs"))
    summary = folder.read_json(SUMMARY)
    assert summary["state"] == "failed: non-finite"
    assert summary["failure"]["update"] == summary["updates"] + 1
    assert "The optimizer step was not made" in done.stdout
    assert "Traceback" not in done.stderr
    assert run("verify", "latest").returncode == 0


def test_an_update_that_cannot_fit_is_refused_in_a_line_before_anything_is_made() -> None:
    done = run("train", "--config", str(TINY), "--set", "model.d_model=400000")
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: an update takes about [\d,]+ GiB of memory, and this machine has \d+ GiB: use a smaller model\n",
        done.stderr,
    )
    assert not Path(".runs").exists()


def test_running_out_of_memory_names_the_settings_to_change() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    words = (
        "--set",
        "data.synthetic_documents=2000",
        "--set",
        "batch.tokens=1000000",
        "--set",
        "data.val_fraction=0.05",
    )
    done = run("train", "--config", str(TINY), *words, preexec_fn=limit)
    assert done.returncode == 1, done.stderr
    assert "out of memory: raise batch.micro_batches from 1 to 2" in done.stdout
    (folder,) = list_runs(Path(".runs"))
    assert folder.read_json(SUMMARY)["state"] == "failed: out of memory"


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of its own of `size`; skips the test where it cannot be made."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small file system needs root"
)
def test_a_full_disk_ends_the_run_with_its_old_checkpoint_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "2m"):
        done = run("train", "--config", str(TINY), "--runs", "small", "--set", "checkpoint.keep_last=9")
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "No space left on device" in done.stdout + done.stderr
        assert re.search(r"update-0000\d\d: cannot be saved", done.stdout)
        (folder,) = list_runs(tmp_path / "small")
        assert run("eval", str(folder.path)).returncode == 0
