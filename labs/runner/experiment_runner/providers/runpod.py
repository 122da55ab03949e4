"""RunPod: a pod is created, reached over its published SSH port, stopped with its disk kept, and deleted.

The pod's host key is not trusted at first sight: the container prints it when it boots, and the API's log channel,
which is encrypted and knows us, brings it here before the first connection. The key pair of the connection is made for
this run alone. The account's key never goes near the pod.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment_runner.durable import write_atomically
from experiment_runner.errors import InputError, RunnerError
from experiment_runner.job import Job, Problems, settings_for
from experiment_runner.providers import catalog
from experiment_runner.providers.base import (
    BOOTING,
    FAILED,
    GONE,
    RUNNING,
    STOPPED,
    UNKNOWN,
    Ambiguous,
    Guard,
    Machine,
    NoCapacity,
    NotCreated,
    NotReady,
    Plan,
    ProviderFailed,
)  # fmt: skip
from experiment_runner.providers.runpod_api import CONSOLE_URL, ApiError, RunpodApi
from experiment_runner.session import Session, pinned_options, ssh_session
from experiment_runner.state import created_and_deadline

STATUSES = {"PROVISIONING": BOOTING, "STARTING": BOOTING, "RUNNING": RUNNING, "EXITED": STOPPED, "ERROR": FAILED,
            "TERMINATED": GONE}  # fmt: skip
NO_CAPACITY = re.compile(
    r"no longer any instances available|please refresh and try again|does not have the resources"
    r"|try a different machine|no (?:machines|capacity|hosts|gpus|instances) available|insufficient capacity"
    r"|unavailable|out of stock|sold out|no capacity|not enough free gpus",
    re.IGNORECASE,
)
BOOT_PROBLEMS = re.compile(
    r"unsatisfied condition: cuda|toomanyrequests|manifest unknown|pull access denied|no space left on device"
    r"|nvidia-container-cli|OCI runtime create failed|error pulling image",
    re.IGNORECASE,
)
HOST_KEY_MARK = "RUNNER-HOSTKEY"
HOST_KEY = re.compile(rf"^{HOST_KEY_MARK} (ssh-ed25519 [A-Za-z0-9+/=]+)")
FINGERPRINT = re.compile(r"\b(SHA256:[A-Za-z0-9+/]{43})\b.*\(ED25519\)")
STOP_TRIES = 4
GUARD = Path(__file__).parent / "runpod_guard.py"


@dataclass(frozen=True)
class RunpodSettings:
    """What kind of pod."""

    image: str
    """The container's image; with its digest, or what ran cannot be told afterwards."""
    gpus: tuple[str, ...] = ("NVIDIA H100 80GB HBM3",)
    """GPUs by RunPod's exact names, in order of preference. More than one means that another part may be measured."""
    gpu_count: int = 1
    min_cuda: str = "12.8"
    """The host's driver must know this version of CUDA, or the container never starts."""
    cloud: str = "SECURE"
    """SECURE or COMMUNITY; the second is cheaper, and a pod there may have no address of its own."""
    disk_gb: int = 40
    """The container's disk; wiped when the pod stops."""
    volume_gb: int = 60
    """The disk that survives a stop, at `work`."""
    network_volume: str = ""
    """The id of a network volume instead; it outlives the pod, and costs for as long as it exists."""
    data_centers: tuple[str, ...] = ()
    """Where the pod is preferred to be."""
    work: str = "/workspace"
    """Where the volume is mounted."""
    start: str = "/start.sh"
    """What the image runs by itself; the wrapper that prints the host key runs it last. Empty: the image's own entry
    point is left as it is, and must print the host keys' fingerprints."""
    python: str = "python3"

    def problems(self) -> Problems:
        if not re.fullmatch(r"\S+", self.image):
            yield "image", f"must be the name of an image, got {self.image!r}"
        if not self.gpus:
            yield "gpus", "must name at least one GPU"
        if self.gpu_count < 1:
            yield "gpu_count", f"must be at least 1, got {self.gpu_count}"
        if self.cloud not in ("SECURE", "COMMUNITY"):
            yield "cloud", f"must be SECURE or COMMUNITY, got {self.cloud!r}"
        if self.volume_gb < 10 and not self.network_volume:
            yield "volume_gb", f"must be at least 10, got {self.volume_gb}: without it a stop loses everything"
        if not re.fullmatch(r"\d+\.\d+", self.min_cuda):
            yield "min_cuda", f"must be a version such as 12.8, got {self.min_cuda!r}"
        if not self.work.startswith("/"):
            yield "work", f"must be an absolute path, got {self.work!r}"


class Runpod:
    """Pods, for one job."""

    is_paid = True

    def __init__(self, job: Job, label: str, api: RunpodApi | None) -> None:
        """`api` is None where there is no key: then there is a plan without prices, and nothing else."""
        self.job, self.maybe_api = job, api
        self.settings: RunpodSettings = settings_for(RunpodSettings, job, label)

    @property
    def api(self) -> RunpodApi:
        self.need()
        assert self.maybe_api is not None
        return self.maybe_api

    def need(self) -> None:
        if self.maybe_api is None:
            raise InputError("RUNPOD_API_KEY is not set; put it into .env (see .env.example) or into the environment")

    def plan(self) -> Plan:
        """The candidates with their prices, and the request."""
        candidates, notes = catalog.candidates(self.maybe_api, self.settings.gpus, self.settings.gpu_count,
                                               self.settings.cloud, self.settings.min_cuda)  # fmt: skip
        if "@sha256:" not in self.settings.image:
            notes.append(f"{self.settings.image} has no digest: what ran cannot be told afterwards")
        if len(self.settings.gpus) > 1:
            notes.append("more than one GPU is allowed: runs on different parts are not compared by speed")
        notes.append(
            "if this computer goes away, the job still ends by its limits; the pod then stops itself after "
            f"{self.job.limits.collect_grace / 60:g} min, for as long as RunPod keeps its older API (until early 2027)"
        )
        return Plan(candidates, self.request("exp-…", self.settings.gpus[0], "ssh-ed25519 …"), notes)

    def request(self, name: str, gpu: str, public_key: str) -> dict[str, Any]:
        """The body that asks for a pod."""
        settings = self.settings
        network = {"network": [{"volumeId": settings.network_volume, "path": settings.work}]}
        persistent = {"persistent": {"size": settings.volume_gb, "path": settings.work}}
        body: dict[str, Any] = {
            "name": name,
            "image": settings.image,
            "gpu": {"id": gpu, "count": settings.gpu_count, "minCudaVersion": settings.min_cuda},
            "cloud": settings.cloud,
            "disk": settings.disk_gb,
            "mounts": network if settings.network_volume else persistent,
            "ports": ["22/tcp"],
            "env": {"PUBLIC_KEY": public_key},
            "startSsh": True,
        }
        if settings.data_centers:
            body["dataCenterIds"] = [center.upper() for center in settings.data_centers]
        if settings.start:
            body["entrypoint"] = ["/bin/bash", "-c"]
            body["cmd"] = [wrapper(f"{settings.work}/{name}/host", settings.start)]
        return body

    def create(self, name: str, folder: Path) -> Machine:
        """Asks for each candidate in turn, and for none above the price that is allowed."""
        public_key = make_key_pair(folder)
        plan, reasons = self.plan(), []
        for candidate in plan.candidates:
            limit = self.job.limits.max_usd_per_hour
            if candidate.usd_per_hour is not None and candidate.usd_per_hour > limit:
                reasons.append(
                    f"{candidate.name} costs {candidate.usd_per_hour:g} USD an hour, and {limit:g} are allowed"
                )
                continue
            request = self.request(name, candidate.name, public_key)
            try:
                machine = machine_of(self.api.call("POST", "/pods", request, is_safe=False).body)
                return machine._replace(facts={**machine.facts, "requested_gpu": candidate.name})
            except ApiError as error:
                if not error.is_definite:
                    raise Ambiguous(str(error)) from error
                if error.status == 403 or (error.status == 400 and NO_CAPACITY.search(error.detail)):
                    reasons.append(f"{candidate.name}: {error.detail}")
                    continue
                raise NotCreated(str(error)) from error
        raise NoCapacity("no machine: " + "; ".join(reasons))

    def find(self, name: str) -> list[Machine]:
        return [machine_of(pod) for pod in self.api.pods() if pod.get("name") == name and is_there(pod)]

    def owned(self) -> list[Machine]:
        return [
            machine_of(pod) for pod in self.api.pods() if created_and_deadline(str(pod.get("name"))) and is_there(pod)
        ]

    def look(self, machine_id: str) -> Machine:
        try:
            return machine_of(self.api.call("GET", f"/pods/{machine_id}").body)
        except ApiError as error:
            if error.status == 404:
                return Machine(machine_id, "", GONE, "not found")
            raise

    def boot_problem(self, machine_id: str) -> str:
        """What the system said about the container: a driver that is too old, an image that cannot be pulled."""
        try:
            lines = self.api.log_lines(machine_id, "system", 200)
        except RunnerError:
            return ""
        return next((line.strip() for line in reversed(lines) if BOOT_PROBLEMS.search(line)), "")

    def connect(self, machine: Machine, folder: Path, silence_s: float) -> tuple[Session, str, dict[str, Any]]:
        address = machine.facts.get("ssh")
        if not address:
            raise NotReady("the pod has no address yet")
        alias = f"runpod-{machine.id}"
        known_hosts = folder / "known_hosts"
        key, how = self.host_key(machine.id, address)
        write_atomically(known_hosts, f"{alias} {key}\n".encode(), mode=0o600)
        options = pinned_options(silence_s, folder / "id_ed25519", known_hosts, alias, int(address["port"]))
        session = ssh_session(f"{address['username']}@{address['host']}", self.settings.python, options)
        return session, f"{self.settings.work}/{machine.name}", {"host_key": how, "host_key_sha256": fingerprint(key)}

    def host_key(self, machine_id: str, address: dict[str, Any]) -> tuple[str, str]:
        """The pod's host key, and how it was learned. Raises NotReady until the log has it."""
        lines = self.api.log_lines(machine_id, "container")[::-1]  # the last container's first: each has its own keys
        told = next(filter(None, map(HOST_KEY.match, lines)), None)
        if told:
            return told[1], "printed by the container, read over the API"
        found = next(filter(None, map(FINGERPRINT.search, lines)), None)
        if found is None:
            raise NotReady("the container has not printed its host key yet")
        for key in scan(address):
            if fingerprint(key) == found[1]:
                return key, "its fingerprint was printed by the container, read over the API"
        raise NotReady("nobody at the pod's address has the host key that the container printed")

    def guard(self) -> Guard:
        return Guard(GUARD.read_text("utf-8"), f"{self.api.url.rpartition('/')[0]}/graphql")

    def stop(self, machine_id: str) -> None:
        for attempt in range(STOP_TRIES):
            try:
                self.api.call("POST", f"/pods/{machine_id}/action", {"action": "stop"})
            except ApiError as error:
                if error.status not in (400, 404, 409) and attempt + 1 == STOP_TRIES:
                    raise ProviderFailed(str(error)) from error
            machine = self.look(machine_id)
            if machine.status in (STOPPED, GONE):
                return
            self.api.pause(self.job.limits.poll)
        raise ProviderFailed(f"RunPod: the pod {machine_id} does not stop: it is {machine.said}")

    def start(self, machine_id: str) -> None:
        try:
            self.api.call("POST", f"/pods/{machine_id}/action", {"action": "start"}, is_safe=False)
        except ApiError as error:
            if error.status == 409 and self.look(machine_id).status in (BOOTING, RUNNING):
                return
            if error.status == 400 and NO_CAPACITY.search(error.detail):
                raise NoCapacity(
                    f"the pod's host has no free GPU now ({error.detail}); try `start` again later"
                ) from error
            raise

    def delete(self, machine_id: str) -> None:
        try:
            self.api.call("DELETE", f"/pods/{machine_id}")
        except ApiError as error:
            if error.status != 404:
                raise ProviderFailed(str(error)) from error

    def is_gone(self, machine_id: str) -> dict[str, Any] | None:
        said = self.look(machine_id).said
        listed = any(pod.get("id") == machine_id and is_there(pod) for pod in self.api.pods())
        if said not in ("not found", "TERMINATED") or listed:
            return None
        return {"lookup": said, "listed": False}

    def console_url(self, machine_id: str) -> str:
        return f"{CONSOLE_URL}?id={machine_id}" if machine_id else CONSOLE_URL

    def bill(self, machine_id: str) -> dict[str, Any] | None:
        query = {"podId": machine_id, "bucketSize": "hour"}
        body = self.api.call("GET", "/billing/pods", query=query).body
        try:
            amounts = [float(record["totalAmount"]) for record in body["records"] if record["podId"] == machine_id]
        except (KeyError, TypeError, ValueError) as error:
            raise ApiError(0, "the answer has no records of bills", "GET /billing/pods") from error
        return {"usd": sum(amounts), "num_records": len(amounts)}


def machine_of(pod: Any) -> Machine:
    """A pod as the API describes it. A status that is new to us is `unknown`, and no error. Raises ApiError for an
    answer that describes no pod."""
    try:
        machine_id, said, rate = str(pod["id"]), str(pod["status"]), float(pod.get("cost") or 0.0)
        gpu, ssh = pod.get("gpu") or {}, pod.get("ssh") or {}
        facts = {
            "gpu": gpu.get("id"),
            "gpu_count": gpu.get("count"),
            "data_center": pod.get("dataCenterId"),
            "cuda": pod.get("cudaVersion"),
            "image": pod.get("image"),
            "ssh": ssh.get("direct"),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ApiError(0, "the answer describes no pod", "pods") from error
    return Machine(machine_id, str(pod.get("name")), STATUSES.get(said, UNKNOWN), said, rate, facts)


def is_there(pod: dict[str, Any]) -> bool:
    """Whether a pod in a listing is more than the memory of one."""
    return pod.get("status") != "TERMINATED"


def wrapper(folder: str, start: str) -> str:
    """What the container runs: a host key that survives a stop, printed where the API can read it, then the image's own
    start."""
    key, place = shlex.quote(f"{folder}/ssh_host_ed25519_key"), "/etc/ssh/ssh_host_ed25519_key"
    return (
        f"umask 077; mkdir -p {shlex.quote(folder)} /etc/ssh; "
        f"[ -s {key} ] || ssh-keygen -q -t ed25519 -N '' -C '' -f {key}; "
        f"cp {key} {place}; cp {key}.pub {place}.pub; "
        f'echo "{HOST_KEY_MARK} $(cat {key}.pub)"; umask 022; exec {shlex.quote(start)}'
    )


def make_key_pair(folder: Path) -> str:
    """A key pair for this run alone, in its folder; made once. Returns the public one."""
    private = folder / "id_ed25519"
    if not private.exists():
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "experiment-runner", "-f", str(private)]
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise InputError(f"ssh-keygen cannot be run ({error}); install OpenSSH's client") from error
    return private.with_suffix(".pub").read_text("utf-8").strip()


def scan(address: dict[str, Any]) -> list[str]:
    """The host keys that somebody at an address offers. Not to be trusted before they are compared."""
    command = ["ssh-keyscan", "-T", "10", "-t", "ed25519", "-p", str(address["port"]), str(address["host"])]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return [" ".join(line.split()[1:3]) for line in lines if line and not line.startswith("#")]


def fingerprint(key: str) -> str:
    """The fingerprint of a public key, as OpenSSH writes it."""

    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
