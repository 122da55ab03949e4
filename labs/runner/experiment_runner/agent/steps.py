"""The process that runs the steps, enforces the limits, and says what became of the job."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from .place import CANCEL, GUARD, LEASE, LOCK, LOG, SENT, SPEC, STATUS, WORK, load, save, try_save

LOOK_S = 0.1
OUTPUT_S = 2.0
HEARTBEAT_S = 5.0
GPU_EVERY_S = 30.0
GPU_QUERY = ["nvidia-smi", "--query-gpu=name,uuid,driver_version,utilization.gpu,memory.used",
             "--format=csv,noheader"]  # fmt: skip
GUARD_EVERY_S = 30.0
PIECE_BYTES = 1 << 16


def start() -> None:
    """Begins the job in a process of its own, once: whoever asks again is told so. Standard input: JSON {spec,
    secrets}; the secrets are kept in memory alone."""
    given = json.load(sys.stdin)
    with open(LOCK, "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(json.dumps({"started": False}))
            return
        except OSError:
            pass  # some network file systems have no locks; the status is there soon after
        if STATUS.exists():
            print(json.dumps({"started": False}))
            return
        save(SPEC, given["spec"])
        Path(given["spec"]["results"]).mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        if os.fork():
            os.close(writer)
            print(json.dumps({"started": os.read(reader, 100) == b"started"}))
            return
        os.setsid()
        if os.fork():
            os._exit(0)
        supervise(given["spec"], given["secrets"], lambda: os.write(writer, b"started"))
        os._exit(0)


def supervise(spec: dict[str, Any], secrets: dict[str, str], tell: Callable[[], object]) -> None:
    """Runs the steps to the first that fails, and waits for the results to be fetched."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, descriptor in ((0, nowhere), (1, log), (2, log)):
        os.dup2(descriptor, number)
    state: dict[str, Any] = {"job": "running", "process": mark_of(os.getpid()), "steps": [], "began": time.time()}
    state["guard"] = "armed" if arm(spec["guard"]) else "none"
    save(STATUS, state)
    tell()
    verdict, reason = "failed", "no step was run"
    groups: list[int] = []
    try:
        for step in spec["steps"]:
            verdict, reason = run_step(spec, step, secrets, state, groups)
            if verdict != "succeeded":
                break
    except Exception as error:
        verdict, reason = "failed", f"the supervisor failed: {type(error).__name__}: {error}"
    for group in groups:
        kill_group(group, signal.SIGKILL)
    kill_marked(spec["id"])
    state.update(job=verdict, reason=reason, ended=time.time())
    while not try_save(STATUS, state):  # a full disk: the answer must still be given
        time.sleep(1)
    if state["guard"] == "armed":
        wait_for_collection(spec)


def run_step(
    spec: dict[str, Any], step: dict[str, Any], secrets: dict[str, str], state: dict[str, Any], groups: list[int]
) -> tuple[str, str]:
    """Runs one step to its end. Returns the job's verdict so far, and why."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RUNPOD_")}
    environment.update(spec["env"])
    environment.update(EXPERIMENT_ID=spec["id"], EXPERIMENT_RESULTS=spec["results"], EXPERIMENT_SHARED=str(WORK.parent))
    environment.update({name: secrets[name] for name in step["secrets"] if name in secrets})
    record = {"name": step["name"], "began": time.time(), "rc": None}
    state["steps"].append(record)
    say(f"=== {step['name']}: {step['run'].strip().splitlines()[0]}")
    process = subprocess.Popen(
        [shutil.which("bash") or "/bin/sh", "-c", step["run"]],
        cwd=SENT / step["cwd"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    groups.append(process.pid)
    state["groups"] = groups
    try_save(STATUS, state)
    given = [secrets[name].encode() for name in step["secrets"] if secrets.get(name)]
    copying = threading.Thread(target=copy_output, args=(process.stdout, given), daemon=True)
    copying.start()
    verdict, reason = watch(spec, step, process, state)
    copying.join(OUTPUT_S)  # what the step left running may hold its output open
    seconds = time.time() - record["began"]
    record.update(rc=process.returncode, seconds=seconds)
    say(f"=== {step['name']} ended with {process.returncode} after {seconds:.1f} s{reason and ': ' + reason}")
    return verdict, reason


def copy_output(output: IO[bytes], secrets: list[bytes]) -> None:
    """Copies what a step prints into the log, without its secrets."""
    held = b""
    while True:
        piece = os.read(output.fileno(), PIECE_BYTES)
        held += piece
        for secret in secrets:
            held = held.replace(secret, b"[secret removed]")
        # What may be the beginning of a secret waits for the rest.
        kept = max((beginning(held, secret) for secret in secrets), default=0) if piece else 0
        shown, held = held[: len(held) - kept], held[len(held) - kept :]
        with contextlib.suppress(OSError):  # a full disk: the step goes on, and its log ends
            os.write(1, shown)
        if not piece:
            return


def beginning(text: bytes, secret: bytes) -> int:
    """How many bytes at the end of a text are the beginning of a secret."""
    return next((size for size in range(min(len(text), len(secret) - 1), 0, -1) if text.endswith(secret[:size])), 0)


def watch(
    spec: dict[str, Any], step: dict[str, Any], process: subprocess.Popen[bytes], state: dict[str, Any]
) -> tuple[str, str]:
    """Waits for a step, and ends it for the reasons that there are. Returns verdict and reason."""
    began = grew = time.time()
    size, beat, looked_at_gpus = -1, 0.0, 0.0
    while process.poll() is None:
        now = time.time()
        new_size = LOG.stat().st_size
        if new_size != size:
            size, grew = new_size, now
        if now - beat >= HEARTBEAT_S:
            beat = now
            if now - looked_at_gpus >= GPU_EVERY_S:
                looked_at_gpus, state["gpus"] = now, look_at_gpus()
            state.update(heartbeat=now, disk_free_bytes=shutil.disk_usage(WORK).free)
            try_save(STATUS, state)
        verdict, reason = "timeout", ""
        if CANCEL.exists():
            verdict, reason = "cancelled", "cancelled"
        elif now > spec["deadline"]:
            reason = "the run's time or money is over"
        elif now - began > step["timeout"]:
            reason = f"the step took longer than {step['timeout']:g} s"
        elif spec["stall"] and now - grew > spec["stall"]:
            reason = f"the log has not grown for {spec['stall']:g} s"
        if reason:
            end_group(process, spec["kill_grace"])
            return verdict, reason
        time.sleep(LOOK_S)
    code = process.returncode
    return ("succeeded", "") if code == 0 else ("failed", f"the step {step['name']} ended with {code}")


def end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Asks a step and all that it started to end, then ends them."""
    kill_group(process.pid, signal.SIGTERM)
    deadline = time.time() + grace_s
    while process.poll() is None and time.time() < deadline:
        time.sleep(LOOK_S)
    kill_group(process.pid, signal.SIGKILL)
    process.wait()


def kill_group(group: int, number: int) -> None:
    """Sends a signal to a group of processes, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def kill_marked(run: str) -> None:
    """Ends what the steps started and what left their groups, as torchrun's processes do: all know the run's id. Where
    there is no /proc, nothing is found."""
    mark = f"EXPERIMENT_ID={run}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
            if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


def look_at_gpus() -> list[str]:
    """A line for each GPU, as nvidia-smi says; none where there is none."""
    try:
        done = subprocess.run(GPU_QUERY, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.decode("utf-8", "replace").splitlines()


def arm(guard: dict[str, str]) -> bool:
    """Keeps the program with which the machine ends itself, if it says that it could."""
    if not guard["program"]:
        return False
    GUARD.write_text(guard["program"], "utf-8")
    return subprocess.run([sys.executable, str(GUARD), guard["argument"], "check"], check=False).returncode == 0


def wait_for_collection(spec: dict[str, Any]) -> None:
    """Gives whoever fetches the results time for it, counted from now and from every sign of life; then the machine
    ends itself, and this process with it."""
    ended = time.time()
    while time.time() - max(ended, LEASE.stat().st_mtime) < spec["collect_grace"]:
        time.sleep(min(5.0, max(LOOK_S, spec["collect_grace"] / 10)))
    while True:
        subprocess.run([sys.executable, str(GUARD), spec["guard"]["argument"]], check=False)
        time.sleep(GUARD_EVERY_S)


def mark_of(pid: int) -> str:
    """Something that says of a process whether it is still the same one; empty if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else f"{pid} {fields[19]}"
    except OSError:
        if Path("/proc/self").exists():
            return ""
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return str(pid)
    return ""


def end() -> None:
    """Ends the supervisor and all that its steps started, at once. The groups of a job that has ended are gone: their
    numbers may be anybody's by now."""
    status = load(STATUS) if STATUS.exists() else {}
    if status and is_running(status):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(str(status["process"]).split()[0]), signal.SIGKILL)
        for group in status.get("groups", []):
            kill_group(group, signal.SIGKILL)
        kill_marked(load(SPEC)["id"])


def is_running(status: dict[str, Any]) -> bool:
    """Whether the process that runs the steps is still there."""
    mark = str(status["process"])
    return mark_of(int(mark.split()[0])) == mark


def has_ended() -> bool:
    """Whether nothing is added to the log any more."""
    status = load(STATUS)
    return status["job"] != "running" or not is_running(status)


def say(text: str) -> None:
    """A line of the supervisor's own in the log."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode("utf-8", "replace"))
