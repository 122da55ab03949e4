"""The fake provider does what the real one is said to do."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openapi
import pytest
from fakefaults import Reply
from fakepod import SSHD, FakePod
from fakerunpod import FakeRunPod

H100 = "NVIDIA H100 80GB HBM3"
DETACHED = "</dev/null >/dev/null 2>&1 & echo $!"

needs_sshd = pytest.mark.skipif(SSHD is None, reason="needs sshd (the package openssh-server)")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any


class Client:
    """As much of a client as the tests of the fake need."""

    def __init__(self, fake: FakeRunPod, tmp_path: Path) -> None:
        self.fake = fake
        self.folder = tmp_path
        self.mount = tmp_path / "workspace"
        self.private_key = tmp_path / "id"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.private_key], check=True)
        self.public_key = self.private_key.with_suffix(".pub").read_text().strip()

    def call(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, root: str | None = None
    ) -> Answer:
        url = urllib.parse.urlsplit(root or self.fake.url)
        connection = http.client.HTTPConnection(url.netloc, timeout=20)
        headers = {"User-Agent": "test", "Authorization": f"Bearer {key or self.fake.key}"}
        try:
            connection.request(method, url.path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        return Answer(response.status, dict(response.headers), json.loads(content) if content else None)

    def body(self, name: str = "one", **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "image": "runpod/pytorch",
            "gpu": {"id": H100, "count": 1},
            "disk": 20,
            "ports": ["22/tcp"],
            "env": {"PUBLIC_KEY": self.public_key},
            "mounts": {"persistent": {"size": 10, "path": str(self.mount)}},
        } | more

    def create(self, name: str = "one", **more: Any) -> str:
        answer = self.call("POST", "/pods", self.body(name, **more))
        assert answer.status == 201, answer
        return str(answer.body["id"])

    def running(self, pod_id: str) -> dict[str, Any]:
        """The pod, once it is running."""
        for _ in range(10):
            view: dict[str, Any] = self.call("GET", f"/pods/{pod_id}").body
            if view["status"] == "RUNNING":
                return view
        raise AssertionError(view)

    def all_listed(self) -> list[str]:
        ids, query = [], ""
        while True:
            body = self.call("GET", f"/pods{query}").body
            ids += [pod["id"] for pod in body["pods"]]
            if not body["pagination"]["hasNextPage"]:
                return ids
            query = f"?cursor={body['pagination']['nextCursor']}"

    def log(self, pod_id: str, stop: Callable[[list[dict[str, Any]]], bool], last_id: str = "") -> list[dict[str, Any]]:
        """Its log lines with their ids, until there are enough of them."""
        request = urllib.request.Request(
            f"{self.fake.url}/pods/{pod_id}/logs?source=container&tail=5000",
            headers={"User-Agent": "test", "Authorization": f"Bearer {self.fake.key}"}
            | ({"Last-Event-ID": last_id} if last_id else {}),
        )
        lines: list[dict[str, Any]] = []
        with urllib.request.urlopen(request, timeout=10) as response:
            event_id = ""
            while not stop(lines) and (raw := response.readline()):
                name, _, value = raw.decode().strip().partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data":
                    lines.append({"id": event_id} | json.loads(value))
        return lines

    def host_key(self, pod_id: str) -> str:
        """What the last container says of its key."""
        lines = self.log(pod_id, lambda lines: bool(lines) and "ready to use" in lines[-1]["line"])
        return fingerprint(lines)

    def ssh(self, view: dict[str, Any], command: str, host_key: str) -> str:
        """What the command says, from a host that has that key."""
        direct = view["ssh"]["direct"]
        known = self.folder / "known_hosts"
        scanned = ""
        for _ in range(100):
            scan = ["ssh-keyscan", "-T", "5", "-t", "ed25519", "-p", str(direct["port"]), direct["host"]]
            scanned = subprocess.run(scan, capture_output=True, encoding="utf-8").stdout.strip()
            if scanned:
                break
            time.sleep(0.05)
        known.write_text(f"pod {scanned.partition(' ')[2]}\n")
        seen = subprocess.run(["ssh-keygen", "-lf", known], capture_output=True, encoding="utf-8", check=True).stdout
        assert seen.split()[1] == host_key
        options = ["IdentitiesOnly=yes", "BatchMode=yes", "StrictHostKeyChecking=yes", "HostKeyAlias=pod"]
        options += [f"UserKnownHostsFile={known}", "GlobalKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        flags = [part for option in options for part in ("-o", option)]
        arguments = ["-F", "/dev/null", "-i", str(self.private_key), *flags, "-p", str(direct["port"])]
        target = f"{direct['username']}@{direct['host']}"
        done = subprocess.run(["ssh", *arguments, target, command], capture_output=True, encoding="utf-8", timeout=20)
        assert done.returncode == 0, done.stderr
        return done.stdout


def fingerprint(lines: list[dict[str, Any]]) -> str:
    """The one that was printed last."""
    return [str(line["line"]).split()[1] for line in lines if "(ED25519)" in line["line"]][-1]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeRunPod]:
    with FakeRunPod(tmp_path / "pods") as fake:
        yield fake
    assert fake.problems == []
    assert [pod.processes() for pod in fake.pods.values()] == [set() for _ in fake.pods]


@pytest.fixture
def client(fake: FakeRunPod, tmp_path: Path) -> Client:
    return Client(fake, tmp_path)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_committed_contract_is_the_needed_part_of_the_whole() -> None:
    document = openapi.whole()
    if document is None:
        pytest.skip(f"needs PyYAML and {openapi.YAML}")
    assert openapi.SUBSET.read_text(encoding="utf-8") == openapi.written(openapi.subset(document))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"bogus": 1}, "$.bogus"),
        ({"gpu": {"id": H100, "bogus": 1}}, "$.gpu.bogus"),
        ({"gpu": {"count": 1}}, "$.gpu.id"),
        ({"gpu": {"id": H100, "count": 0}}, "$.gpu.count"),
        ({"gpu": {"id": H100, "minCudaVersion": "12"}}, "$.gpu.minCudaVersion"),
        ({"name": ""}, "$.name"),
        ({"disk": "20"}, "$.disk"),
        ({"disk": True}, "$.disk"),
        ({"cloud": "secure"}, "$.cloud"),
        ({"env": {"A": 1}}, "$.env.A"),
        ({"mounts": {"persistent": {"size": 5, "path": "/w"}}}, "$.mounts.persistent.size"),
        ({"mounts": {"network": [{"volumeId": "v", "path": "/w"}] * 2}}, "$.mounts.network"),
        ({"registry": None}, ""),
        ({"image": None}, "$.image"),
    ],
)
@pytest.mark.parametrize("is_subset", [True, False])
def test_a_body_is_checked_by_either_contract(change: dict[str, Any], problem: str, is_subset: bool) -> None:
    subset = openapi.Contract(json.loads(openapi.SUBSET.read_text(encoding="utf-8")))
    contract = subset if is_subset else openapi.Contract.load()
    body = {"name": "one", "image": "x", "gpu": {"id": H100, "count": 1}, "disk": 20} | change
    problems = contract.check("CreatePodRequest", body)
    assert [line.partition(":")[0] for line in problems] == ([problem] if problem else [])


def test_a_body_needs_an_image_or_a_template() -> None:
    contract = openapi.Contract.load()
    assert contract.check("CreatePodRequest", {"name": "one"}) == ["$.image: required"]
    assert contract.check("CreatePodRequest", {"name": "one", "templateId": "t"}) == []


@needs_sshd
def test_a_pod_comes_to_run_and_can_be_used_over_ssh(client: Client) -> None:
    pod_id = client.create()
    seen = [client.call("GET", f"/pods/{pod_id}").body for _ in range(2)]
    assert [(view["status"], view["ssh"]["direct"] is None) for view in seen] == [
        ("STARTING", True),
        ("RUNNING", False),
    ]
    host_key = client.host_key(pod_id)
    assert client.ssh(seen[-1], "echo hello; echo $RUNPOD_API_KEY", host_key).split() == [
        "hello",
        f"pod-scoped-{pod_id}",
    ]
    assert client.fake.billing_now() == [pod_id]
    assert seen[-1]["cost"] == 2.99


@needs_sshd
def test_a_wrapped_start_is_really_run(client: Client) -> None:
    script = "echo wrapped; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; exec /start.sh"
    pod_id = client.create(entrypoint=["/bin/bash", "-c"], cmd=[script])
    view = client.running(pod_id)
    host_key = client.host_key(pod_id)
    assert client.fake.pod.container_log[0][2] == "wrapped"
    assert client.ssh(view, "pwd", host_key).strip() == str(client.fake.pod.container / "home")


@needs_sshd
def test_a_stop_keeps_the_mount_and_nothing_else(client: Client) -> None:
    pod_id = client.create()
    first = client.running(pod_id)
    first_key = client.host_key(pod_id)
    command = (
        f"echo kept > {client.mount}/file; echo lost > file; setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!"
    )
    pid = int(client.ssh(first, command, first_key))
    stripped = int(client.ssh(first, "setsid env -i /bin/sleep 600 </dev/null >/dev/null 2>&1 & echo $!", first_key))
    assert is_alive(pid)
    assert is_alive(stripped)

    stopped = client.call("POST", f"/pods/{pod_id}/action", {"action": "stop"}).body
    assert (stopped["status"], stopped["cost"], stopped["ssh"]["direct"]) == ("EXITED", 0, None)
    assert not is_alive(pid)
    assert not is_alive(stripped)
    assert client.fake.billing_now() == []
    assert client.call("POST", f"/pods/{pod_id}/action", {"action": "stop"}).status == 409
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", first["ssh"]["direct"]["port"]), timeout=5)

    assert client.call("POST", f"/pods/{pod_id}/action", {"action": "start"}).body["status"] == "PROVISIONING"
    second = client.running(pod_id)
    lines = client.log(pod_id, lambda lines: sum("ready to use" in line["line"] for line in lines) == 2)
    second_key = fingerprint(lines)
    assert second_key != first_key
    assert second["ssh"]["direct"]["port"] != first["ssh"]["direct"]["port"]
    assert client.ssh(second, f"cat {client.mount}/file; ls", second_key).split() == ["kept"]


@needs_sshd
def test_a_restart_wipes_the_container_and_keeps_the_port(client: Client) -> None:
    pod_id = client.create()
    first = client.running(pod_id)
    first_key = client.host_key(pod_id)
    pid = int(client.ssh(first, f"sleep 600 {DETACHED}", first_key))
    client.fake.pod.restart_container()
    assert not is_alive(pid)
    lines = client.log(pod_id, lambda lines: sum("ready to use" in line["line"] for line in lines) == 2)
    second_key = fingerprint(lines)
    assert second_key != first_key
    assert client.ssh(first, "echo again", second_key) == "again\n"


@needs_sshd
def test_a_deleted_pod_is_gone_with_its_mount(client: Client) -> None:
    client.fake.deleted_listed_polls = 1
    pod_id = client.create()
    client.running(pod_id)
    assert client.mount.is_dir()
    assert [client.call("DELETE", f"/pods/{pod_id}").status for _ in range(2)] == [204, 404]
    assert client.call("GET", f"/pods/{pod_id}").status == 404
    assert [client.all_listed(), client.all_listed()] == [[pod_id], []]
    assert not client.mount.exists()
    assert client.fake.pod.processes() == set()
    assert client.fake.pod.status == "TERMINATED"


@needs_sshd
@pytest.mark.parametrize("option", ["no_sshd", "silent", "wrong_host_key"])
def test_a_pod_can_be_broken(client: Client, option: str) -> None:
    client.fake.pod_options = {option: True}
    pod_id = client.create()
    view = client.running(pod_id)
    lines = client.log(pod_id, lambda lines: bool(lines) and "ready to use" in lines[-1]["line"])
    printed = [line["line"] for line in lines if "SHA256" in line["line"]]
    assert bool(printed) == (option != "silent")
    if option == "no_sshd":
        with socket.create_connection(("127.0.0.1", view["ssh"]["direct"]["port"]), timeout=5) as connection:
            assert connection.recv(100) == b""
    if option == "wrong_host_key":
        with pytest.raises(AssertionError):
            client.ssh(view, "true", printed[-1].split()[1])


def test_the_log_goes_on_after_the_last_line_that_was_seen(fake: FakeRunPod, client: Client) -> None:
    pod_id = client.create()
    for number in range(3):
        fake.pod.say(f"line {number}")
    first = client.log(pod_id, lambda lines: len(lines) == 2)
    timer = threading.Timer(0.2, fake.pod.say, ["line 3"])
    timer.start()
    rest = client.log(pod_id, lambda lines: len(lines) == 2, first[-1]["id"])
    timer.join()
    assert [line["line"] for line in first + rest] == [f"line {number}" for number in range(4)]
    deletion = threading.Timer(0.1, fake.delete, [pod_id])
    deletion.start()
    assert len(client.log(pod_id, lambda lines: False)) == 4
    deletion.join()


def test_the_default_user_agent_of_urllib_is_refused(fake: FakeRunPod) -> None:
    request = urllib.request.Request(f"{fake.url}/pods", headers={"Authorization": f"Bearer {fake.key}"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    with caught.value as refused:
        assert (refused.code, refused.read()) == (403, b"error code: 1010")


def test_only_the_key_of_the_account_is_taken(fake: FakeRunPod, client: Client) -> None:
    assert client.call("GET", "/pods", key="rpa_other").status == 401
    pod_id = client.create()
    assert client.call("GET", "/pods", key=f"pod-scoped-{pod_id}").status == 403
    query = {"query": f'mutation {{ podStop(input: {{podId: "{pod_id}"}}) {{ id desiredStatus }} }}'}
    assert client.call("POST", "", query, root=fake.graphql_url).status == 401
    stopped = client.call("POST", "", query, root=fake.graphql_url, key=f"pod-scoped-{pod_id}")
    assert stopped.body["data"]["podStop"]["desiredStatus"] == "EXITED"
    assert fake.pod.status == "EXITED"


@pytest.mark.parametrize(
    ("change", "status", "detail"),
    [
        ({"bogus": 1}, 422, "validation"),
        ({"cpu": {"id": "cpu5c", "vcpuCount": 2}}, 400, "exactly one"),
        ({"gpu": {"id": H100}}, 400, "no instances available"),
        ({"gpu": {"id": "H100", "count": 1}}, 400, "no longer any instances available"),
        ({"gpu": {"id": H100, "count": 1, "minCudaVersion": "13.0"}}, 400, "no longer any instances available"),
        (
            {"gpu": {"id": H100, "count": 1, "minCudaVersion": "12.6", "allowedCudaVersions": ["12.8"]}},
            400,
            "mutually exclusive",
        ),
        ({"mounts": {"network": [{"volumeId": "v", "path": "/w"}]}}, 404, "volume"),
    ],
)
def test_a_create_is_refused(client: Client, change: dict[str, Any], status: int, detail: str) -> None:
    answer = client.call("POST", "/pods", client.body(**change))
    assert answer.status == status
    assert detail in answer.body["detail"]
    assert client.fake.creates == 0


def test_faults_come_in_their_order_and_end(fake: FakeRunPod, client: Client) -> None:
    fake.script(
        "create",
        Reply(429, headers={"Retry-After": "1"}),
        Reply(500, perform=True),
        Reply(502, body="<html>", content_type="text/html"),
        Reply(drop=True),
    )
    limited = client.call("POST", "/pods", client.body())
    assert (limited.status, limited.headers["Retry-After"], fake.creates) == (429, "1", 0)
    assert (client.call("POST", "/pods", client.body()).status, fake.creates) == (500, 1)
    with pytest.raises(json.JSONDecodeError):
        client.call("POST", "/pods", client.body())
    with pytest.raises(http.client.RemoteDisconnected):
        client.call("POST", "/pods", client.body())
    client.create()
    assert fake.creates == 2
    fake.always("list", Reply(503))
    assert [client.call("GET", "/pods").status for _ in range(2)] == [503, 503]
    fake.never("list")
    assert len(client.all_listed()) == 2


def test_the_listing_comes_in_pages_newest_first_and_late(fake: FakeRunPod, client: Client) -> None:
    made = [client.create(str(number)) for number in range(5)]
    assert client.all_listed() == made[::-1]
    fake.create_listed_after_polls = 2
    late = client.create("late")
    assert client.call("GET", f"/pods/{late}").status == 404
    assert late not in client.all_listed()
    assert client.all_listed()[0] == late
    fake.status_override[late] = "HIBERNATING"
    assert client.call("GET", f"/pods/{late}").body["status"] == "HIBERNATING"
    assert client.call("GET", "/pods?cursor=foreign").status == 422


def test_the_catalog_says_what_there_is(fake: FakeRunPod, client: Client) -> None:
    plain = client.call("GET", f"/catalog/gpus/{urllib.parse.quote(H100)}").body
    assert plain["price"]["secure"] == 2.99
    assert "availability" not in plain
    assert client.call("GET", "/catalog/gpus?include=AVAILABILITY").status == 400
    gpus = client.call("GET", "/catalog/gpus?include=AVAILABILITY&product=POD&minCudaVersion=12.8").body["gpus"]
    assert {gpu["availability"] for gpu in gpus} == {"HIGH"}
    assert len(gpus) == len(fake.gpus)


def test_the_bill_grows_while_a_pod_is_not_stopped(fake: FakeRunPod, client: Client) -> None:
    pod_id = client.create()
    time.sleep(0.05)
    fake.stop(pod_id)
    billed = fake.billed_s(pod_id)
    assert billed >= 0.05
    time.sleep(0.05)
    assert fake.billed_s(pod_id) == billed
    records = client.call("GET", f"/billing/pods?podId={pod_id}").body["records"]
    assert [record["totalAmount"] for record in records] == [pytest.approx(billed * 2.99 / 3600)]
    assert client.call("GET", "/billing/pods?podId=other").body["records"] == []


def test_what_must_never_be_asked_for_is_kept(fake: FakeRunPod, client: Client) -> None:
    assert client.call("PUT", "/account/ssh-keys", {"keys": []}).status == 500
    assert client.call("PATCH", "/pods/one", {"name": "two"}).status == 500
    assert [request.method for request in fake.forbidden] == ["PUT", "PATCH"]


@needs_sshd
def test_a_network_mount_outlives_its_pod(tmp_path: Path) -> None:
    path = tmp_path / "volume"
    pod = FakePod({"mounts": {"network": [{"volumeId": "v", "path": str(path)}]}}, tmp_path / "pods")
    pod.start()
    (path / "file").write_text("kept")
    pod.delete()
    assert (path / "file").read_text() == "kept"
    assert not any((tmp_path / "pods").iterdir())
