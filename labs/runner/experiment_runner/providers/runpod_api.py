"""RunPod's REST API v2, over urllib. v1 is retired, and GraphQL has an end date: neither is used.

The edge in front of the API answers urllib's own User-Agent with 403 "error code: 1010", so the runner names itself.
The key travels in a header, to the API's own host alone: redirects are not followed.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from experiment_runner import __version__
from experiment_runner.errors import InputError, RunnerError

DEFAULT_URL = "https://api.runpod.io/v2"
CONSOLE_URL = "https://console.runpod.io/pods"
USER_AGENT = f"experiment-runner/{__version__}"
TIMEOUT_S = 30.0
QUIET_S = 0.75
"""A stream of log lines has no mark where the past ends: after so much silence it has."""
LONGEST_WAIT_S = 120.0
TRIES = 4
PAGE = 1000


class ApiError(RunnerError):
    """The API refused, or nobody could tell."""

    exit_code = 50

    def __init__(self, status: int, detail: str, what: str, request_id: str = "") -> None:
        self.status, self.detail = status, detail
        named = f" (request {request_id})" if request_id else ""
        super().__init__(f"RunPod: {what}: {explain(status, detail)}{named}")

    @property
    def is_definite(self) -> bool:
        """Whether it is sure that nothing was done: the API itself said no."""
        return 400 <= self.status < 500


def explain(status: int, detail: str) -> str:
    """An answer in words, with what to do."""
    advice = {
        0: "check the connection",
        401: "the key was not accepted; check RUNPOD_API_KEY in .env",
        402: "the account's balance does not pay for it; top it up in RunPod's console",
        403: "the key has no right to this; give it read and write access to pods",
        410: "this API was retired; a newer runner is needed",
        429: "too many requests; wait some minutes",
    }
    if status == 403 and "1010" in detail:
        return "HTTP 403, error code 1010: RunPod's edge refused the program, not the key; a newer runner is needed"
    said = f"HTTP {status}: {detail}" if status else detail
    return f"{said}; {advice[status]}" if status in advice else said


class Answer(NamedTuple):
    """What came back."""

    status: int
    body: Any


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key along."""

    def redirect_request(self, *_: Any) -> None:
        return None


class RunpodApi:
    """Calls of the API."""

    def __init__(self, key: str, url: str = DEFAULT_URL) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "localhost"):
            raise InputError(f"RUNPOD_API_URL: {url!r} is not an https address, and the key would travel in the open")
        self.key, self.url = key, url.rstrip("/")
        self.opener = urllib.request.build_opener(NoRedirect)

    def call(
        self, method: str, path: str, body: Any = None, query: dict[str, str] | None = None, *, is_safe: bool = True
    ) -> Answer:
        """One call. `is_safe`: it may be repeated, so whatever passes is tried again. Raises ApiError."""
        for attempt in range(TRIES):
            try:
                return self.call_once(method, path, body, query)
            except ApiError as error:
                is_passing = error.status == 429 or (is_safe and not error.is_definite)
                if not is_passing or attempt + 1 == TRIES:
                    raise
                self.pause(min(LONGEST_WAIT_S, max(getattr(error, "retry_after_s", 0.0), 0.5 * 2**attempt)))
        raise AssertionError

    def pause(self, seconds: float) -> None:
        """Waits before a call is tried again."""
        time.sleep(seconds)

    def call_once(self, method: str, path: str, body: Any, query: dict[str, str] | None) -> Answer:
        """One request."""
        what = f"{method} {path}"
        try:
            with self.open(method, path, body, query) as response:
                text = response.read()
                request_id = response.headers.get("x-request-id", "")
        except urllib.error.HTTPError as error:
            with error:
                raise refusal(error, what) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ApiError(0, f"no answer ({reason})", what) from error
        if response.status == 204 or not text:
            return Answer(response.status, None)
        try:
            return Answer(response.status, json.loads(text))
        except ValueError as error:
            raise ApiError(0, f"HTTP {response.status} with {shown(text)} instead of JSON", what, request_id) from error

    def open(
        self, method: str, path: str, body: Any = None, query: dict[str, str] | None = None, accept: str = ""
    ) -> Any:
        """Sends a request; the answer's body is still to be read."""
        address = f"{self.url}{path}" + (f"?{urlencode(query, quote_via=quote)}" if query else "")
        request = urllib.request.Request(address, method=method)
        request.add_header("Authorization", f"Bearer {self.key}")
        request.add_header("User-Agent", USER_AGENT)
        request.add_header("Accept", accept or "application/json")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        return self.opener.open(request, timeout=TIMEOUT_S)

    def pods(self) -> list[dict[str, Any]]:
        """Every pod of the account, from all pages. Raises ApiError rather than leaving any out."""
        found: list[dict[str, Any]] = []
        query = {"limit": str(PAGE)}
        while True:
            page = self.call("GET", "/pods", query=query).body
            if not isinstance(page, dict) or not isinstance(page.get("pods"), list):
                raise ApiError(0, "the listing of pods has no pods", "GET /pods")
            found += page["pods"]
            pagination = page.get("pagination") or {}
            if not pagination.get("hasNextPage"):
                return found
            query = {"limit": str(PAGE), "cursor": str(pagination["nextCursor"])}

    def log_lines(self, pod: str, source: str, tail: int = 5000) -> list[str]:
        """The last lines that a pod's container, or the system about it, printed."""
        path, query = f"/pods/{quote(pod)}/logs", {"source": source, "tail": str(tail)}
        try:
            with self.open("GET", path, query=query, accept="text/event-stream") as response:
                if not response.headers.get_content_type() == "text/event-stream":
                    raise ApiError(0, "the log is no stream of events", f"GET {path}")
                return list(events(response))
        except urllib.error.HTTPError as error:
            with error:
                raise refusal(error, f"GET {path}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(0, f"no answer ({error})", f"GET {path}") from error


def events(response: Any) -> Iterator[str]:
    """The lines in a stream of events, until it falls silent."""
    connection = getattr(getattr(response.fp, "raw", None), "_sock", None)
    if connection is not None:
        connection.settimeout(QUIET_S)
    try:
        for raw in response:
            if raw.startswith(b"data:"):
                try:
                    yield str(json.loads(raw[5:])["line"])
                except (ValueError, KeyError, TypeError):
                    continue
    except (TimeoutError, socket.timeout):  # two things before Python 3.10
        return


def refusal(error: urllib.error.HTTPError, what: str) -> ApiError:
    """An answer that is not a success, whatever its body is."""
    try:
        text = error.read()
    except (OSError, http.client.HTTPException):
        text = b""
    detail = shown(text) or str(error.reason)
    try:
        said = json.loads(text)
        detail = "; ".join(
            [str(said.get("detail") or said.get("error") or detail), *map(str, said.get("errors") or [])]
        )
    except (ValueError, AttributeError, TypeError):
        pass
    found = ApiError(error.code, detail, what, error.headers.get("x-request-id", ""))
    vars(found)["retry_after_s"] = seconds_to_wait(error.headers)
    return found


def seconds_to_wait(headers: Any) -> float:
    """How long a 429 asks to wait: its Retry-After, or the longest of the windows that are used up."""
    waits = [float(value) for value in [headers.get("Retry-After", "")] if re.fullmatch(r"\d+", value.strip())]
    limits = headers.get("RateLimit", "")
    waits += [float(match[2]) for match in re.finditer(r"r=(\d+);\s*t=(\d+)", limits) if match[1] == "0"]
    return max(waits, default=0.0)


def shown(text: bytes) -> str:
    """A body as one short line: of a page, its title."""
    words = text.decode("utf-8", "replace")
    title = re.search(r"<title>(.*?)</title>", words, re.IGNORECASE | re.DOTALL)
    plain = f"a web page ({title[1]})" if title else "a web page" if "<html" in words.lower() else words
    return " ".join(plain.split())[:200]
