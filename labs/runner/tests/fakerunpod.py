"""The provider's API on this machine, as its description and its users tell of it, with every fault on demand.

What it answers is checked against that description; what it does wrong by itself is in `problems`.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import datetime
import http
import http.client
import http.server
import itertools
import json
import re
import secrets
import socket
import string
import sys
import threading
import time
import urllib.parse
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from fakepod import USER, FakePod
from openapi import Contract

LARGEST_BODY = 102_400
NO_INSTANCES = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)
ADVANCES = ("PROVISIONING", "STARTING", "RUNNING")
IDLE = ("EXITED", "TERMINATED")
"""States in which no GPU is billed."""

ACTIONS: dict[str, list[str]] = {
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
}

LIMITS = {
    "RateLimit": '"minute";r=59;t=42, "hour";r=2800;t=1812, "day";r=49500;t=45012',
    "RateLimit-Policy": '"minute";q=60;w=60, "hour";q=3000;w=3600, "day";q=50000;w=86400',
}
SSE_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
    "Transfer-Encoding": "chunked",
}


def _gpu(gpu_id: str, memory: int, secure: float, community: float | None) -> dict[str, Any]:
    return {
        "id": gpu_id,
        "name": gpu_id.removeprefix("NVIDIA ").removeprefix("GeForce "),
        "pool": None,
        "manufacturer": "NVIDIA",
        "memory": memory,
        "secure": True,
        "community": community is not None,
        "price": {"secure": secure, "community": community or 0},
        "maxCount": {"secure": 8, "community": 8 if community else 0},
        "availability": "HIGH",
        "dataCenters": [{"id": "US-KS-2", "name": "US Kansas 2", "availability": "HIGH"}],
        "cudaVersions": [{"version": version, "available": True} for version in ("12.8", "12.6")],
    }


GPUS = [
    _gpu("NVIDIA H100 80GB HBM3", 80, 2.99, 2.69),
    _gpu("NVIDIA H100 PCIe", 80, 2.39, 1.99),
    _gpu("NVIDIA H200", 141, 3.99, None),
    _gpu("NVIDIA GeForce RTX 4090", 24, 0.69, 0.34),
    _gpu("NVIDIA A40", 48, 0.4, None),
    _gpu("NVIDIA A100 80GB PCIe", 80, 1.64, 1.19),
]


@dataclass(frozen=True)
class Reply:
    """One answer in place of the normal one; with status 0 the normal one."""

    status: int = 0
    detail: str = ""
    title: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    """Sent as it is where it is a text or bytes, else as JSON."""
    content_type: str | None = None
    perform: bool = False
    """What was asked for is really done first, before the delay; without it and with status 0 it is done after it."""
    delay_s: float = 0.0
    drop: bool = False
    """The connection is closed without an answer."""


class Request(NamedTuple):
    method: str
    path: str
    """With its query."""
    headers: dict[str, str]
    """Their names in small letters."""
    body: bytes


@dataclass
class _Answer:
    status: int
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    log_of: FakePod | None = None
    """Its log follows, from these lines on."""
    sources: tuple[str, ...] = ()
    after: int = 0
    drop: bool = False


class _ProblemError(Exception):
    """A request that the provider refuses."""

    def __init__(self, status: int, detail: str, errors: list[str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.errors = status, detail, errors


@dataclass(eq=False)
class _Record:
    """What the provider knows of a pod, beside the pod itself."""

    pod: FakePod
    number: int
    rate: float
    created_at: datetime.datetime
    hidden_polls: int
    started_at: datetime.datetime | None = None
    polls: int = 0
    shown_polls: int = 0
    """For so many calls a deleted pod is still found."""
    listed_polls: int = 0
    is_listed: bool = True
    """In the listing that is being paged through."""
    billed_s: float = 0.0
    bills_since: float | None = None
    old_port: int = 0
    old_port_polls: int = 0

    @property
    def is_gone(self) -> bool:
        return self.pod.status == "TERMINATED"

    def enter(self, status: str) -> None:
        now = time.monotonic()
        if self.bills_since is not None:
            self.billed_s += now - self.bills_since
        self.pod.status = status
        self.bills_since = None if status in IDLE else now


class FakeRunPod:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = "rpa_" + "".join(secrets.choice(string.ascii_letters) for _ in range(40))
        self.gpus: dict[str, dict[str, Any]] = {gpu["id"]: copy.deepcopy(gpu) for gpu in GPUS}
        """The catalog, with all that it says where availability is asked for; nothing is got of NONE."""
        self.network_volumes: set[str] = set()
        self.page_size = 2
        self.polls_per_status = 1
        self.stuck_at = ""
        """Every pod stays at this status; at once where none comes by it by itself."""
        self.status_override: dict[str, str] = {}
        """By the id of the pod, or `*` for all."""
        self.price_override: float | None = None
        """What a pod costs per hour, whatever the catalog says."""
        self.data_center: str | None = None
        """Where pods come to be, whatever was asked for."""
        self.create_listed_after_polls = 0
        self.deleted_listed_polls = 0
        self.deleted_get_polls = 0
        self.old_port_polls = 0
        """For so many calls a pod that was started again is shown with the port it had before."""
        self.pod_options: dict[str, Any] = {}
        """What new pods are made with, such as `no_sshd`."""
        self.requests: list[Request] = []
        self.forbidden: list[Request] = []
        self.problems: list[str] = []
        self.creates = 0
        self.pods: dict[str, FakePod] = {}
        self.is_closed = threading.Event()
        self._contract = Contract.load()
        self._records: dict[str, _Record] = {}
        self._lock = threading.RLock()
        self._scripts: defaultdict[str, deque[Reply]] = defaultdict(deque)
        self._always: dict[str, Reply] = {}
        self._request_numbers = itertools.count(1)
        self._server = _Server(self)
        root = f"http://127.0.0.1:{self._server.server_port}"
        self.url, self.graphql_url = f"{root}/v2", f"{root}/graphql"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeRunPod:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server and everything that runs in a pod."""
        if self.is_closed.is_set():
            return
        self.is_closed.set()
        self._server.shutdown()
        self._thread.join()
        with self._lock:
            for pod in self.pods.values():
                pod.close()
        self._server.end_connections()
        self._server.server_close()

    # What a test sets and sees.

    def script(self, operation: str, *replies: Reply) -> None:
        """The next calls of the operation get these, one each."""
        self._scripts[operation].extend(replies)

    def always(self, operation: str, reply: Reply) -> None:
        self._always[operation] = reply

    def never(self, operation: str) -> None:
        """Ends what `script` and `always` asked of the operation."""
        self._always.pop(operation, None)
        self._scripts.pop(operation, None)

    @property
    def pod(self) -> FakePod:
        """The only pod there ever was."""
        (pod,) = self.pods.values()
        return pod

    def billing_now(self) -> list[str]:
        """The pods whose GPUs are billed for at this moment."""
        with self._lock:
            return [pod_id for pod_id, record in self._records.items() if record.bills_since is not None]

    def billed_s(self, pod_id: str) -> float:
        """For so many seconds the pod's GPUs were billed until now."""
        record = self._records[pod_id]
        return record.billed_s + (time.monotonic() - record.bills_since if record.bills_since is not None else 0)

    # What also somebody at the console can do to a pod.

    def stop(self, pod_id: str) -> None:
        with self._lock:
            record = self._records[pod_id]
            record.old_port, record.old_port_polls = record.pod.proxy.port, self.old_port_polls
            record.pod.stop()
            record.enter("EXITED")

    def start(self, pod_id: str) -> None:
        with self._lock:
            self._records[pod_id].polls = 0
            self._records[pod_id].enter("PROVISIONING")

    def delete(self, pod_id: str) -> None:
        with self._lock:
            record = self._records[pod_id]
            record.pod.delete()
            record.enter("TERMINATED")
            record.shown_polls, record.listed_polls = self.deleted_get_polls, self.deleted_listed_polls

    # Requests.

    def answer(self, request: Request) -> _Answer:
        """What is sent back; it may do what was asked for, and wait, before it returns."""
        self.requests.append(request)
        try:
            operation, normal = self._route(request)
        except _ProblemError as problem:
            answer = self._refusal(problem)
        else:
            answer = self._with_faults(operation, normal)
        answer.headers = LIMITS | {"x-request-id": f"req-{next(self._request_numbers):06}"} | answer.headers
        return answer

    def _with_faults(self, operation: str, normal: Callable[[], _Answer]) -> _Answer:
        with self._lock:
            script = self._scripts[operation]
            reply = script.popleft() if script else self._always.get(operation, Reply())
        done = self._done(normal) if reply.perform else None
        self.is_closed.wait(reply.delay_s)
        if reply.drop:
            return _Answer(0, drop=True)
        if reply.status == 0:
            done = done or self._done(normal)
            done.headers |= reply.headers
            return done
        return self._made(reply)

    def _done(self, normal: Callable[[], _Answer]) -> _Answer:
        try:
            with self._lock:
                if self.is_closed.is_set():
                    raise _ProblemError(503, "the server is gone")
                return normal()
        except _ProblemError as problem:
            return self._refusal(problem)

    def _made(self, reply: Reply) -> _Answer:
        if reply.body is None and reply.status == http.HTTPStatus.NO_CONTENT:
            return _Answer(reply.status, headers=dict(reply.headers))
        body, kind = reply.body, "text/plain"
        if body is None:
            title = reply.title or http.client.responses.get(reply.status, "Error")
            body = {"title": title, "status": reply.status, "detail": reply.detail or title.lower()}
            kind = "application/problem+json"
        elif not isinstance(body, (str, bytes)):
            kind = "application/json"
        text = body if isinstance(body, (str, bytes)) else json.dumps(body)
        content = text.encode() if isinstance(text, str) else text
        return _Answer(reply.status, content, {"Content-Type": reply.content_type or kind} | dict(reply.headers))

    def _refusal(self, problem: _ProblemError) -> _Answer:
        title = http.HTTPStatus(problem.status).phrase
        body: dict[str, Any] = {"title": title, "status": problem.status, "detail": problem.detail}
        if problem.errors:
            body["errors"] = problem.errors
        return self._json("ErrorResponse", body, problem.status, "application/problem+json")

    def _json(self, schema: str, body: Any, status: int = 200, kind: str = "application/json") -> _Answer:
        wrong = self._contract.check(schema, body)
        if wrong:
            self.problems.append(f"not a {schema}: {'; '.join(wrong)}")
        return _Answer(status, json.dumps(body).encode(), {"Content-Type": kind})

    def _route(self, request: Request) -> tuple[str, Callable[[], _Answer]]:
        """The name of what is asked for, and how it is done."""
        if request.headers.get("user-agent", "").startswith("Python-urllib"):
            return "edge", lambda: _Answer(403, b"error code: 1010", {"Content-Type": "text/plain"})
        if len(request.body) > LARGEST_BODY:
            raise _ProblemError(413, "request body too large")
        split = urllib.parse.urlsplit(request.path)
        query = dict(urllib.parse.parse_qsl(split.query))
        parts = [urllib.parse.unquote(part) for part in split.path.strip("/").split("/")]
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if parts == ["graphql"] and request.method == "POST":
            return "graphql", lambda: self._graphql(bearer, request.body)
        if self._pod_of(bearer):
            raise _ProblemError(403, "access denied")
        if bearer != self.key:
            raise _ProblemError(401, "invalid bearer token" if bearer else "missing bearer token")
        if request.method == "PATCH" or (request.method == "PUT" and parts == ["v2", "account", "ssh-keys"]):
            self.forbidden.append(request)
            raise _ProblemError(500, "the runner must never ask for this")
        match request.method, parts:
            case "POST", ["v2", "pods"]:
                return "create", lambda: self._create(request.body)
            case "GET", ["v2", "pods"]:
                return "list", lambda: self._list(query)
            case "GET", ["v2", "pods", pod_id]:
                return "get", lambda: self._get(pod_id)
            case "DELETE", ["v2", "pods", pod_id]:
                return "delete", lambda: self._delete(pod_id)
            case "POST", ["v2", "pods", pod_id, "action"]:
                action = self._checked("PodActionRequest", request.body)["action"]
                return action, lambda: self._act(pod_id, action)
            case "GET", ["v2", "pods", pod_id, "logs"]:
                return "logs", lambda: self._logs(pod_id, query, request.headers.get("last-event-id"))
            case "GET", ["v2", "catalog", "gpus"]:
                return "gpus", lambda: self._list_gpus(query)
            case "GET", ["v2", "catalog", "gpus", gpu_id]:
                return "gpus", lambda: self._get_gpu(gpu_id, query)
            case "GET", ["v2", "billing", "pods"]:
                return "billing", lambda: self._billing(query)
        raise _ProblemError(404, "resource not found")

    def _pod_of(self, key: str) -> FakePod | None:
        """The pod that has this key of its own."""
        with self._lock:
            return next((pod for pod in self.pods.values() if pod.key == key), None)

    def _checked(self, schema: str, content: bytes) -> Any:
        try:
            body = json.loads(content)
        except ValueError:
            raise _ProblemError(400, "request body is not JSON") from None
        if errors := self._contract.check(schema, body):
            raise _ProblemError(422, "Request validation failed.", errors)
        return body

    # Pods.

    def _create(self, content: bytes) -> _Answer:
        body = self._checked("CreatePodRequest", content)
        rate = self._placed(body)
        pod_id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(14))
        pod = FakePod(body, self.folder, pod_id, **self.pod_options)
        now = datetime.datetime.now(datetime.UTC)
        record = _Record(pod, len(self.pods), rate, now, self.create_listed_after_polls)
        self.pods[pod_id], self._records[pod_id] = pod, record
        self.creates += 1
        record.enter("PROVISIONING")
        return self._pod(record, 201)

    def _placed(self, body: dict[str, Any]) -> float:
        """What the pod costs per hour; refused where there is none like it."""
        mounts, gpu = body.get("mounts", {}), body.get("gpu")
        if "persistent" in mounts and "network" in mounts:
            raise _ProblemError(400, "mounts.persistent and mounts.network are mutually exclusive")
        if (gpu is None) == (body.get("cpu") is None):
            raise _ProblemError(400, "exactly one of gpu or cpu must be set")
        for mount in mounts.get("network", ()):
            if mount["volumeId"] not in self.network_volumes:
                raise _ProblemError(404, "network volume not found")
        if gpu is None:
            if "persistent" in mounts:
                raise _ProblemError(400, "mounts.persistent is not allowed on a CPU pod")
            return 0.06 * float(body["cpu"]["vcpuCount"])
        if "minCudaVersion" in gpu and gpu.get("allowedCudaVersions"):
            raise _ProblemError(400, "minCudaVersion and allowedCudaVersions are mutually exclusive")
        if "count" not in gpu or "disk" not in body:
            raise _ProblemError(400, "no instances available")
        cloud = body.get("cloud", "SECURE").lower()
        known = self.gpus.get(gpu["id"])
        wanted = gpu.get("allowedCudaVersions") or None
        if (
            known is None
            or known["availability"] == "NONE"
            or gpu["count"] > known["maxCount"][cloud]
            or not _has_cuda(known, gpu.get("minCudaVersion"), wanted)
        ):
            raise _ProblemError(400, NO_INSTANCES)
        return float(known["price"][cloud]) * int(gpu["count"])

    def _list(self, query: dict[str, str]) -> _Answer:
        before = len(self.pods)
        if "cursor" in query:
            try:
                before = int(base64.urlsafe_b64decode(query["cursor"]).decode().removeprefix("pods:"))
            except ValueError:
                raise _ProblemError(422, "cursor is malformed") from None
        else:
            for record in self._records.values():
                record.is_listed = self._is_found(record) if not record.is_gone else record.listed_polls > 0
                record.listed_polls -= record.is_gone
        rows = [record for record in reversed(self._records.values()) if record.is_listed and record.number < before]
        size = min(self.page_size, _number(query, "limit", 1000, 1, 1000))
        page, has_more = rows[:size], len(rows) > size
        cursor = base64.urlsafe_b64encode(f"pods:{page[-1].number}".encode()).decode() if has_more else None
        pagination = {"nextCursor": cursor, "hasNextPage": has_more}
        answer = self._json(
            "ListPodsResponse", {"pods": [self._view(record) for record in page]} | {"pagination": pagination}
        )
        return self._overridden(answer)

    def _is_found(self, record: _Record) -> bool:
        """Whether a call finds the pod, which counts the call."""
        if record.hidden_polls > 0:
            record.hidden_polls -= 1
            return False
        if record.is_gone:
            record.shown_polls -= 1
            return record.shown_polls >= 0
        return True

    def _found(self, pod_id: str) -> _Record:
        record = self._records.get(pod_id)
        if record is None or not self._is_found(record):
            raise _ProblemError(404, "pod not found")
        return record

    def _alive(self, pod_id: str) -> _Record:
        record = self._records.get(pod_id)
        if record is None or record.is_gone:
            raise _ProblemError(404, "pod not found")
        return record

    def _get(self, pod_id: str) -> _Answer:
        record = self._found(pod_id)
        self._advance(record)
        answer = self._pod(record)
        record.old_port_polls -= record.pod.status == "RUNNING"
        return answer

    def _advance(self, record: _Record) -> None:
        status = record.pod.status
        if self.stuck_at and self.stuck_at not in ADVANCES and status in ADVANCES:
            record.enter(self.stuck_at)
        elif status in ADVANCES[:-1] and status != self.stuck_at:
            record.polls += 1
            if record.polls % self.polls_per_status == 0:
                record.enter(ADVANCES[ADVANCES.index(status) + 1])
        if record.pod.status == "RUNNING" and status != "RUNNING":
            record.started_at = datetime.datetime.now(datetime.UTC)
            record.pod.start()

    def _delete(self, pod_id: str) -> _Answer:
        self._alive(pod_id)
        self.delete(pod_id)
        return _Answer(204)

    def _act(self, pod_id: str, action: str) -> _Answer:
        record = self._alive(pod_id)
        if action not in ACTIONS.get(record.pod.status, ()):
            raise _ProblemError(409, f"cannot {action} a pod that is {record.pod.status}")
        if action == "terminate":
            return self._delete(pod_id)
        if action == "stop":
            self.stop(pod_id)
        elif action == "start":
            self.start(pod_id)
        else:
            record.pod.restart_container()
        return self._pod(record)

    def _pod(self, record: _Record, status: int = 200) -> _Answer:
        return self._overridden(self._json("Pod", self._view(record), status))

    def _view(self, record: _Record) -> dict[str, Any]:
        pod, body = record.pod, record.pod.body
        status = self._shown_status(pod)
        is_running = status == "RUNNING"
        command = {name: body[name] for name in ("entrypoint", "cmd") if name in body}
        port = record.old_port if record.old_port_polls > 0 else pod.proxy.port
        has_ssh = is_running and "22/tcp" in body.get("ports", ())
        token = f"{pod.id}-64411eb2"
        view = {
            "id": pod.id,
            "name": body["name"],
            # An unknown status is put in afterwards: it is not one that the description knows.
            "status": status if status in (*ACTIONS, "TERMINATED") else pod.status,
            "actions": ACTIONS.get(status, []),
            "image": body.get("image", ""),
            "args": body.get("args", json.dumps(command) if command else ""),
            **command,
            "disk": body.get("disk", 20),
            "mounts": body.get("mounts", {}),
            "ports": body.get("ports", []),
            "env": body.get("env", {}),
            "registry": body.get("registry"),
            "cloud": body.get("cloud", "SECURE"),
            "dataCenterId": self.data_center or next(iter(body.get("dataCenterIds", ())), "US-KS-2"),
            "cudaVersion": "12.8" if "gpu" in body else None,
            "ssh": {
                "proxy": None if status == "PROVISIONING" else _endpoint("ssh.runpod.io", 22, token),
                "direct": _endpoint("127.0.0.1", port, USER) if has_ssh else None,
            },
            "template": None,
            "cost": 0 if status in IDLE else self._price(record),
            "locked": False,
            "globalNetworking": {"enabled": body.get("globalNetworking", False)},
            "runtime": None,
            "createdAt": _time(record.created_at),
            "startedAt": _time(record.started_at) if record.started_at else None,
        }
        if "gpu" in body:
            gpu = body["gpu"]
            view["gpu"] = {"id": gpu["id"], "count": gpu["count"], "vcpuCount": 16, "memory": 128}
        else:
            view["cpu"] = {"id": body["cpu"]["id"], "vcpuCount": body["cpu"]["vcpuCount"], "memory": 16}
        if is_running:
            mapped = {"private": 22, "public": port, "type": "tcp", "ip": "127.0.0.1"}
            view["runtime"] = {"uptime": 1, "ports": [mapped] if has_ssh else []}
        return view

    def _shown_status(self, pod: FakePod) -> str:
        return self.status_override.get(pod.id) or self.status_override.get("*") or pod.status

    def _overridden(self, answer: _Answer) -> _Answer:
        if self.status_override:
            body = json.loads(answer.content)
            for view in body.get("pods", [body]):
                view["status"] = self._shown_status(self.pods[view["id"]])
            answer.content = json.dumps(body).encode()
        return answer

    def _price(self, record: _Record) -> float:
        return record.rate if self.price_override is None else self.price_override

    # Logs.

    def _logs(self, pod_id: str, query: dict[str, str], last_id: str | None) -> _Answer:
        pod = self._alive(pod_id).pod
        sources = (query["source"],) if "source" in query else ("container", "system")
        if not set(sources) <= {"container", "system"}:
            raise _ProblemError(422, "unknown source")
        tail = _number(query, "tail", 100, 0, 5000)
        lines = _lines(pod, sources, 0)
        if last_id is not None:
            after = _resumed(last_id, lines)
        else:
            after = lines[-1][0] if lines and tail == 0 else lines[-tail:][0][0] - 1 if lines else 0
        return _Answer(200, headers=dict(SSE_HEADERS), log_of=pod, sources=sources, after=after)

    # The catalog and the bill.

    def _list_gpus(self, query: dict[str, str]) -> _Answer:
        gpus = [self._catalog_gpu(gpu, query) for gpu in self.gpus.values()]
        return self._json("ListGpuTypesResponse", {"gpus": gpus})

    def _get_gpu(self, gpu_id: str, query: dict[str, str]) -> _Answer:
        if gpu_id not in self.gpus:
            raise _ProblemError(404, "GPU type not found")
        return self._json("GpuType", self._catalog_gpu(self.gpus[gpu_id], query))

    def _catalog_gpu(self, gpu: dict[str, Any], query: dict[str, str]) -> dict[str, Any]:
        extras = ("availability", "dataCenters", "cudaVersions")
        shown = {name: value for name, value in gpu.items() if name not in extras}
        if "include" not in query:
            return shown
        if "product" not in query:
            raise _ProblemError(400, "product is required with include=AVAILABILITY")
        cloud = query.get("cloud", "SECURE").lower()
        fits = gpu["maxCount"][cloud] >= int(query.get("count", "1")) and _has_cuda(
            gpu, query.get("minCudaVersion"), None
        )
        if not fits or gpu["availability"] == "NONE":
            return shown | {"availability": "NONE", "cudaVersions": gpu["cudaVersions"]}
        return shown | {name: gpu[name] for name in extras}

    def _billing(self, query: dict[str, str]) -> _Answer:
        today = datetime.datetime.now(datetime.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        span = {"startTime": _time(today), "endTime": _time(today + datetime.timedelta(days=1))}
        records, total = [], 0.0
        for pod_id, record in self._records.items():
            if query.get("podId", pod_id) == pod_id:
                amount = self.billed_s(pod_id) * self._price(record) / 3600
                total += amount
                records.append(span | {"podId": pod_id} | _amounts(amount))
        metadata = {
            "query": span | {"bucketSize": query.get("bucketSize", "day"), "podId": query.get("podId")},
            "recordCount": len(records),
            "uniquePodCount": len(records),
            "totals": _amounts(total),
        }
        return self._json("ListPodBillingResponse", {"records": records, "metadata": metadata})

    # The older interface, which takes the key that a pod itself has.

    def _graphql(self, bearer: str, content: bytes) -> _Answer:
        pod = self._pod_of(bearer)
        if pod is None:
            raise _ProblemError(401, "invalid bearer token")
        text = content.decode()
        answer: dict[str, Any]
        if not re.search(r"\bpodStop\b", text) or pod.id not in text:
            answer = {"errors": [{"message": "only podStop of the own pod is known here"}]}
        elif "stop" not in ACTIONS.get(pod.status, ()):
            answer = {"errors": [{"message": f"the pod is {pod.status}"}]}
        else:
            self.stop(pod.id)
            answer = {"data": {"podStop": {"id": pod.id, "desiredStatus": "EXITED"}}}
        return _Answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})


def _endpoint(host: str, port: int, username: str) -> dict[str, Any]:
    command = f"ssh {username}@{host}" + (f" -p {port}" if port != 22 else "")
    return {"host": host, "port": port, "username": username, "command": command}


def _time(when: datetime.datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def _amounts(gpu: float) -> dict[str, float]:
    return {"totalAmount": gpu, "gpuAmount": gpu, "cpuAmount": 0, "diskAmount": 0}


def _number(query: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    text = query.get(name, str(default))
    if not text.isdigit() or not least <= int(text) <= most:
        raise _ProblemError(422, f"{name} must be from {least} to {most}")
    return int(text)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _has_cuda(gpu: dict[str, Any], least: str | None, allowed: list[str] | None) -> bool:
    versions = [each["version"] for each in gpu["cudaVersions"] if each["available"]]
    fitting = [version for version in versions if least is None or _version(version) >= _version(least)]
    return any(allowed is None or version in allowed for version in fitting)


def _lines(pod: FakePod, sources: tuple[str, ...], after: int) -> list[tuple[int, str, str, str]]:
    """The number, time, source and text of the lines behind that one."""
    with pod.news:
        logs = {"container": pod.container_log, "system": pod.system_log}
        return sorted(
            (number, ts, source, line) for source in sources for number, ts, line in logs[source] if number > after
        )


def _resumed(last_id: str, lines: list[tuple[int, str, str, str]]) -> int:
    """The number of the last line that was seen."""
    ts, _, number = last_id.partition("/")
    if number.isdigit():
        return int(number)
    if not re.match(r"\d{4}-\d\d-\d\dT", ts):
        raise _ProblemError(422, "Last-Event-ID is malformed")
    return max((line[0] for line in lines if line[1] <= ts), default=0)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # so that the end waits for them
    request_queue_size = 64

    def __init__(self, fake: FakeRunPod) -> None:
        self.fake = fake
        self._connections: set[socket.socket] = set()
        self._connections_lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._connections_lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._connections_lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        """Ends those that a client keeps open, and so the threads that wait for its next request."""
        with self._connections_lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            self.fake.problems.append(f"{type(error).__name__}: {error}")


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.fake.answer(Request(self.command, self.path, headers, body))
        if answer.drop:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.log_of is None:
            if answer.status != http.HTTPStatus.NO_CONTENT:
                self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)
        else:
            self.end_headers()
            self._stream(answer.log_of, answer.sources, answer.after)

    do_POST = do_DELETE = do_PATCH = do_PUT = do_GET

    def _stream(self, pod: FakePod, sources: tuple[str, ...], after: int) -> None:
        """The lines as they come, until the pod or the server is gone."""
        fake = self.server.fake
        while not pod.is_deleted and not fake.is_closed.is_set():
            lines = _lines(pod, sources, after)
            for number, ts, source, line in lines:
                data = json.dumps({"ts": ts, "source": source, "line": line})
                self._chunk(f"id: {ts}/{number:012}\ndata: {data}\n\n".encode())
                after = number
            with pod.news:
                if not lines and not pod.is_deleted:
                    pod.news.wait(0.1)
        self._chunk(b"")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()
