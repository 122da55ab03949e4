"""Several machines do one job: they find one another, one that fails ends the others, and nothing is left or lost."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import Lab, Outcome, one_line, running_lab, says
from namespaces import ADDRESSES, NAMES, two_hosts, why_impossible
from processes import Process

from experiment_runner.errors import InputError
from experiment_runner.group import is_group, jobs_of, nodes_of
from experiment_runner.job import Job, job_from_json

MEET = """
import socket
rank, count = int(os.environ["EXPERIMENT_NODE_RANK"]), int(os.environ["EXPERIMENT_NODES"])
place = os.environ["EXPERIMENT_MASTER"], int(os.environ["EXPERIMENT_MASTER_PORT"])
if rank == 0:
    with socket.create_server(place) as server:
        other, address = server.accept()
        open(f"{results}/answer.txt", "w").write(f"{other.recv(100).decode()} from {address[0]}, of {count}")
        other.close()
else:
    for attempt in range(200):
        try:
            with socket.create_connection(place) as other:
                other.sendall(f"rank {rank}".encode())
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.05)
    open(f"{results}/own.txt", "w").write("stays there")
print("met", flush=True)
"""
WAIT = """
import signal, sys, time
rank = int(os.environ["EXPERIMENT_NODE_RANK"])
def polite(*_):
    open(f"{results}/last-words.txt", "w").write("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, polite)
print("waiting", flush=True)
"""


class Hosts:
    """A lab whose job is for two machines."""

    def __init__(self, lab: Lab, volume: Path, config: Path | None) -> None:
        """With an SSH configuration, they are gpu-a and gpu-b; without, two folders here, which is faster."""
        self.lab, self.volume, self.config = lab, volume, config
        self.names = NAMES if config else ("this machine", "this machine")
        nodes = [{"work": str(volume / name)} | ({"host": name} if config else {}) for name in NAMES]
        self.settings: dict[str, Any] = {"python": sys.executable, "nodes": nodes}
        if config:
            self.settings["ssh_config"] = str(config)
        provider = "ssh" if config else "local"
        lab.job.update(provider=provider, settings={provider: self.settings})

    @property
    def overview(self) -> Path:
        (path,) = (self.lab.folder / ".runpod").glob("group-*.json")
        return path

    def states(self) -> list[dict[str, Any]]:
        nodes = json.loads(self.overview.read_text())["nodes"]
        return [json.loads((self.overview.parent / node["state"]).read_text()) for node in nodes]

    def verdicts(self) -> list[tuple[str, ...]]:
        return [tuple(state["verdicts"].values()) for state in self.states()]

    def again(self, name: str, *arguments: str) -> Outcome:
        return self.lab.command(name, str(self.overview), *arguments)

    def begin(self) -> Process:
        return Process(self.lab, "-m", "experiment_runner", "run", "job.json")

    def are_waiting(self) -> bool:
        logs = list(self.lab.folder.glob(".runpod/exp-*/log.txt"))
        return sum("waiting" in path.read_text() for path in logs) == len(NAMES)

    def left_behind(self) -> list[str]:
        """Folders of runs, and processes that run in them."""
        found = [path.name for path in self.volume.glob("*/*")]
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                found += [str(path)] if str(self.volume) in str(path.readlink()) else []
        return found


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    reason = why_impossible()
    if reason:
        pytest.skip(reason)
    with two_hosts(tmp_path / "ssh") as config, running_lab(tmp_path / "here", monkeypatch) as lab:
        yield Hosts(lab, tmp_path / "there", config)


@pytest.fixture
def folders(tmp_path: Path, lab: Lab) -> Hosts:
    return Hosts(lab, tmp_path / "there", None)


def test_machines_find_one_another_and_the_first_brings_the_results(hosts: Hosts) -> None:
    hosts.lab.work(MEET)
    outcome = hosts.lab.run()
    assert outcome.code == 0, outcome
    assert hosts.verdicts() == [("succeeded", "verified", "deleted_verified")] * 2
    first, second = hosts.states()
    home = hosts.lab.folder / ".runs" / first["run"]
    assert (home / "answer.txt").read_text() == f"rank 1 from {ADDRESSES['gpu-b']}, of 2"
    assert [path.name for path in (hosts.lab.folder / ".runs").iterdir()] == [home.name]
    assert (second["results"]["files"], second["results"]["skipped"]) == ({}, {"own.txt": "excluded by the job"})
    assert "met" in (Path(second["output"]) / "remote-log.txt").read_text()
    for rank, name in enumerate(NAMES):
        assert f"[{rank} {name}] met\n" in outcome.out
    assert hosts.left_behind() == []


@pytest.mark.parametrize(("failing", "where"), [(0, "folders"), (1, "hosts")])
def test_one_that_fails_ends_the_others_and_is_named(failing: int, where: str, request: pytest.FixtureRequest) -> None:
    hosts: Hosts = request.getfixturevalue(where)
    hosts.lab.work(WAIT + f"time.sleep(0.5 if rank == {failing} else 600)\nraise SystemExit(3)")
    began = time.monotonic()
    outcome = hosts.lab.run()
    assert time.monotonic() - began < 30
    assert outcome.code == 10
    other = 1 - failing
    assert hosts.verdicts()[failing] == ("failed", "verified", "deleted_verified")
    assert hosts.verdicts()[other] == ("cancelled", "verified", "deleted_verified")
    name = hosts.names[failing]
    assert says(outcome, rf"failed first: node {failing} {name}: the step work ended with 3; its log is \S+/log.txt")
    assert hosts.left_behind() == []
    saved = hosts.lab.folder / ".runs" / hosts.states()[0]["run"] / "last-words.txt"
    assert saved.exists() == (failing == 1), "what the first had is here"


@pytest.mark.parametrize(("number", "where"), [(signal.SIGINT, "hosts"), (signal.SIGTERM, "folders")])
def test_a_signal_ends_all_and_keeps_their_folders(number: int, where: str, request: pytest.FixtureRequest) -> None:
    hosts: Hosts = request.getfixturevalue(where)
    hosts.lab.work(WAIT + "time.sleep(600)")
    process = hosts.begin()
    process.wait_for(hosts.are_waiting)
    process.signal(number)
    code, said = process.end()
    assert code == 130
    assert hosts.verdicts() == [("cancelled", "verified", "stopped")] * 2
    assert f"terminate {hosts.overview.relative_to(hosts.lab.folder)}" in said
    assert sorted(hosts.left_behind()) == sorted(state["run"] for state in hosts.states()), "folders, and no process"
    assert hosts.again("terminate").code == 10
    assert hosts.left_behind() == []


def test_a_launcher_that_is_killed_is_gone_on_from(folders: Hosts) -> None:
    go = folders.volume.parent / "go"
    folders.lab.job["env"] = {"GO": str(go)}
    folders.lab.work(
        WAIT + "while not os.path.exists(os.environ['GO']): time.sleep(0.05)\n"
        "open(f'{results}/answer.txt', 'w').write('42')"
    )
    process = folders.begin()
    process.wait_for(folders.are_waiting)
    process.signal(signal.SIGKILL)
    process.end()
    assert [verdicts[0] for verdicts in folders.verdicts()] == ["running", "running"]
    assert folders.again("collect").code == 20, "what exists now is here, and the jobs go on"
    go.touch()
    assert folders.again("monitor").code == 0
    assert folders.verdicts() == [("succeeded", "verified", "deleted_verified")] * 2
    assert folders.left_behind() == []


@pytest.mark.parametrize("act", ["stop", "terminate"])
def test_a_whole_group_is_ended_with_its_overview(act: str, folders: Hosts) -> None:
    folders.lab.work(WAIT + "time.sleep(600)")
    Process(folders.lab, "-m", "experiment_runner", "run", "job.json", "--detach").end()
    assert [verdicts[0] for verdicts in folders.verdicts()] == ["running", "running"]
    if act == "terminate":
        refused = folders.again("terminate")
        assert (refused.code, "--yes" in one_line(refused.err)) == (2, True)
    folders.again(act, *(["--yes"] * (act == "terminate")))
    left = [state["run"] for state in folders.states()] if act == "stop" else []
    assert sorted(folders.left_behind()) == sorted(left)


@pytest.mark.parametrize("wrong", ["unreachable", "no python", "no name", "taken port"])
def test_nothing_is_made_anywhere_if_one_host_is_not_as_it_should_be(wrong: str, hosts: Hosts) -> None:
    second = hosts.settings["nodes"][1]
    if wrong == "unreachable":
        second["host"] = "gpu-c.invalid"
    elif wrong == "no python":
        second["python"] = "/no/python"
    elif wrong == "no name":
        hosts.settings["master"] = "gpu-a.invalid"
    else:
        hosts.settings["master"] = ADDRESSES["gpu-b"]
    outcome = hosts.lab.run()
    assert outcome.code == 50
    reason = {
        "unreachable": "gpu-c.invalid: ",
        "no python": "gpu-b: .*/no/python",
        "no name": "gpu-a: does not know the name gpu-a.invalid.*gpu-b: does not know",
        "taken port": "gpu-a: cannot listen at 10.77.0.2, port 29500: Cannot assign requested address",
    }[wrong]
    assert says(outcome, rf"error: .*{reason}.*nothing was made on any machine")
    assert not (hosts.lab.folder / ".runpod").exists()
    assert not hosts.volume.exists()


def test_a_dry_run_names_the_machines_and_asks_none(hosts: Hosts) -> None:
    assert hosts.config is not None
    hosts.config.write_text(hosts.config.read_text().replace("ProxyCommand ", "ProxyCommand false "))
    outcome = hosts.lab.run("--dry-run")
    assert outcome.code == 0
    assert says(outcome, rf"nodes\n  0 gpu-a\n  1 gpu-b\n  they meet at {ADDRESSES['gpu-a']}, port 29500")


def local_job(nodes: object, **settings: object) -> Job:
    return job_from_json(
        {
            "name": "a-name-of-24-characters-",
            "files": {"inline": {"a": ""}},
            "steps": [{"name": "s", "run": "true"}],
            "results": {"required": ["answer.txt"]},
            "settings": {"local": {"nodes": nodes, **settings}},
        },
        "job.json",
    )


def test_each_machine_has_a_job_of_its_own_that_its_state_can_hold() -> None:
    job = local_job([{"work": "a"}, {"work": "b", "python": "python3.12"}], python="python3")
    first, second = jobs_of(job, nodes_of(job, "job.json"), "10.0.0.1")
    assert first.settings["local"] == {"work": "a", "python": "python3"}
    assert second.settings["local"] == {"work": "b", "python": "python3.12"}
    assert (first.name, second.name) == ("a-name-of-24-characte-n0", "a-name-of-24-characte-n1")
    assert (first.results.required, second.results.required) == (("answer.txt",), ())
    assert second.limits.stall < 1 < first.limits.stall, "whoever does not write may be silent"
    for one in (first, second):
        assert not is_group(one)
        assert job_from_json(json.loads(json.dumps(one.to_json())), "state") == one
    assert second.node.environment() == {
        "EXPERIMENT_NODES": "2",
        "EXPERIMENT_NODE_RANK": "1",
        "EXPERIMENT_MASTER": "10.0.0.1",
        "EXPERIMENT_MASTER_PORT": "29500",
    }


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"nodes": []}, "settings.local.nodes: names no machine"),
        ({"nodes": [{"work": "a"}, {"work": "a"}]}, r"settings.local.nodes\[1\]: is the same machine"),
        ({"nodes": [1]}, r"settings.local.nodes\[0\]: must be an object"),
        ({"nodes": [{}], "master_port": 0}, "settings.local.master_port: must be from 1"),
    ],
)
def test_wrong_nodes_are_named(settings: dict[str, Any], error: str) -> None:
    job = local_job(**settings)
    with pytest.raises(InputError, match=rf"^job.json: {error}"):
        nodes_of(job, "job.json")


def test_rented_pods_are_no_group(lab: Lab) -> None:
    lab.runpod["nodes"] = [{}, {}]
    outcome = lab.run()
    assert outcome.code == 2
    assert "several machines are for ssh and local, not runpod" in one_line(outcome.err)
    assert lab.fake.creates == 0


def test_a_job_on_one_machine_is_the_first_of_one(lab: Lab) -> None:
    lab.job.update(provider="local", settings={"local": {"work": str(lab.folder / "volume"), "python": sys.executable}})
    lab.work("print(*(os.environ[f'EXPERIMENT_{k}'] for k in ('NODES', 'NODE_RANK', 'MASTER')), flush=True)\n"
             "open(f'{results}/answer.txt', 'w').close()")  # fmt: skip
    outcome = lab.run()
    assert outcome.code == 0
    assert says(outcome, r"\n1 0 127\.0\.0\.1\n")


def test_a_damaged_overview_is_named(lab: Lab) -> None:
    path = lab.folder / ".runpod/group-x.json"
    path.parent.mkdir()
    for text, error in (('{"group": "x", "schema": 1}', "damaged"), ('{"group": "x", "schema": 2}', "of version 2")):
        path.write_text(text)
        outcome = lab.command("monitor", str(path))
        assert (outcome.code, error in one_line(outcome.err)) == (2, True)
