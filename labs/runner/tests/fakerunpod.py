"""The provider's API on this machine, as its description and its users tell of it, with every fault on demand.

What it answers is checked against that description; what it does wrong by itself is in `problems`.
"""

from __future__ import annotations

import base64
import copy
import datetime
import http
import http.client
import http.server
import itertools
import json
import re
import secrets
import string
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from fakecatalog import GPUS, catalog_view, has_cuda
from fakefaults import Faults, made
from fakepod import FakePod
from fakeview import ACTIONS, ADVANCES, Record, pod_view, time_text
from fakewire import Answer, ProblemError, Request, Server, log_lines, resumed_after
from openapi import Contract

LARGEST_BODY = 102_400
NO_INSTANCES = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)
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


class FakeRunPod(Faults):
    def __init__(self, folder: Path) -> None:
        super().__init__()
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
        self._records: dict[str, Record] = {}
        self._lock = threading.RLock()
        self._request_numbers = itertools.count(1)
        self._server = Server(self.answer, self.is_closed, self.problems)
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

    def answer(self, request: Request) -> Answer:
        """What is sent back; it may do what was asked for, and wait, before it returns."""
        self.requests.append(request)
        try:
            operation, normal = self._route(request)
        except ProblemError as problem:
            answer = self._refusal(problem)
        else:
            answer = self._with_faults(operation, normal)
        answer.headers = LIMITS | {"x-request-id": f"req-{next(self._request_numbers):06}"} | answer.headers
        return answer

    def _with_faults(self, operation: str, normal: Callable[[], Answer]) -> Answer:
        with self._lock:
            reply = self.next_reply(operation)
        done = self._done(normal) if reply.perform else None
        self.is_closed.wait(reply.delay_s)
        if reply.drop:
            return Answer(0, drop=True)
        if reply.status == 0:
            done = done or self._done(normal)
            done.headers |= reply.headers
            return done
        return made(reply)

    def _done(self, normal: Callable[[], Answer]) -> Answer:
        try:
            with self._lock:
                if self.is_closed.is_set():
                    raise ProblemError(503, "the server is gone")
                return normal()
        except ProblemError as problem:
            return self._refusal(problem)

    def _refusal(self, problem: ProblemError) -> Answer:
        title = http.HTTPStatus(problem.status).phrase
        body: dict[str, Any] = {"title": title, "status": problem.status, "detail": problem.detail}
        if problem.errors:
            body["errors"] = problem.errors
        return self._json("ErrorResponse", body, problem.status, "application/problem+json")

    def _json(self, schema: str, body: Any, status: int = 200, kind: str = "application/json") -> Answer:
        wrong = self._contract.check(schema, body)
        if wrong:
            self.problems.append(f"not a {schema}: {'; '.join(wrong)}")
        return Answer(status, json.dumps(body).encode(), {"Content-Type": kind})

    def _route(self, request: Request) -> tuple[str, Callable[[], Answer]]:
        """The name of what is asked for, and how it is done."""
        if request.headers.get("user-agent", "").startswith("Python-urllib"):
            return "edge", lambda: Answer(403, b"error code: 1010", {"Content-Type": "text/plain"})
        if len(request.body) > LARGEST_BODY:
            raise ProblemError(413, "request body too large")
        split = urllib.parse.urlsplit(request.path)
        query = dict(urllib.parse.parse_qsl(split.query))
        parts = [urllib.parse.unquote(part) for part in split.path.strip("/").split("/")]
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if parts == ["graphql"] and request.method == "POST":
            return "graphql", lambda: self._graphql(bearer, request.body)
        if self._pod_of(bearer):
            raise ProblemError(403, "access denied")
        if bearer != self.key:
            raise ProblemError(401, "invalid bearer token" if bearer else "missing bearer token")
        if request.method == "PATCH" or (request.method == "PUT" and parts == ["v2", "account", "ssh-keys"]):
            self.forbidden.append(request)
            raise ProblemError(500, "the runner must never ask for this")
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
        raise ProblemError(404, "resource not found")

    def _pod_of(self, key: str) -> FakePod | None:
        """The pod that has this key of its own."""
        with self._lock:
            return next((pod for pod in self.pods.values() if pod.key == key), None)

    def _checked(self, schema: str, content: bytes) -> Any:
        try:
            body = json.loads(content)
        except ValueError:
            raise ProblemError(400, "request body is not JSON") from None
        if errors := self._contract.check(schema, body):
            raise ProblemError(422, "Request validation failed.", errors)
        return body

    # Pods.

    def _create(self, content: bytes) -> Answer:
        body = self._checked("CreatePodRequest", content)
        rate = self._placed(body)
        pod_id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(14))
        pod = FakePod(body, self.folder, pod_id, **self.pod_options)
        now = datetime.datetime.now(datetime.UTC)
        record = Record(pod, len(self.pods), rate, now, self.create_listed_after_polls)
        self.pods[pod_id], self._records[pod_id] = pod, record
        self.creates += 1
        record.enter("PROVISIONING")
        return self._pod(record, 201)

    def _placed(self, body: dict[str, Any]) -> float:
        """What the pod costs per hour; refused where there is none like it."""
        mounts, gpu = body.get("mounts", {}), body.get("gpu")
        if "persistent" in mounts and "network" in mounts:
            raise ProblemError(400, "mounts.persistent and mounts.network are mutually exclusive")
        if (gpu is None) == (body.get("cpu") is None):
            raise ProblemError(400, "exactly one of gpu or cpu must be set")
        for mount in mounts.get("network", ()):
            if mount["volumeId"] not in self.network_volumes:
                raise ProblemError(404, "network volume not found")
        if gpu is None:
            if "persistent" in mounts:
                raise ProblemError(400, "mounts.persistent is not allowed on a CPU pod")
            return 0.06 * float(body["cpu"]["vcpuCount"])
        if "minCudaVersion" in gpu and gpu.get("allowedCudaVersions"):
            raise ProblemError(400, "minCudaVersion and allowedCudaVersions are mutually exclusive")
        if "count" not in gpu or "disk" not in body:
            raise ProblemError(400, "no instances available")
        cloud = body.get("cloud", "SECURE").lower()
        known = self.gpus.get(gpu["id"])
        wanted = gpu.get("allowedCudaVersions") or None
        if (
            known is None
            or known["availability"] == "NONE"
            or gpu["count"] > known["maxCount"][cloud]
            or not has_cuda(known, gpu.get("minCudaVersion"), wanted)
        ):
            raise ProblemError(400, NO_INSTANCES)
        return float(known["price"][cloud]) * int(gpu["count"])

    def _list(self, query: dict[str, str]) -> Answer:
        before = len(self.pods)
        if "cursor" in query:
            try:
                before = int(base64.urlsafe_b64decode(query["cursor"]).decode().removeprefix("pods:"))
            except ValueError:
                raise ProblemError(422, "cursor is malformed") from None
        else:
            for record in self._records.values():
                record.is_listed = self._is_found(record) if not record.is_gone else record.listed_polls > 0
                record.listed_polls -= record.is_gone
        rows = [record for record in reversed(self._records.values()) if record.is_listed and record.number < before]
        size = min(self.page_size, number_in(query, "limit", 1000, 1, 1000))
        page, has_more = rows[:size], len(rows) > size
        cursor = base64.urlsafe_b64encode(f"pods:{page[-1].number}".encode()).decode() if has_more else None
        pagination = {"nextCursor": cursor, "hasNextPage": has_more}
        answer = self._json(
            "ListPodsResponse", {"pods": [self._view(record) for record in page]} | {"pagination": pagination}
        )
        return self._overridden(answer)

    def _is_found(self, record: Record) -> bool:
        """Whether a call finds the pod, which counts the call."""
        if record.hidden_polls > 0:
            record.hidden_polls -= 1
            return False
        if record.is_gone:
            record.shown_polls -= 1
            return record.shown_polls >= 0
        return True

    def _found(self, pod_id: str) -> Record:
        record = self._records.get(pod_id)
        if record is None or not self._is_found(record):
            raise ProblemError(404, "pod not found")
        return record

    def _alive(self, pod_id: str) -> Record:
        record = self._records.get(pod_id)
        if record is None or record.is_gone:
            raise ProblemError(404, "pod not found")
        return record

    def _get(self, pod_id: str) -> Answer:
        record = self._found(pod_id)
        self._advance(record)
        answer = self._pod(record)
        record.old_port_polls -= record.pod.status == "RUNNING"
        return answer

    def _advance(self, record: Record) -> None:
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

    def _delete(self, pod_id: str) -> Answer:
        self._alive(pod_id)
        self.delete(pod_id)
        return Answer(204)

    def _act(self, pod_id: str, action: str) -> Answer:
        record = self._alive(pod_id)
        if action not in ACTIONS.get(record.pod.status, ()):
            raise ProblemError(409, f"cannot {action} a pod that is {record.pod.status}")
        if action == "terminate":
            return self._delete(pod_id)
        if action == "stop":
            self.stop(pod_id)
        elif action == "start":
            self.start(pod_id)
        else:
            record.pod.restart_container()
        return self._pod(record)

    def _pod(self, record: Record, status: int = 200) -> Answer:
        return self._overridden(self._json("Pod", self._view(record), status))

    def _view(self, record: Record) -> dict[str, Any]:
        return pod_view(record, self._shown_status(record.pod), self._price(record), self.data_center)

    def _shown_status(self, pod: FakePod) -> str:
        return self.status_override.get(pod.id) or self.status_override.get("*") or pod.status

    def _overridden(self, answer: Answer) -> Answer:
        if self.status_override:
            body = json.loads(answer.content)
            for view in body.get("pods", [body]):
                view["status"] = self._shown_status(self.pods[view["id"]])
            answer.content = json.dumps(body).encode()
        return answer

    def _price(self, record: Record) -> float:
        return record.rate if self.price_override is None else self.price_override

    # Logs.

    def _logs(self, pod_id: str, query: dict[str, str], last_id: str | None) -> Answer:
        pod = self._alive(pod_id).pod
        sources = (query["source"],) if "source" in query else ("container", "system")
        if not set(sources) <= {"container", "system"}:
            raise ProblemError(422, "unknown source")
        tail = number_in(query, "tail", 100, 0, 5000)
        lines = log_lines(pod, sources, 0)
        if last_id is not None:
            after = resumed_after(last_id, lines)
        else:
            after = lines[-1][0] if lines and tail == 0 else lines[-tail:][0][0] - 1 if lines else 0
        return Answer(200, headers=dict(SSE_HEADERS), log_of=pod, sources=sources, after=after)

    # The catalog and the bill.

    def _list_gpus(self, query: dict[str, str]) -> Answer:
        gpus = [catalog_view(gpu, query) for gpu in self.gpus.values()]
        return self._json("ListGpuTypesResponse", {"gpus": gpus})

    def _get_gpu(self, gpu_id: str, query: dict[str, str]) -> Answer:
        if gpu_id not in self.gpus:
            raise ProblemError(404, "GPU type not found")
        return self._json("GpuType", catalog_view(self.gpus[gpu_id], query))

    def _billing(self, query: dict[str, str]) -> Answer:
        today = datetime.datetime.now(datetime.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        span = {"startTime": time_text(today), "endTime": time_text(today + datetime.timedelta(days=1))}
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

    def _graphql(self, bearer: str, content: bytes) -> Answer:
        pod = self._pod_of(bearer)
        if pod is None:
            raise ProblemError(401, "invalid bearer token")
        text = content.decode()
        answer: dict[str, Any]
        if not re.search(r"\bpodStop\b", text) or pod.id not in text:
            answer = {"errors": [{"message": "only podStop of the own pod is known here"}]}
        elif "stop" not in ACTIONS.get(pod.status, ()):
            answer = {"errors": [{"message": f"the pod is {pod.status}"}]}
        else:
            self.stop(pod.id)
            answer = {"data": {"podStop": {"id": pod.id, "desiredStatus": "EXITED"}}}
        return Answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})


def _amounts(gpu: float) -> dict[str, float]:
    return {"totalAmount": gpu, "gpuAmount": gpu, "cpuAmount": 0, "diskAmount": 0}


def number_in(query: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    text = query.get(name, str(default))
    if not text.isdigit() or not least <= int(text) <= most:
        raise ProblemError(422, f"{name} must be from {least} to {most}")
    return int(text)
