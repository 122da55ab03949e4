"""A run while it goes: what is shown is what its folder says, whoever looks, whenever, on any terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import random
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_folders as folders
from folders import make_run
from rich.cells import cell_len
from tiny import TRAINING, run, start

from training_lab.braille import Curve, plot
from training_lab.record import METRICS, SUMMARY, WANDB, RunFolder
from training_lab.tracking import read_metrics, rows_of_kind
from training_lab.watch import Follower, Watched
from training_lab.watch_command import Lines, for_programs, view_lines


def update(number: int, **more: Any) -> dict[str, Any]:
    return {"kind": "update", "update": number, "loss": 5.0 - number / 100, "lr": 1e-3, "grad_norm": 1.0, "segment": 1,
            "target_tokens": 100, "seconds": 0.5, "memory_bytes": 2**30, **more}  # fmt: skip


def evaluation(number: int, val_loss: float | None) -> dict[str, Any]:
    return {"kind": "evaluation", "update": number, "val_loss": val_loss, "target_tokens": 10, "seconds": 0.1}


def resume(line: int) -> dict[str, Any]:
    return {"kind": "event", "event": "resume", "segment": 2, "from_update": 0, "supersedes_from_line": line}


def append(folder: RunFolder, *rows: dict[str, Any]) -> None:
    with open(folder.file(METRICS), "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def going(name: str = "run") -> RunFolder:
    """A run of 100 updates that says that it is running."""
    folder = make_run(name, state="running")
    values = {"purpose": "the question", "train": {"updates": 100}, "measure": {"warmup_updates": 2}}
    folder.write_json("config.json", {"name": "tiny", "values": values})
    return folder


def shown(folder: RunFolder, width: int = 100, height: int = 30) -> str:
    return "\n".join(line.plain for line in view_lines(Watched(folder).look(), width, height))


# --- what it says ---


def test_the_figures_are_the_records() -> None:
    folder = folders.finished()
    said, summary = for_programs(Watched(folder).look()), folder.read_json(SUMMARY)
    rows = read_metrics(folder.file(METRICS))
    last = rows_of_kind(rows, "update")[-1]
    assert (said["state"], said["has_ended"]) == ("finished", True)
    assert (said["updates"], said["loss"], said["lr"]) == (last["update"], last["loss"], last["lr"])
    assert said["val_loss"]["last"] == summary["val_loss"]["last"]
    assert said["val_loss"]["best"] == min(row["val_loss"] for row in rows_of_kind(rows, "evaluation"))
    assert said["throughput"]["target_tokens_per_s"] == summary["throughput"]["target_tokens_per_s"]
    assert said["planned_updates"] == summary["planned_updates"]


def test_the_speed_of_a_run_that_goes_leaves_out_its_warm_up_and_what_was_recorded() -> None:
    folder = going()
    append(folder, *(update(k, seconds=50.0) for k in (1, 2)))
    assert for_programs(Watched(folder).look())["throughput"]["target_tokens_per_s"] is None
    append(folder, update(3), update(4, seconds=99.0, observed="timeline"), update(5, target_tokens=300, seconds=1.5))
    speed = for_programs(Watched(folder).look())["throughput"]
    assert speed == {"target_tokens_per_s": pytest.approx(400 / 2.0), "of": "last 2 updates"}


def test_a_run_whose_process_is_gone_was_killed_and_one_that_trains_is_running() -> None:
    folder = going()
    append(folder, update(1))
    assert for_programs(Watched(folder).look())["state"] == "killed"
    with folder.lock():
        said = for_programs(Watched(folder).look())
    assert (said["state"], said["has_ended"]) == ("running", False)
    assert said["left_s"] == pytest.approx(99 * 0.5)


def test_a_run_without_a_row_and_one_that_is_silent_say_so() -> None:
    folder = going()
    with folder.lock():
        assert "no row yet" in shown(folder)
        append(folder, update(1))
        old = time.time() - 3600
        os.utime(folder.file(METRICS), (old, old))
        assert "nothing has come for 1h00m" in shown(folder)


def test_hostile_texts_are_texts() -> None:
    folder = going()
    values = {"purpose": "[red]not red[/]\x1b[31m\r\nnext", "train": {"updates": 3}}
    folder.write_json("config.json", {"name": "a\x07b", "values": values})
    append(folder, {"kind": "event", "event": "failure", "state": "failed", "message": "\x1b]0;title\x07 한글 [bold]"})
    text = shown(folder)
    assert "[red]not red[/]\\x1b[31m\\r\\nnext" in text
    assert not any(ord(character) < 32 and character != "\n" for character in text)


def test_a_damaged_line_is_told_and_the_rest_is_shown() -> None:
    folder = going()
    append(folder, update(1))
    with open(folder.file(METRICS), "a") as file:
        file.write("no json\n")
    append(folder, update(2))
    said = for_programs(Watched(folder).look())
    assert said["updates"] == 2
    assert any("metrics.jsonl:2: damaged line" in warning for warning in said["warnings"])


STRANGE: list[Any] = [None, True, "1", [], {}, -1, 0, 1e308, float("nan"), float("inf"), 10**400, "\x1b\ud800", 5e-324]


@pytest.mark.parametrize("seed", range(20))
def test_files_of_any_content_are_shown_as_far_as_they_can_be(seed: int) -> None:
    folder, chance = going(), random.Random(seed)
    rows: list[dict[str, Any]] = [
        *map(update, range(1, 9)),
        {"kind": "event", "event": "start", "segment": 1},
        {"kind": "event", "event": "failure", "state": "x", "message": "y"},
        {"kind": "event", "event": "end", "segment": 1, "elapsed_s": 1.0},
    ]
    for row in [*rows, evaluation(8, 1.0)]:
        for key in row.keys() - {"kind", "event", "update"}:
            row[key] = chance.choice(STRANGE) if chance.random() < 0.4 else row[key]
        with open(folder.file(METRICS), "a") as file:
            file.write(json.dumps(row) + "\n")
    append(folder, {"kind": "event", "event": "end", "segment": 1, "elapsed_s": 10**400})
    for name in ("config.json", SUMMARY, WANDB):
        keys = ("name", "values", "state", "updates", "planned_updates", "throughput", "failure", "mode", "url")
        content = {key: chance.choice([*STRANGE, {"message": "\x1b", "train": {"updates": 0}}]) for key in keys}
        folder.file(name).write_text(chance.choice([json.dumps(content), "[]", "{", ""]))
    seen = Watched(folder).look()
    assert json.loads(json.dumps(for_programs(seen), allow_nan=False))["updates"] == 8
    assert all(line.isprintable() for line in (*shown(folder).split("\n"), *Lines().about(seen)))


def test_the_summarys_speed_is_shown_once_it_speaks_of_the_last_update() -> None:
    folder = going()
    append(folder, update(1), update(2), update(3))
    for number, expected in ((2, 200.0), (3, 123.5)):
        said = {"target_tokens_per_s": 123.5, "measured_updates": 1}
        folder.write_json(SUMMARY, {"state": "running", "updates": number, "throughput": said})
        assert for_programs(Watched(folder).look())["throughput"]["target_tokens_per_s"] == expected


# --- who looks, and when ---


def history(seed: int) -> list[dict[str, Any]]:
    """Rows of a run that was killed and went on again and again."""
    chance, rows, at = random.Random(seed), [{"kind": "event", "event": "start", "segment": 1}], 0
    saved = [(0, 0)]
    for _ in range(120):
        if chance.random() < 0.05:
            at, line = chance.choice(saved)
            saved = [one for one in saved if one[0] <= at]
            rows.append(resume(line))
        at += 1
        rows.append(update(at, loss=chance.random()))
        if chance.random() < 0.2:
            rows.append(evaluation(at, chance.random()))
        if chance.random() < 0.2:
            saved.append((at, len(rows)))
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_who_follows_sees_what_a_fresh_reader_sees(seed: int) -> None:
    folder, chance = going(), random.Random(seed)
    follower = Follower(folder.file(METRICS), 0)
    rows = history(seed)
    while rows:
        number = chance.randrange(1, 9)
        append(folder, *rows[:number])
        del rows[:number]
        follower.read(sys.maxsize)
        counted = read_metrics(folder.file(METRICS))
        updates, evaluations = (rows_of_kind(counted, kind) for kind in ("update", "evaluation"))
        assert follower.tally.num_updates == len(updates)
        assert follower.tally.update.get("loss") == (updates[-1]["loss"] if updates else None)
        best = min((row["val_loss"] for row in evaluations), default=None)
        assert follower.tally.best.get("val_loss") == best
        assert follower.tally.update_s == pytest.approx(0.5 * len(updates))


@pytest.mark.parametrize("seed", range(6))
def test_a_line_that_is_read_before_its_end_is_counted_once(seed: int) -> None:
    folder, chance = going(), random.Random(seed)
    follower = Follower(folder.file(METRICS), 0)
    content = b"".join(json.dumps(row).encode() + b"\n" for row in history(seed))
    while content:
        number = chance.choice([1, 1, 2, 60, 300])  # often all of a line but for its end
        with open(folder.file(METRICS), "ab") as file:
            file.write(content[:number])
        content = content[number:]
        follower.read(sys.maxsize)
        assert follower.tally.num_rows == len(read_metrics(folder.file(METRICS)))


def test_a_file_that_was_replaced_or_cut_is_read_anew() -> None:
    folder = going()
    append(folder, *map(update, range(1, 10)))
    follower = Follower(folder.file(METRICS), 0)
    follower.read(sys.maxsize)
    rows = [update(number, seconds=2.0) for number in range(1, 21)]
    Path("other").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace("other", folder.file(METRICS))
    follower.read(sys.maxsize)
    assert (follower.tally.num_updates, follower.tally.update_s) == (20, 40.0)
    os.truncate(folder.file(METRICS), len("".join(json.dumps(row) + "\n" for row in rows[:4])))
    follower.read(sys.maxsize)
    assert (follower.tally.num_updates, follower.tally.update_s) == (4, 8.0)


def test_a_long_file_is_read_in_parts_and_only_once() -> None:
    folder = going()
    append(folder, *(update(k) for k in range(1, 3001)))
    follower = Follower(folder.file(METRICS), 0)
    shares = []
    while follower.share_read < 1:
        follower.read(50_000)
        shares.append(follower.share_read)
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert follower.tally.num_updates == 3000
    began = time.perf_counter()
    for _ in range(100):
        follower.read(sys.maxsize)
    assert time.perf_counter() - began < 1


# --- terminals ---


@pytest.mark.parametrize("width", [20, 40, 79, 120, 200])
@pytest.mark.parametrize("height", [4, 12, 30, 60])
def test_nothing_is_wider_or_higher_than_the_terminal(width: int, height: int) -> None:
    from rich.console import Console, Group

    for make in (folders.resumed, folders.failed, folders.hostile):
        lines = view_lines(Watched(make()).look(), width, height)
        out = io.StringIO()
        Console(width=width, file=out, highlight=False).print(Group(*lines))
        printed = out.getvalue().splitlines()
        assert len(printed) <= height
        assert max(map(cell_len, printed)) <= width


def test_a_curve_keeps_its_extremes_whatever_its_length_and_fills_its_place() -> None:
    curve = Curve()
    for x in range(100_000):
        curve.add(x, 500.0 if x == 77_777 else -3.0 if x == 5 else 1.0)
    assert max(bucket.high for bucket in curve.buckets) == 500
    assert min(bucket.low for bucket in curve.buckets) == -3
    lines = plot(curve.buckets, 60, 8)
    assert [len(line) for line in lines] == [60] * 8
    assert all(character == " " or 0x2800 < ord(character) <= 0x28FF for line in lines for character in line)
    assert {line.strip() != "" for line in (lines[0], lines[-1])} == {True}


# --- the command ---


def test_once_and_json_say_the_same_and_leave() -> None:
    folder = folders.finished()
    said = json.loads(run("watch", folder.run_id, "--json").stdout)
    assert said["updates"] == folder.read_json(SUMMARY)["updates"]
    once = run("watch", folder.run_id, "--once").stdout
    assert once.startswith(f"finished  {folder.run_id}")


def test_where_there_is_no_terminal_each_news_is_a_line_and_the_end_of_the_run_the_end() -> None:
    folder = going()
    with folder.lock():
        watching = start("watch", str(folder.path), "--interval", "0.05")
        for number in range(1, 6):
            append(folder, update(number))
            time.sleep(0.2)
        append(folder, {"kind": "event", "event": "checkpoint", "update": 5, "path": "checkpoints/5", "seconds": 1})
        folder.write_json(SUMMARY, {"state": "finished", "updates": 5})
    out, err = watching.communicate(timeout=30)
    assert (watching.returncode, err) == (0, "")
    assert out.splitlines()[0] == "Run run: running: the question"
    assert "saved checkpoints/5" in out
    assert out.splitlines()[-1] == "Run run: finished after 5/100 updates"


def test_a_folder_that_goes_away_ends_it_with_a_line() -> None:
    folder = going()
    append(folder, update(1))
    ready = threading.Event()

    def remove() -> None:
        ready.wait()
        time.sleep(1)
        for name in ("config.json", METRICS, SUMMARY):
            folder.file(name).unlink()

    removing = threading.Thread(target=remove)
    removing.start()
    with folder.lock():
        watching = start("watch", str(folder.path), "--interval", "0.05")
        assert watching.stdout is not None
        watching.stdout.readline()
        ready.set()
        _, err = watching.communicate(timeout=30)
    removing.join()
    assert (watching.returncode, err.count("\n")) == (1, 1)
    assert "has gone" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing",), "error: nothing: no such run"),
        (("run", "--runs", "runs", "--interval", "0"), "error: --interval 0: must be from 0.05"),
        (("run", "--runs", "runs", "--once", "--interval", "2"), "error: --interval 2: has no effect with --once"),
    ],
)
def test_wrong_input_is_one_line(words: tuple[str, ...], message: str) -> None:
    going()
    done = run("watch", *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(message)


def test_it_needs_no_torch() -> None:
    folder = folders.finished()
    script = f"""
import sys
from training_lab import cli
code = cli.main(["watch", {folder.run_id!r}, "--once"])
assert code == 0 and "torch" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={"PYTHONPATH": str(TRAINING)}, stdout=subprocess.PIPE
    )


# --- on a terminal ---


class Terminal:
    """A terminal of 24 lines with `watch` in it."""

    def __init__(self, *arguments: str) -> None:
        self.ours, self.its = pty.openpty()
        fcntl.ioctl(self.its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.modes = termios.tcgetattr(self.its)
        words = [sys.executable, "-m", "training_lab", "watch", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(TRAINING), "TERM": "xterm-256color"}
        its = self.its
        self.process = subprocess.Popen(
            words, env=environment, stdin=its, stdout=its, stderr=its, start_new_session=True
        )
        self.output = ""

    def read(self, timeout_s: float) -> bool:
        """Takes in what the process has written, if anything comes in time."""
        if not select.select([self.ours], [], [], timeout_s)[0]:
            return False
        self.output += os.read(self.ours, 100_000).decode("utf-8", "replace")
        return True

    def wait_for(self, text: str) -> None:
        while text not in self.output:
            assert self.read(30), self.output

    def end(self) -> int:
        """The exit code, once the process has ended and all that it wrote is in `output`."""
        until = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < until, self.output
            self.read(0.05)
        while self.read(0):
            pass
        return self.process.returncode

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.its)


LEAVE_SCREEN = "\x1b[?1049l"
WAYS_TO_LEAVE: dict[str, tuple[Callable[[Terminal], object], int]] = {
    "q": (lambda terminal: os.write(terminal.ours, b"xq"), 0),
    "Ctrl-C": (lambda terminal: terminal.process.send_signal(signal.SIGINT), 0),
    "SIGTERM": (lambda terminal: terminal.process.terminate(), 143),
}


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_who_leaves_finds_the_terminal_as_it_was(way: str) -> None:
    folder = going()
    append(folder, update(1))
    leave, code = WAYS_TO_LEAVE[way]
    with folder.lock(), Terminal(str(folder.path)) as terminal:
        terminal.wait_for("q leaves")
        assert termios.tcgetattr(terminal.its) != terminal.modes
        leave(terminal)
        assert terminal.end() == code
        assert termios.tcgetattr(terminal.its) == terminal.modes
    assert LEAVE_SCREEN in terminal.output
    assert "Traceback" not in terminal.output


def test_when_the_run_ends_its_view_stays_and_the_command_leaves() -> None:
    folder = going()
    append(folder, update(1))
    with Terminal(str(folder.path), "--interval", "0.1") as terminal:
        with folder.lock():
            terminal.wait_for("q leaves")
            append(folder, *map(update, range(2, 16)))
            folder.write_json(SUMMARY, {"state": "finished", "updates": 15, "planned_updates": 15})
        assert terminal.end() == 0
    stays = terminal.output.split(LEAVE_SCREEN)[1]
    assert "finished" in stays
    assert "15/15  100%" in stays
