"""The same flow on a machine of one's own over SSH, and in a folder here: nothing of the job is left, and it knows no
key."""

from __future__ import annotations

import getpass
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakepod import CHEAP_ENCRYPTION, SSHD
from lab import LOG, SECRET, Lab, log_lines, one_line, says
from processes import STEADY, Process, held

CONFIG = """\
Host gpu-box
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
"""
SERVER = (
    CHEAP_ENCRYPTION
    + """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""
)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.fixture
def gpu_box(tmp_path: Path) -> Iterator[Path]:
    """An SSH server on this machine, and the configuration with which it is called gpu-box."""
    folder, port = tmp_path / "ssh", free_port()
    folder.mkdir()
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    host_key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}")
    (folder / "config").write_text(CONFIG.format(port=port, folder=folder, user=getpass.getuser()))
    (folder / "sshd_config").write_text(SERVER.format(port=port, folder=folder))
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen([str(SSHD), "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield folder
    server.terminate()
    server.wait()


@pytest.fixture(params=["ssh", "local"])
def host(request: pytest.FixtureRequest, lab: Lab) -> Lab:
    """The lab, on a host that is there already."""
    lab.job["provider"] = request.param
    work = str(lab.folder / "volume")
    settings: dict[str, object] = {"work": work, "python": sys.executable}
    if request.param == "ssh":
        folder = request.getfixturevalue("gpu_box")
        settings.update(host="gpu-box", ssh_config=str(folder / "config"))
    lab.job["settings"] = {request.param: settings}
    return lab


def home(lab: Lab) -> Path:
    return lab.folder / ".runs" / str(lab.state["run"])


def left_behind(lab: Lab) -> list[str]:
    """Folders of runs, and processes that run in them."""
    volume = lab.folder / "volume"
    found = [path.name for path in volume.iterdir()]
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            found += [str(path)] if str(volume) in str(path.readlink()) else []
        except OSError:
            continue
    return found


def test_a_job_comes_home_and_leaves_nothing(host: Lab) -> None:
    outcome = host.run()
    assert outcome.code == 0, outcome
    assert host.verdicts == ("succeeded", "verified", "deleted_verified")
    assert log_lines(home(host) / "remote-log.txt") == ["hello", *LOG]
    assert (home(host) / "metrics.jsonl").read_text().count("\n") == 5
    assert left_behind(host) == []
    assert host.fake.requests == [], "nobody was asked for a machine"


def test_a_job_knows_no_key_but_those_that_its_step_names(host: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTHER_API_KEY", "AWS_SECRET", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "nobody-should-see-this")
    host.job["steps"][0]["run"] = "env; cat extra.txt"
    assert host.run().code == 0
    text = (home(host) / "remote-log.txt").read_text()
    assert "nobody-should-see-this" not in text
    assert "RUNPOD" not in text
    assert "MY_TOKEN" not in text.split("=== look ended")[0]


def test_a_job_that_fails(host: Lab) -> None:
    host.work("raise SystemExit(3)")
    assert host.run().code == 10
    assert host.verdicts == ("failed", "verified", "deleted_verified")
    assert left_behind(host) == []


def test_ctrl_c_ends_the_job_and_keeps_its_folder(host: Lab) -> None:
    host.work(STEADY.replace("0.05", "1"))
    process = Process(host, "-m", "experiment_runner", "run", "job.json")
    process.wait_for(lambda: any("line 1\n" in path.read_text() for path in host.folder.glob(".runpod/*/log.txt")))
    process.signal(signal.SIGINT)
    assert process.end()[0] == 130
    assert host.verdicts == ("cancelled", "verified", "stopped")
    assert (home(host) / "last-words.txt").exists()
    assert left_behind(host) == [host.state["run"]], "the folder, and no process"
    assert host.again("terminate").code == 10
    assert left_behind(host) == []


@pytest.mark.parametrize("phase", ["uploading", "running", "collecting", "deleting"])
def test_a_runner_that_is_killed_is_gone_on_from(phase: str, host: Lab) -> None:
    host.work(STEADY)
    process = held(host, phase, "before")
    process.signal(signal.SIGKILL)
    process.end()
    assert host.again("monitor").code == 0
    assert host.verdicts == ("succeeded", "verified", "deleted_verified")
    assert left_behind(host) == []


def test_terminate_ends_what_runs(host: Lab) -> None:
    host.work("import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nprint('line', flush=True)\ntime.sleep(600)")
    Process(host, "-m", "experiment_runner", "run", "job.json", "--detach").end()
    assert host.again("terminate", "--yes").code == 20
    assert left_behind(host) == []


def test_what_is_left_is_found_by_its_name(host: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    if host.job["provider"] == "ssh":
        pytest.skip("`ls --host` uses the user's own configuration")
    old = host.folder / ".runpod/local/exp-small-100-200-0123abcd"
    other = host.folder / ".runpod/local/data"
    old.mkdir(parents=True)
    other.mkdir()
    assert says(host.command("ls", "--provider", "local"), "exp-small-100-200-0123abcd")
    assert host.command("gc", "--provider", "local", "--yes").code == 0
    assert (old.exists(), other.exists()) == (False, True)


def test_a_host_whose_key_is_not_known_is_refused(lab: Lab, gpu_box: Path) -> None:
    (gpu_box / "known_hosts").write_text("")
    lab.job.update(provider="ssh", settings={"ssh": {"host": "gpu-box", "ssh_config": str(gpu_box / "config")}})
    outcome = lab.run()
    assert outcome.code == 50
    assert "Host key verification failed" in one_line(outcome.err)
    assert lab.verdicts == ("none", "none", "none")


def test_a_host_that_is_not_there(lab: Lab, gpu_box: Path) -> None:
    config = gpu_box / "config"
    config.write_text(CONFIG.format(port=free_port(), folder=gpu_box, user="nobody"))
    lab.job.update(provider="ssh", settings={"ssh": {"host": "gpu-box", "ssh_config": str(config)}})
    outcome = lab.run()
    assert outcome.code == 50
    assert "Connection refused" in one_line(outcome.err)
    assert SECRET not in outcome.out


def test_collect_fetches_what_a_running_job_has_now_and_does_not_wait_for_its_end(host: Lab) -> None:
    host.work("import time\nopen(f'{results}/answer.txt', 'w').close()\nprint('line', flush=True)\ntime.sleep(600)")
    process = Process(host, "-m", "experiment_runner", "run", "job.json")
    process.wait_for(lambda: any("line\n" in path.read_text() for path in host.folder.glob(".runpod/*/log.txt")))
    process.signal(signal.SIGKILL)
    process.end()
    assert host.again("collect").code == 20
    assert host.verdicts == ("running", "partial", "running")
    assert (home(host) / "answer.txt").exists()
    assert host.again("terminate", "--yes").code == 20
    assert left_behind(host) == []


LEFT_ITS_GROUP = """
import subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("line", flush=True)
"""


def test_what_left_its_group_ends_with_the_job(host: Lab) -> None:
    host.work(f"{LEFT_ITS_GROUP}\nopen(f'{{results}}/answer.txt', 'w').close()")
    assert host.run().code == 0
    assert left_behind(host) == []


def test_what_left_its_group_ends_with_the_machine(host: Lab) -> None:
    host.work(f"{LEFT_ITS_GROUP}\ntime.sleep(600)")
    process = Process(host, "-m", "experiment_runner", "run", "job.json")
    process.wait_for(lambda: any("line\n" in path.read_text() for path in host.folder.glob(".runpod/*/log.txt")))
    process.signal(signal.SIGKILL)
    process.end()
    assert len(left_behind(host)) == 3, "the folder, the step, and what it started"
    assert host.again("terminate", "--yes").code == 20
    assert left_behind(host) == []
