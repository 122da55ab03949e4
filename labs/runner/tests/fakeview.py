"""What the fake provider knows of a pod, and how it shows it."""

from __future__ import annotations

import datetime
import json
import time
from dataclasses import dataclass
from typing import Any

from fakepod import USER, FakePod

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


@dataclass(eq=False)
class Record:
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


def pod_view(record: Record, status: str, price: float, data_center: str | None) -> dict[str, Any]:
    """The pod as the provider shows it, at this status."""
    pod, body = record.pod, record.pod.body
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
        "dataCenterId": data_center or next(iter(body.get("dataCenterIds", ())), "US-KS-2"),
        "cudaVersion": "12.8" if "gpu" in body else None,
        "ssh": {
            "proxy": None if status == "PROVISIONING" else endpoint("ssh.runpod.io", 22, token),
            "direct": endpoint("127.0.0.1", port, USER) if has_ssh else None,
        },
        "template": None,
        "cost": 0 if status in IDLE else price,
        "locked": False,
        "globalNetworking": {"enabled": body.get("globalNetworking", False)},
        "runtime": None,
        "createdAt": time_text(record.created_at),
        "startedAt": time_text(record.started_at) if record.started_at else None,
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


def endpoint(host: str, port: int, username: str) -> dict[str, Any]:
    command = f"ssh {username}@{host}" + (f" -p {port}" if port != 22 else "")
    return {"host": host, "port": port, "username": username, "command": command}


def time_text(when: datetime.datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
