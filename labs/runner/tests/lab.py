"""A small job, the fake that it runs on, and what must hold after every command, whatever went wrong."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fakerunpod import FakeRunPod

from experiment_runner.cli import main
from experiment_runner.providers.runpod_api import RunpodApi

SECRET = "a-secret-of-the-job-0123456789"
GPU = "NVIDIA H100 80GB HBM3"
SCRIPT = """\
import os, time
print("token", os.environ.get("MY_TOKEN"), flush=True)
results = os.environ["EXPERIMENT_RESULTS"]
with open(f"{results}/metrics.jsonl", "w") as file:
    for number in range(5):
        file.write(f'{{"number": {number}}}\\n')
        file.flush()
        print("line", number, flush=True)
        time.sleep(0.02)
open(f"{results}/answer.txt", "w").write("42\\n")
"""
LOG = ["token [secret removed]", *(f"line {number}" for number in range(5))]


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Lab:
    """A folder with a job, its provider, and the commands."""

    def __init__(self, folder: Path, fake: FakeRunPod) -> None:
        self.folder, self.fake = folder, fake
        self.others: list[str] = []
        """Pods in the account that are somebody else's business."""
        self.job: dict[str, Any] = {
            "name": "small",
            "provider": "runpod",
            "files": {"include": ["*.py"], "inline": {"extra.txt": "hello\n"}},
            "steps": [
                {
                    "name": "look",
                    "run": "cat extra.txt; test -z \"$(env | grep -E 'RUNPOD_|MY_TOKEN')\"",
                    "timeout": 20,
                },
                {"name": "work", "run": "exec python3 work.py", "timeout": 60, "secrets": ["MY_TOKEN"]},
            ],
            "results": {"required": ["answer.txt"], "live": ["*.jsonl"]},
            "limits": {"poll": 0.05, "silence": 4, "boot": 30, "kill_grace": 1, "reconnect": 20, "collect_grace": 60},
            "settings": {
                "runpod": {
                    "image": "image@sha256:0",
                    "gpus": [GPU],
                    "work": str(folder / "volume"),
                    "python": sys.executable,
                }
            },
        }
        (folder / "work.py").write_text(SCRIPT)

    @property
    def runpod(self) -> dict[str, Any]:
        """The job's settings for RunPod."""
        settings: dict[str, Any] = self.job["settings"]["runpod"]
        return settings

    def work(self, script: str) -> None:
        """Another script for the second step."""
        (self.folder / "work.py").write_text(f"import os\nresults = os.environ['EXPERIMENT_RESULTS']\n{script}\n")

    def run(self, *arguments: str) -> Outcome:
        """`run` on the job as it is now."""
        (self.folder / "job.json").write_text(json.dumps(self.job))
        return self.command("run", "job.json", *arguments)

    def command(self, *arguments: str) -> Outcome:
        """Any command, in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(arguments)
            except SystemExit as error:
                code = int(error.code or 0)
        outcome = Outcome(code, out.getvalue(), err.getvalue())
        self.check(outcome)
        return outcome

    def again(self, name: str, *arguments: str) -> Outcome:
        """A command that goes on with the run."""
        return self.command(name, str(self.state_path), *arguments)

    @property
    def state_path(self) -> Path:
        (path,) = (self.folder / ".runpod").glob("exp-*.json")
        return path

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.state_path.read_text())
        return state

    @property
    def verdicts(self) -> tuple[str, str, str]:
        """Of job, results and machine."""
        found = self.state["verdicts"]
        return found["job"], found["results"], found["resource"]

    @property
    def home(self) -> Path:
        """Where the results came to."""
        return self.folder / ".runs" / self.fake.pod.id

    def fake_api(self) -> RunpodApi:
        """The API as somebody else would call it."""
        return RunpodApi(self.fake.key, self.fake.url)

    def phases(self) -> list[str]:
        """The phases that the run went through."""
        events = (self.state_path.with_suffix("") / "events.jsonl").read_text().splitlines()
        return [event["phase"] for event in map(json.loads, events) if event["event"] == "phase"]

    def check(self, outcome: Outcome) -> None:
        """What must hold after every command."""
        fake = self.fake
        assert "Traceback" not in outcome.err, outcome.err
        assert fake.problems == []
        assert fake.forbidden == []
        assert fake.creates - len(self.others) <= 1, "never two machines for one run"
        if outcome.code == 0:
            assert set(fake.billing_now()) <= set(self.others)
        secrets = [fake.key.encode(), SECRET.encode(), *(pod.key.encode() for pod in fake.pods.values())]
        for request in fake.requests:
            assert not any(secret in request.body or secret in request.path.encode() for secret in secrets)
        said = (outcome.out + outcome.err).encode()
        assert not any(secret in said for secret in secrets)
        allowed = {"job.json", "work.py", ".env", "volume", ".runs", ".runpod", "fake", "bin", "recovered", "held"}
        assert {path.name for path in self.folder.iterdir()} <= allowed
        for path in files_below(self.folder):
            if path.name != ".env" and self.folder / "fake" not in path.parents:
                content = path.read_bytes()
                assert not any(secret in content for secret in secrets), path
        for path in (self.folder / ".runpod").glob("exp-*.json"):
            assert path.stat().st_mode & 0o077 == 0
        for record_path in (self.folder / ".runs").glob("*/remote.json"):
            for name, entry in json.loads(record_path.read_text())["results"].get("files", {}).items():
                content = (record_path.parent / name).read_bytes()
                assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"]), name

    def check_whole(self) -> None:
        """Everything of the small job came home, and the machine is gone."""
        assert self.verdicts == ("succeeded", "verified", "deleted_verified")
        assert (self.home / "answer.txt").read_text() == "42\n"
        assert (self.home / "metrics.jsonl").read_text().count("\n") == 5
        assert log_lines(self.home / "remote-log.txt") == ["hello", *LOG]
        assert self.fake.billing_now() == []


def files_below(folder: Path) -> Iterator[Path]:
    """Regular files; pipes and sockets would block."""
    for top, _, names in os.walk(folder):
        for name in names:
            path = Path(top, name)
            if path.is_file() and not path.is_symlink():
                yield path


def log_lines(path: Path) -> list[str]:
    """What the steps themselves printed."""
    return [line for line in path.read_text().splitlines() if not line.startswith("===")]


def one_line(error: str) -> str:
    """The line in which a command says what is wrong."""
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, error
    return lines[0]


def says(outcome: Outcome, pattern: str) -> bool:
    """Whether a command said something."""
    return re.search(pattern, outcome.out + outcome.err) is not None


def when_the_log_has(lab: Lab, text: str, action: Callable[[], object]) -> threading.Thread:
    """Does something as soon as the copy of the log here has a text."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for path in (lab.folder / ".runpod").glob("*/log.txt"):
                if text in path.read_text():
                    action()
                    return
            time.sleep(0.02)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@contextlib.contextmanager
def running_lab(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A lab in an empty folder, with its keys in the environment."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if re.search(r"KEY|TOKEN|RUNPOD", name)]:
        monkeypatch.delenv(name)
    with FakeRunPod(folder / "fake") as fake:
        monkeypatch.setenv("RUNPOD_API_KEY", fake.key)
        monkeypatch.setenv("RUNPOD_API_URL", fake.url)
        monkeypatch.setenv("MY_TOKEN", SECRET)
        yield Lab(folder, fake)
