"""The wire of the fake provider: requests come in, answers and logs go out, one thread a connection."""

from __future__ import annotations

import contextlib
import http
import http.server
import json
import re
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fakepod import FakePod


class Request(NamedTuple):
    method: str
    path: str
    """With its query."""
    headers: dict[str, str]
    """Their names in small letters."""
    body: bytes


@dataclass
class Answer:
    status: int
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    log_of: FakePod | None = None
    """Its log follows, from these lines on."""
    sources: tuple[str, ...] = ()
    after: int = 0
    drop: bool = False


class ProblemError(Exception):
    """A request that the provider refuses."""

    def __init__(self, status: int, detail: str, errors: list[str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.errors = status, detail, errors


def log_lines(pod: FakePod, sources: tuple[str, ...], after: int) -> list[tuple[int, str, str, str]]:
    """The number, time, source and text of the lines behind that one."""
    with pod.news:
        logs = {"container": pod.container_log, "system": pod.system_log}
        return sorted(
            (number, ts, source, line) for source in sources for number, ts, line in logs[source] if number > after
        )


def resumed_after(last_id: str, lines: list[tuple[int, str, str, str]]) -> int:
    """The number of the last line that was seen."""
    ts, _, number = last_id.partition("/")
    if number.isdigit():
        return int(number)
    if not re.match(r"\d{4}-\d\d-\d\dT", ts):
        raise ProblemError(422, "Last-Event-ID is malformed")
    return max((line[0] for line in lines if line[1] <= ts), default=0)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # so that the end waits for them
    request_queue_size = 64

    def __init__(self, answer: Callable[[Request], Answer], is_closed: threading.Event, problems: list[str]) -> None:
        self.answer, self.is_closed, self.problems = answer, is_closed, problems
        self._connections: set[socket.socket] = set()
        self._connections_lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

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
            self.problems.append(f"{type(error).__name__}: {error}")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.answer(Request(self.command, self.path, headers, body))
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
        while not pod.is_deleted and not self.server.is_closed.is_set():
            lines = log_lines(pod, sources, after)
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
