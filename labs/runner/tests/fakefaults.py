"""What a test has the fake provider answer in place of what it would: once, or always, by the name of an operation."""

from __future__ import annotations

import http
import http.client
import json
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fakewire import Answer


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


class Faults:
    """The replies that are asked for."""

    def __init__(self) -> None:
        self._scripts: defaultdict[str, deque[Reply]] = defaultdict(deque)
        self._always: dict[str, Reply] = {}

    def script(self, operation: str, *replies: Reply) -> None:
        """The next calls of the operation get these, one each."""
        self._scripts[operation].extend(replies)

    def always(self, operation: str, reply: Reply) -> None:
        self._always[operation] = reply

    def never(self, operation: str) -> None:
        """Ends what `script` and `always` asked of the operation."""
        self._always.pop(operation, None)
        self._scripts.pop(operation, None)

    def next_reply(self, operation: str) -> Reply:
        """What this call of the operation gets."""
        script = self._scripts[operation]
        return script.popleft() if script else self._always.get(operation, Reply())


def made(reply: Reply) -> Answer:
    """The answer that a scripted reply describes."""
    if reply.body is None and reply.status == http.HTTPStatus.NO_CONTENT:
        return Answer(reply.status, headers=dict(reply.headers))
    body, kind = reply.body, "text/plain"
    if body is None:
        title = reply.title or http.client.responses.get(reply.status, "Error")
        body = {"title": title, "status": reply.status, "detail": reply.detail or title.lower()}
        kind = "application/problem+json"
    elif not isinstance(body, (str, bytes)):
        kind = "application/json"
    text = body if isinstance(body, (str, bytes)) else json.dumps(body)
    content = text.encode() if isinstance(text, str) else text
    return Answer(reply.status, content, {"Content-Type": reply.content_type or kind} | dict(reply.headers))
