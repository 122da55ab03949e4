"""What the runner asks of a target, through the supervisor that it sent there."""

from __future__ import annotations

import io
import json
import shlex
import zipfile
from pathlib import Path
from typing import Any

from experiment_runner.bundle import Bundle
from experiment_runner.errors import RunnerError
from experiment_runner.session import CommandFailed, Session

AGENT = Path(__file__).parent / "agent"
MAIN = "from agent.commands import main\n\nmain()\n"
NOTHING = '{"job": "none"}'
A_LONG_TIME_AGO = (1980, 1, 1, 0, 0, 0)
MANIFEST_TIMEOUT_S = 3600.0


class Target:
    """A working folder on a machine."""

    def __init__(self, session: Session, work: str) -> None:
        self.session, self.work = session, work

    def command(self, *words: str) -> str:
        """The command line that asks the supervisor something."""
        return shlex.join([self.session.python, f"{self.work}/control/agent.pyz", *words])

    def ask(self, *words: str, stdin: bytes = b"", timeout_s: float = 60.0) -> Any:
        """Asks the supervisor, and returns its answer."""
        return self.read(words[0], self.session.run(self.command(*words), stdin, timeout_s))

    def read(self, question: str, answer: bytes) -> Any:
        """An answer as JSON. Raises CommandFailed for anything else."""
        try:
            return json.loads(answer)
        except ValueError as error:
            shown = answer[:200].decode("utf-8", "replace")
            raise CommandFailed(f"the supervisor answered {question!r} with {shown!r}, which is not JSON") from error

    def install(self) -> None:
        """Makes the folder, for its owner alone, and sends the supervisor there."""
        control, agent = shlex.quote(f"{self.work}/control"), shlex.quote(f"{self.work}/control/agent.pyz")
        command = f"umask 077 && mkdir -p {control} && cat > {agent}.new && mv {agent}.new {agent}"
        self.session.run(command, agent_archive())

    def push(self, bundle: Bundle, timeout_s: float = 600.0) -> None:
        """Sends the files; the target has hashed each of them when this returns."""
        expected = bundle.manifest()
        found = self.ask("receive", stdin=json.dumps(expected).encode() + b"\n" + bundle.archive(), timeout_s=timeout_s)
        if found != expected:
            raise RunnerError("the target says that other files arrived than were sent")

    def start(self, spec: dict[str, Any], secrets: dict[str, str]) -> None:
        """Begins the job, unless it has begun."""
        self.ask("start", stdin=json.dumps({"spec": spec, "secrets": secrets}).encode())

    def status(self) -> dict[str, Any]:
        """What became of the job; `none` where nothing was sent yet."""
        is_there = shlex.quote(f"{self.work}/control/agent.pyz")
        command = f"if [ -f {is_there} ]; then {self.command('status')}; else echo '{NOTHING}'; fi"
        said: dict[str, Any] = self.read("status", self.session.run(command))
        return said

    def cancel(self) -> None:
        """Asks the supervisor to end the job."""
        self.session.run(self.command("cancel"))

    def manifest(self) -> dict[str, Any]:
        """Size and SHA-256 of every result, and what is left out."""
        said: dict[str, Any] = self.ask("manifest", timeout_s=MANIFEST_TIMEOUT_S)
        return said


def agent_archive() -> bytes:
    """The supervisor as one file that Python runs; the same bytes for the same code."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py", A_LONG_TIME_AGO), MAIN)
        for path in sorted(AGENT.glob("*.py")):
            archive.writestr(zipfile.ZipInfo(f"agent/{path.name}", A_LONG_TIME_AGO), path.read_text("utf-8"))
    return buffer.getvalue()
