"""Runs commands on the target: over SSH, or in a shell here. Both are a command line with the target's command at its
end, so that everything else is written once.

The SSH client is the system's own. It is started in a session of its own, so that a Ctrl-C in the terminal reaches the
runner alone, and with an environment without keys. Secrets travel on standard input only: command lines are in the
process lists of both machines.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from experiment_runner.errors import RunnerError
from experiment_runner.redaction import SECRET_NAMES

SSH_FAILED = 255
"""The exit code of ssh for its own failures. A command of ours never ends with it."""
PIECE_BYTES = 1 << 16
LOOK_S = 0.1
"""How long a wait may keep from noticing that the person wants to stop."""


class ConnectionLost(RunnerError):
    """The target cannot be reached, or not any more. What was going on there may go on."""


class CommandFailed(RunnerError):
    """A command on the target ended with an error of its own."""


def never() -> None:
    """Nobody wants to stop."""


class Session(NamedTuple):
    """A way to run commands on a target."""

    prefix: tuple[str, ...]
    """The command line; the target's command is added to its end."""
    is_remote: bool
    python: str = "python3"
    """The target's Python, 3.9 or newer."""
    look: Callable[[], None] = never
    """Called again and again while something is waited for; raises what ends the wait."""

    def open(self, command: str) -> subprocess.Popen[bytes]:
        """Starts a command; its input, output and errors are pipes."""
        try:
            return subprocess.Popen(
                [*self.prefix, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=clean_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise RunnerError(f"{self.prefix[0]}: cannot be started: {error.strerror}; is it installed?") from error

    def run(self, command: str, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
        """Runs a command to its end and returns its output.

        Raises ConnectionLost if the target cannot be reached or does not answer in time, CommandFailed if the command
        fails.
        """
        deadline = time.monotonic() + timeout_s
        pieces: list[bytes] = []
        with self.stream(command, stdin) as output:
            while True:
                piece = output.some_within(max(0.0, deadline - time.monotonic()))
                if piece is None:
                    raise ConnectionLost(f"no answer within {timeout_s:.0f} s")
                if not piece:
                    return b"".join(pieces)
                pieces.append(piece)

    @contextlib.contextmanager
    def stream(self, command: str, stdin: bytes = b"") -> Iterator[Output]:
        """A command whose output is read while it runs. Leaving early ends it."""
        process = self.open(command)
        try:
            yield Output(self, process, stdin)
        finally:
            end(process)

    def check(self, code: int, errors: bytes) -> None:
        """Raises the error that an exit code stands for."""
        said = errors.decode("utf-8", "replace").strip().splitlines()
        words = "; ".join(said[-3:]) or f"exit code {code}"
        if code == SSH_FAILED and self.is_remote:
            raise ConnectionLost(words)
        if code:
            raise CommandFailed(words)


class Output:
    """What a command prints. Threads write its input and read its output, so that whoever waits can be called away."""

    def __init__(self, session: Session, process: subprocess.Popen[bytes], stdin: bytes) -> None:
        self.session, self.process = session, process
        self.pieces: queue.Queue[bytes] = queue.Queue(maxsize=64)
        self.errors: list[bytes] = []
        self.held, self.has_ended = b"", False
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        threading.Thread(target=write_all, args=(process.stdin, stdin), daemon=True).start()
        threading.Thread(target=read_all, args=(process.stdout, self.pieces.put), daemon=True).start()
        self.listening = threading.Thread(target=read_all, args=(process.stderr, self.errors.append), daemon=True)
        self.listening.start()

    def some(self, most: int = PIECE_BYTES) -> bytes:
        """The next bytes, at most so many; empty at the end of a command that succeeded. Raises ConnectionLost or
        CommandFailed for one that did not."""
        while True:
            piece = self.some_within(LOOK_S, most)
            if piece is not None:
                return piece

    def some_within(self, seconds: float, most: int = PIECE_BYTES) -> bytes | None:
        """The same; None if nothing came for so long."""
        deadline = time.monotonic() + seconds
        while not self.held and not self.has_ended:
            try:
                self.held = self.pieces.get(timeout=LOOK_S)
                self.has_ended = not self.held
            except queue.Empty:
                self.session.look()
                if time.monotonic() > deadline:
                    return None
        if self.has_ended and not self.held:
            code = self.process.wait()
            self.listening.join(LOOK_S)  # a grandchild may hold its end open
            self.session.check(code, b"".join(self.errors))
        taken, self.held = self.held[:most], self.held[most:]
        return taken

    def line(self) -> bytes:
        """The next line with its end; empty at the end."""
        line = b""
        while not line.endswith(b"\n"):
            piece = self.some()
            if not piece:
                return line
            before, newline, after = piece.partition(b"\n")
            line += before + newline
            self.held = after + self.held
        return line


def write_all(pipe: IO[bytes], content: bytes) -> None:
    """Writes what a command is given, and closes its input. What is wrong shows in what the command says."""
    with contextlib.suppress(OSError, ValueError), pipe:
        pipe.write(content)


def read_all(pipe: IO[bytes], take: Callable[[bytes], None]) -> None:
    """Hands over what comes out of a pipe, and at its end an empty piece."""
    piece = b" "
    while piece:
        try:
            piece = os.read(pipe.fileno(), PIECE_BYTES)
        except (OSError, ValueError):  # closed by `end`
            piece = b""
        take(piece)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a client and waits for it; its pipes are closed."""
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def local_session(python: str) -> Session:
    """A shell on this machine."""
    return Session(("/bin/sh", "-c"), is_remote=False, python=python)


def ssh_session(host: str, python: str, options: tuple[str, ...]) -> Session:
    """A shell on `host`, reached with these options of ssh."""
    return Session(("ssh", "-T", *options, "--", host), is_remote=True, python=python)


def common_options(silence_s: float, config: str = "") -> tuple[str, ...]:
    """The options of every connection: nobody is asked anything, and a dead one is noticed after `silence_s`."""
    every = max(1, round(silence_s / 4))
    options = {
        "BatchMode": "yes",
        "ClearAllForwardings": "yes",
        "ForwardAgent": "no",
        "ConnectTimeout": str(max(2, min(10, round(silence_s)))),
        "ServerAliveInterval": str(every),
        "ServerAliveCountMax": str(max(1, round(silence_s / every))),
        "LogLevel": "ERROR",
    }
    named = tuple(word for name, value in options.items() for word in ("-o", f"{name}={value}"))
    return (*(("-F", config) if config else ()), *named)


def pinned_options(silence_s: float, key: Path, known_hosts: Path, alias: str, port: int) -> tuple[str, ...]:
    """The options for a machine whose host key is in `known_hosts` under `alias`: that key and no other, whatever its
    address, and nothing of the user's own configuration."""
    options = {
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": f'"{known_hosts}"',
        "GlobalKnownHostsFile": os.devnull,
        "HostKeyAlias": alias,
        "UpdateHostKeys": "no",
        "CheckHostIP": "no",
    }
    named = tuple(word for name, value in options.items() for word in ("-o", f"{name}={value}"))
    return (*common_options(silence_s, os.devnull), "-i", str(key), "-p", str(port), *named)


def clean_environment() -> dict[str, str]:
    """This process's environment without keys: what runs at the end of a session gets those that it is given."""
    kept = {name: value for name, value in os.environ.items() if not SECRET_NAMES.search(name)}
    return {name: value for name, value in kept.items() if not name.startswith("RUNPOD_")}
