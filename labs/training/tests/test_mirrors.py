"""Whatever becomes of a mirror, the training is the same, its end comes in time, and `wandb.json` says what happened.

Real trainings, with the real wandb against a server on this machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fakewandb import KEY, FakeWandb
from tiny import TINY, TRAINING, run, start

from training_lab.record import RunFolder, list_runs
from training_lab.tracking import read_metrics, rows_of_kind

TIMEOUT_S = 4
LONG = ("--set", "train.updates=250", "--set", "checkpoint.every=25", "--set", "eval.every=50")


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, no netrc, no settings of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("no_proxy", "*")


class Done(NamedTuple):
    """A training that ended."""

    folder: RunFolder
    seconds: float
    out: str

    @property
    def weights(self) -> str:
        weights: str = self.folder.read_json("summary.json")["weights_sha256"]
        return weights

    @property
    def wandb(self) -> dict[str, Any]:
        return self.folder.read_json("wandb.json")


def settings(wandb: str) -> list[str]:
    return ["--config", str(TINY), "--set", f"tracking.wandb={wandb}", "--set", f"tracking.timeout_s={TIMEOUT_S}"]


def train(wandb: str, *words: str, **options: Any) -> Done:
    """A training of the tiny config in the current folder."""
    began = time.monotonic()
    done = run("train", *settings(wandb), *words, **options)
    assert done.returncode == 0, done.stderr
    return Done(list_runs(Path(".runs"))[0], time.monotonic() - began, done.stdout)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """The same trainings without any mirror, each made once."""
    made: dict[tuple[str, ...], Done] = {}

    def without_mirror(*words: str) -> Done:
        if words not in made:
            runs = tmp_path_factory.mktemp("reference")
            done = run("train", *settings("off"), *words, "--runs", str(runs))
            assert done.returncode == 0, done.stderr
            made[words] = Done(list_runs(runs)[0], 0.0, done.stdout)
        return made[words]

    return without_mirror


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    """A W&B server, and a key for it."""
    with FakeWandb() as running:
        monkeypatch.setenv("WANDB_BASE_URL", running.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield running


def files_with(text: bytes, where: Path) -> list[str]:
    return [str(path) for path in where.rglob("*") if path.is_file() and text in path.read_bytes()]


def offline_rows(done: Done) -> list[dict[str, Any]]:
    """The history of the one offline run, by wandb's own reader."""
    (file,) = (done.folder.path.parent / ".wandb" / done.folder.run_id).rglob("*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    read = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = []
    for record in map(json.loads, read.stdout.splitlines()):
        if record.get("type") == "history":
            rows.append(flat(record))
    return rows


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """A history record as name and value."""
    items = record.get("data", record).get("history", record.get("data", record))
    items = items.get("item", items.get("items", items))
    if isinstance(items, list):
        names = ("/".join(item.get("nestedKey") or item.get("nested_key") or [item.get("key", "")]) for item in items)
        values = (json.loads(item.get("valueJson") or item.get("value_json")) for item in items)
        return dict(zip(names, values, strict=True))
    return dict(items)


def test_nothing_is_started_where_all_is_off(reference: Callable[..., Done]) -> None:
    off = reference()
    assert off.wandb["mode"] == off.wandb["state"] == "off"
    assert off.wandb["reason"] == "switched off by tracking.wandb"
    assert not (off.folder.path.parent / ".wandb").exists()


def test_without_wandb_the_metrics_are_all_there_is(tmp_path: Path, reference: Callable[..., Done]) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/sitecustomize.py").write_text("import sys\nsys.modules['wandb'] = None\n")
    path = os.pathsep.join([str(TRAINING), str(tmp_path / "blocked")])
    done = train("auto", env={"PYTHONPATH": path})
    assert done.weights == reference().weights
    assert done.wandb["mode"] == "off"
    assert "wandb is not installed (pip install" in done.wandb["reason"]
    refused = run("train", *settings("online"), env={"PYTHONPATH": path})
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_offline_holds_every_update_once_for_wandbs_own_reader(reference: Callable[..., Done]) -> None:
    train("auto", "--stop-after", "5")
    done = train("auto")
    assert done.weights == reference().weights
    assert (done.wandb["mode"], done.wandb["state"], done.wandb["last_update"]) == ("offline", "complete", 12)
    assert done.wandb["reason"].startswith("there is no key")
    assert done.wandb["sync_command"].startswith("wandb sync --yes ")
    rows = offline_rows(done)
    recorded = rows_of_kind(read_metrics(done.folder.file("metrics.jsonl")), "update")
    losses = [(row["update"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(row["update"], row["loss"]) for row in recorded]
    assert [row["update"] for row in rows if "val/loss" in row] == [0, 4, 8, 12]
    pushed = run("wandb", "push", "latest", "--mode", "offline")
    assert pushed.returncode == 0, pushed.stderr
    assert len(offline_rows(done)) == len(rows)
    assert Path(done.wandb["sync_command"].split()[-1]).is_dir()
    assert done.wandb["sync_command"] in pushed.stdout
    assert str(Path.cwd()) not in done.folder.file("wandb.json").read_text(), "it holds wherever the runs are taken"


def test_online_goes_on_with_the_same_run_without_dropped_or_doubled_rows(
    server: FakeWandb, reference: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    monkeypatch.setenv("TMPDIR", str(aside))
    train("auto", "--stop-after", "7")
    done = train("auto")
    assert done.weights == reference().weights
    (wandb_run,) = server.rows
    assert wandb_run == done.wandb["id"]
    assert server.updates(wandb_run) == list(range(1, 13))
    assert server.updates(wandb_run, "val/loss") == [0, 4, 8, 12]
    assert server.exit_codes == {wandb_run: 0}
    assert done.wandb["state"] == "complete"
    assert done.wandb["url"].startswith(server.url)
    assert KEY.encode() not in server.received
    assert files_with(KEY.encode(), Path(".runs")) == []
    assert [path.name for path in aside.iterdir() if "wandb" in path.name or "mirror" in path.name] == []


@pytest.mark.parametrize("fault", ["401", "500", "hang at init", "hang at finish", "403 for rows"])
def test_a_server_that_fails_costs_its_timeout_at_the_most(
    fault: str, server: FakeWandb, reference: Callable[..., Done]
) -> None:
    server.fault = fault
    done = train("online")
    assert done.weights == reference().weights
    assert done.wandb["state"] in ("degraded", "incomplete")
    assert done.wandb["message"]
    closing = done.seconds - done.folder.read_json("summary.json")["last_process"]["elapsed_s"]
    assert closing < TIMEOUT_S + 5
    assert f"wandb push {done.folder.run_id}" in done.out
    assert run("verify", done.folder.run_id).returncode == 0


def test_a_server_that_is_not_there_is_told_and_the_run_can_be_sent_later(
    monkeypatch: pytest.MonkeyPatch, reference: Callable[..., Done]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    done = train("online")
    assert done.weights == reference().weights
    assert done.wandb["state"] in ("degraded", "incomplete")
    with FakeWandb() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        pushed = run("wandb", "push", "latest")
        assert pushed.returncode == 0, pushed.stderr
        (wandb_run,) = server.rows
        assert server.updates(wandb_run) == list(range(1, 13))
    assert done.wandb["state"] == "complete"
    assert done.wandb["id"] == wandb_run != done.folder.run_id
    assert run("verify", done.folder.run_id).returncode == 0


def processes_of(words: str) -> list[int]:
    """The processes whose command line has these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if re.search(words, path.read_bytes().replace(b"\0", b" ").decode(errors="replace")):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_mirror_whose_core_is_killed_is_given_up(server: FakeWandb, reference: Callable[..., Done]) -> None:
    process = start("train", *settings("online"), *LONG)
    here = re.escape(str(Path.cwd()))
    deadline = time.monotonic() + 30
    cores: list[int] = []
    while not cores and time.monotonic() < deadline:
        followers = processes_of(f"training_lab.mirrors.follow {here}")
        cores = [core for follower in followers for core in processes_of(f"wandb-core .*--pid {follower}( |$)")]
        time.sleep(0.05)
    (core,) = cores
    time.sleep(1)
    os.kill(core, signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    done = Done(list_runs(Path(".runs"))[0], 0.0, out)
    assert done.weights == reference(*LONG).weights
    assert done.wandb["state"] == "degraded"
    assert "wandb push" in out


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_trainer_that_is_killed_is_mirrored_to_its_end_and_goes_on(
    server: FakeWandb, reference: Callable[..., Done]
) -> None:
    process = start("train", *settings("online"), *LONG)
    while not (found := list_runs(Path(".runs"))) or not found[0].file("metrics.jsonl").exists():
        time.sleep(0.05)
    (folder,) = found
    while folder.file("metrics.jsonl").read_bytes().count(b'"kind": "update"') < 80:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    before = len(rows_of_kind(read_metrics(folder.file("metrics.jsonl")), "update"))
    deadline = time.monotonic() + 20
    while RunFolder(folder.path).read_json("wandb.json")["state"] == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    wandb_run = RunFolder(folder.path).read_json("wandb.json")["id"]
    assert server.updates(wandb_run) == list(range(1, before + 1))
    assert server.exit_codes == {wandb_run: 1}
    done = train("online", *LONG)
    assert done.folder.path == folder.path
    assert done.weights == reference(*LONG).weights
    assert server.updates(wandb_run) == list(range(1, 251))
    assert server.exit_codes == {wandb_run: 0}
    assert processes_of(f"training_lab.mirrors.follow {re.escape(str(Path.cwd()))}") == []


def test_tensorboard_and_csv_hold_every_update_once(reference: Callable[..., Done]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    mirrored = ("--set", "tracking.tensorboard=true", "--set", "tracking.csv=true")
    train("off", *mirrored, "--stop-after", "5")
    done = train("off", *mirrored)
    assert done.weights == reference().weights
    events = EventAccumulator(str(done.folder.file("tensorboard")), size_guidance={"tensors": 0})
    events.Reload()
    losses = {event.step: float(tensor_util.make_ndarray(event.tensor_proto)) for event in events.Tensors("train/loss")}
    rows = rows_of_kind(read_metrics(done.folder.file("metrics.jsonl")), "update")
    assert losses == pytest.approx({row["update"]: row["loss"] for row in rows}, rel=1e-6)
    assert done.folder.file("metrics.csv").read_text() == run("csv", "latest").stdout
    assert len(done.folder.file("metrics.csv").read_text().splitlines()) == 1 + 13
