"""An S3 server on this machine: moto's, with every fault on demand in front of it."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "lab"
Answer = Iterable[bytes]


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str


class QuietHandler(WSGIRequestHandler):
    """Says nothing of requests and of clients that went away."""

    def log(self, *_: Any) -> None: ...

    def connection_dropped(self, *_: Any) -> None: ...


@functools.cache
def one_moto() -> DomainDispatcherApplication:
    """Made once; its buckets are one state of the process in any case."""
    return DomainDispatcherApplication(create_backend_app)


class FakeS3:
    """A server with one bucket, for a `with` statement. A fault is a function of a request: True, and it is struck."""

    def __init__(self) -> None:
        self.requests: list[Asked] = []
        self.refuses: tuple[int, str] | None = None
        """Every request is answered with this status and S3 code."""
        self.is_cut: Callable[[Asked], bool] = lambda _: False
        """The connection is closed in the middle of what is uploaded."""
        self.quota_bytes: int | None = None
        """No upload is taken that is larger."""
        self.flips: Callable[[Asked], bool] = lambda _: False
        """What is uploaded is kept with one byte changed."""
        self.before: Callable[[Asked], None] = lambda _: None
        """Called before each request is answered: it may wait, or change the world."""
        self._moto = one_moto()
        self._server: Any = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=QuietHandler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> FakeS3:
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()
        self._thread.start()
        self._backend.create_bucket(BUCKET, "us-east-1")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def _backend(self) -> Any:
        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]

    def names(self) -> set[str]:
        """The keys in the bucket."""
        return set(self._backend.buckets[BUCKET].keys.keys())

    def get(self, name: str) -> bytes:
        content: bytes = self._backend.get_object(BUCKET, name).value
        return content

    def set(self, name: str, content: bytes) -> None:
        self._backend.put_object(BUCKET, name, content)

    def remove(self, name: str) -> None:
        self._backend.delete_object(BUCKET, name)

    def puts(self, ending: str = "") -> list[str]:
        """The keys that were uploaded, in order."""
        return [one.path for one in self.requests if one.method == "PUT" and one.path.endswith(ending)]

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Answer:
        asked = Asked(environ["REQUEST_METHOD"], environ["PATH_INFO"].removeprefix(f"/{BUCKET}/"))
        self.requests.append(asked)
        self.before(asked)
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if self.is_cut(asked):
            environ["wsgi.input"].read(length // 2)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        if self.refuses is not None or (self.quota_bytes is not None and length > self.quota_bytes):
            environ["wsgi.input"].read(length)
            status, code = self.refuses or (507, "QuotaExceeded")
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>the server says {code}</Message></Error>"
            start(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
            return [text.encode()] if asked.method != "HEAD" else []

        def start_once(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            # The server names itself already, and a strict client refuses a second name.
            return start(status, [one for one in headers if one[0].lower() != "server"], *rest)

        answer: Answer = self._moto(environ, start_once)
        if asked.method == "PUT" and self.flips(asked):
            body = self.get(asked.path)
            self.set(asked.path, body[:-1] + bytes([body[-1] ^ 1]))
        return answer
