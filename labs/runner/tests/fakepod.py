"""A rented pod on this machine: a container that is really run, with a real sshd behind a proxy that can be cut."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import pwd
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cuttable import CuttableProxy, reserve_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin")
USER = pwd.getpwuid(os.getuid()).pw_name

HOST_KEY_LINE = re.compile(r"SHA256:|\b(ssh|ecdsa|sk)-\S+ AAAA|host ?key|fingerprint", re.IGNORECASE)

LogLine = tuple[int, str, str]
"""Its number in the whole log of the pod, when it came, and its text."""

START = r"""#!/bin/bash
# What the official image does at its start, as far as anybody sees of it.
cd {container}
if [[ $PUBLIC_KEY ]]; then
    echo "Setting up SSH..."
    echo "$PUBLIC_KEY" >> authorized_keys
    if [ ! -f etc_ssh/ssh_host_ed25519_key ]; then
        ssh-keygen -t ed25519 -f etc_ssh/ssh_host_ed25519_key -q -N ''
        echo "ED25519 key fingerprint:"
        ssh-keygen -lf etc_ssh/ssh_host_ed25519_key.pub
    fi
    {serve} &
    echo "SSH host keys:"
    for key in etc_ssh/*.pub; do
        echo "Key: $key"
        ssh-keygen -lf "$key"
    done
fi
echo "Exporting environment variables..."
printenv | grep -E '^[A-Z_][A-Z0-9_]*=' | grep -v '^PUBLIC_KEY' |
    awk -F = '{{ val = $0; sub(/^[^=]*=/, "", val); print "export " $1 "=\"" val "\"" }}' > rp_environment
echo "Start script(s) finished, Pod is ready to use."
exec sleep infinity
"""

CHEAP_ENCRYPTION = """
KexAlgorithms curve25519-sha256
Ciphers aes128-gcm@openssh.com
"""
"""Halves the time of a connection. The tests make hundreds, and none is about its encryption."""

SSHD_CONFIG = (
    CHEAP_ENCRYPTION
    + """\
Port {port}
ListenAddress 127.0.0.1
HostKey {host_key}
AuthorizedKeysFile {container}/authorized_keys
PidFile none
UsePAM no
StrictModes no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 1000
PrintMotd no
SetEnv {environment}
ForceCommand {command}
"""
)

SESSION = 'cd {home} && command="$SSH_ORIGINAL_COMMAND" && unset SSH_ORIGINAL_COMMAND && exec /bin/bash -c "$command"'
"""A session begins in the home of the container, and not in that of whoever runs the tests."""


class FakePod:
    def __init__(
        self,
        body: Mapping[str, Any],
        folder: Path,
        pod_id: str = "",
        *,
        no_sshd: bool = False,
        silent: bool = False,
        wrong_host_key: bool = False,
        system_lines: tuple[str, ...] = (),
    ) -> None:
        self.body = body
        self.id = pod_id or secrets.token_hex(7)
        self.key = f"pod-scoped-{self.id}"
        self.status = "PROVISIONING"
        self.no_sshd = no_sshd
        self.silent = silent
        """Nothing of the host keys gets into the log, whoever prints it."""
        self.wrong_host_key = wrong_host_key
        """sshd uses another key than the one in etc_ssh, which everybody prints."""
        self.container_log: list[LogLine] = []
        self.system_log: list[LogLine] = []
        self.news = threading.Condition()
        """Told of every line, and of the end."""
        self.is_deleted = False
        self.num_starts = 0
        self._lock = threading.RLock()
        self._num_lines = 0
        self._folder = folder / self.id
        self._own_mount: Path | None = None
        self._main: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._sshd_port = reserve_port()
        self.container = self._folder / "container-0"
        self.proxy = self._new_proxy()
        self.say(f"create container {body.get('image', '')}", "system")
        for line in system_lines:
            self.say(line, "system")

    @property
    def is_running(self) -> bool:
        return self._main is not None

    @property
    def mount(self) -> Path | None:
        """What outlives the container; nothing where no mount was asked for."""
        mounts = self.body.get("mounts", {})
        for asked in [mounts.get("persistent"), *mounts.get("network", ())]:
            if asked:
                return Path(asked["path"])
        return None

    def start(self) -> None:
        with self._lock:
            if self.is_running or self.is_deleted:
                return
            if SSHD is None:
                raise FileNotFoundError("sshd")
            self._make_mount()
            self._run_container()
            self.proxy.refuse(False)

    def stop(self) -> None:
        """Ends the container and all in it; its disk, its host key and its port are gone, the mount stays."""
        with self._lock:
            if self.is_running:
                self._end_container()
                old = self.proxy
                self.proxy = self._new_proxy()  # made before the old one is closed, so that its port is another
                old.close()

    def restart_container(self) -> None:
        """Another container at the same address, as after the end of the main process."""
        with self._lock:
            if self.is_running:
                self._end_container()
                self._run_container()

    def delete(self) -> None:
        with self._lock:
            if not self.is_deleted:
                self.close()
                if self._own_mount is not None:
                    shutil.rmtree(self._own_mount, ignore_errors=True)

    def close(self) -> None:
        """Ends everything and leaves the mount."""
        with self._lock:
            self._end_container()
            self.proxy.close()
            self._sshd_port.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        with self.news:
            self.is_deleted = True
            self.news.notify_all()

    def say(self, line: str, source: str = "container") -> None:
        """Writes a line into a log."""
        with self.news:
            self._num_lines += 1
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            log = self.container_log if source == "container" else self.system_log
            log.append((self._num_lines, now, line))
            self.news.notify_all()

    def processes(self) -> set[int]:
        """The ids of all that the container or a session in it started, whatever group it went into."""
        marks = (f"RUNPOD_POD_ID={self.id}\0".encode(), os.fsencode(self._folder))
        parents = _parents()
        found = {pid for pid in parents if any(mark in _environ(pid) + _working_folder(pid) for mark in marks)}
        if self._main is not None and self._main.poll() is None:
            found.add(self._main.pid)
        # sshd overwrites its environment with its title, but all of it descends from what is found already.
        grown = True
        while grown:
            children = {pid for pid, parent in parents.items() if parent in found} - found
            found |= children
            grown = bool(children)
        return found - {os.getpid()}

    def _new_proxy(self) -> CuttableProxy:
        proxy = CuttableProxy(self._sshd_port.getsockname()[1])
        proxy.refuse(True)
        return proxy

    def _make_mount(self) -> None:
        if self.mount is None or self.mount.exists():
            return
        self.mount.mkdir(parents=True)
        if "persistent" in self.body["mounts"]:
            self._own_mount = self.mount  # only what was made here is ever deleted

    def _run_container(self) -> None:
        self.num_starts += 1
        self.container = self._folder / f"container-{self.num_starts}"
        home, keys = self.container / "home", self.container / "etc_ssh"
        for made in (home, keys):
            made.mkdir(parents=True)
        start = self.container / "start.sh"
        start.write_text(START.format(container=shlex.quote(str(self.container)), serve=self._serve_command(home)))
        start.chmod(0o755)
        command = [*self.body.get("entrypoint", ()), *self.body.get("cmd", ())] or ["/start.sh"]
        command = [part.replace("/etc/ssh", str(keys)).replace("/start.sh", str(start)) for part in command]
        self.say("start container", "system")
        self._main = subprocess.Popen(
            command,
            cwd=home,
            env=self.body.get("env", {}) | self._session_environment(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._main,), daemon=True)
        self._reader.start()

    def _session_environment(self, home: Path) -> dict[str, str]:
        """What a session over SSH has too; not the rest, just as with a real pod."""
        path = os.environ.get("PATH", os.defpath)
        return {"PATH": path, "HOME": str(home), "RUNPOD_POD_ID": self.id, "RUNPOD_API_KEY": self.key}

    def _serve_command(self, home: Path) -> str:
        if self.no_sshd:
            return ":"
        host_key = self.container / "etc_ssh" / "ssh_host_ed25519_key"
        other_key = self.container / "other_key"
        config = self.container / "sshd_config"
        environment = " ".join(f'"{name}={value}"' for name, value in self._session_environment(home).items())
        text = SSHD_CONFIG.format(
            port=self._sshd_port.getsockname()[1],
            host_key=other_key if self.wrong_host_key else host_key,
            container=self.container,
            environment=environment,
            command=SESSION.format(home=shlex.quote(str(home))),
        )
        if _openssh_version() >= (9, 8):
            text += "PerSourcePenalties no\n"  # all tests come from one address, and some are refused on purpose
        config.write_text(text)
        if os.geteuid() == 0:  # only then it wants that folder, and only then we may make it
            with contextlib.suppress(OSError):
                Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        run = f"{SSHD} -D -e -f {shlex.quote(str(config))} 2>sshd.log"
        if self.wrong_host_key:
            return f"{{ ssh-keygen -t ed25519 -f other_key -q -N ''; exec {run}; }}"
        return run

    def _read(self, main: subprocess.Popen[str]) -> None:
        assert main.stdout is not None
        for line in main.stdout:
            if not (self.silent and HOST_KEY_LINE.search(line)):
                self.say(line.rstrip("\n"))

    def _end_container(self) -> None:
        main, reader = self._main, self._reader
        if main is None or reader is None or main.stdout is None:
            return
        _kill_all(self.processes)
        main.wait()
        reader.join()
        main.stdout.close()
        self._main = None
        shutil.rmtree(self.container)


@functools.cache
def _openssh_version() -> tuple[int, int]:
    done = subprocess.run(["ssh", "-V"], capture_output=True, encoding="utf-8", check=True)
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stderr)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _parents() -> dict[int, int]:
    """The parent of every living process."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(entry)] = int(parent)
    return parents


def _environ(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "environ").read_bytes()
    except OSError:
        return b""


def _working_folder(pid: int) -> bytes:
    try:
        return os.fsencode(Path("/proc", str(pid), "cwd").readlink())
    except OSError:
        return b""


def _kill_all(find: Callable[[], set[int]]) -> None:
    """Kills what is found, again and again until nothing is; all are halted first, so that none starts another."""
    deadline = time.monotonic() + 20
    while found := find():
        halted: set[int] = set()
        while new := find() - halted:
            for pid in new:
                _send(pid, signal.SIGSTOP)
            halted |= new
        for pid in found | halted:
            _send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of the pod do not end: {sorted(find())}")
        time.sleep(0.005)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
