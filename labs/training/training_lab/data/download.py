"""One file over HTTP, verified: resumed after a broken connection or a killed process, hashed before it is used.

A hub's own client checks the size alone, and Parquet readers do not notice a flipped bit in a page: so nothing is
parsed before its SHA-256 is what it should be.
"""

from __future__ import annotations

import hashlib
import http
import random
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from experiment_runner.durable import sync_file, sync_folder
from training_lab.data.lock import waiting_lock
from training_lab.errors import LabError, UserError
from training_lab.progress import Progress

if TYPE_CHECKING:
    import requests

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
TIMEOUT_S = (10, 60)
"""Seconds until a server must accept the connection, and between two pieces of its answer."""
ATTEMPTS = 6
"""Failures in a row, without a byte received in between, after which the download is given up."""
LONGEST_WAIT_S = 300.0
USER_AGENT = "training-lab"


class RetryError(Exception):
    """A failure that may pass."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def fetch_file(url: str, sha256: str, size: int | None, path: Path, token: str | None, progress: Progress) -> None:
    """Puts the file at `url` at `path`, if its content has the hash; otherwise nothing is left there.

    What was received stays in `<path>.partial`, so that another process goes on from it. `token` is sent to the host
    of `url` alone. Raises LabError with what to do if it cannot be had.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with waiting_lock(path.with_name(path.name + ".lock"), f"Another process downloads {path.name}", progress):
            if path.exists():  # the other process had it
                return
            for is_first in (True, False):
                digest = receive(url, size, partial, token, progress)
                if digest == sha256:
                    break
                partial.unlink()
                # The part that an earlier process left may have been bad; one that came in one go is what it is.
                if not is_first:
                    raise LabError(
                        f"{url}: has SHA-256 {digest}, expected {sha256}; not used, twice. The server, a proxy or the "
                        "connection changes the file"
                    )
            partial.replace(path)
            sync_folder(path.parent)
    except LabError as error:
        if partial.exists() and not partial.stat().st_size:
            partial.unlink()
        raise type(error)(f"{error}; or put the file at {path} yourself") from error
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be written: {error.strerror}; free some space, or choose another "
            "data.cache_dir"
        ) from error


class PartialFile:
    """What was received so far, and its hash."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            self.count(chunk)

    def count(self, chunk: bytes) -> None:
        self.digest.update(chunk)
        self.size += len(chunk)

    def append(self, chunk: bytes) -> None:
        self.file.write(chunk)
        self.count(chunk)

    def restart(self) -> None:
        """Forgets everything."""
        self.file.truncate(0)
        self.size, self.digest = 0, hashlib.sha256()


def receive(url: str, size: int | None, path: Path, token: str | None, progress: Progress) -> str:
    """Brings the file at `path` to its full size, and returns the SHA-256 of all of it."""
    with open(path, "a+b") as file:
        partial = PartialFile(file)

        def attempt() -> str:
            receive_rest(url, size, partial, token, progress)
            sync_file(file)
            return partial.digest.hexdigest()

        return patiently(attempt, lambda: partial.size, url, progress)


def patiently(attempt: Callable[[], T], reached: Callable[[], int], url: str, progress: Progress) -> T:
    """What `attempt` returns; a RetryError is waited out. Raises LabError after ATTEMPTS of them in a row that came no
    further than was `reached` before."""
    failures, furthest = 0, reached()
    while True:
        try:
            return attempt()
        except RetryError as error:
            failures = 1 if reached() > furthest else failures + 1
            furthest = max(furthest, reached())
            if failures >= ATTEMPTS:
                kept = f"; {reached():,} bytes are kept, the same command goes on from there" if reached() else ""
                raise LabError(f"{url}: cannot be downloaded: {error} ({failures} times){kept}") from error
            wait_s = min(error.wait_s if error.wait_s is not None else backoff_s(failures), LONGEST_WAIT_S)
            progress.note(f"{error}; trying again in {wait_s:.0f} s")
            time.sleep(wait_s)


def backoff_s(failures: int) -> float:
    """1, 2, 4, ... seconds, each up to a half longer so that many clients do not come back at once."""
    return float(2 ** (failures - 1)) * (1 + random.random() / 2)


def receive_rest(url: str, size: int | None, partial: PartialFile, token: str | None, progress: Progress) -> None:
    """Asks for what is missing and appends it. Raises RetryError if less came than was promised."""
    import requests
    import urllib3

    if size is not None and partial.size > size:
        partial.restart()
    if size is not None and partial.size == size:
        return
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if partial.size:
        headers["Range"] = f"bytes={partial.size}-"
    try:
        with requests.get(url, headers=headers, auth=bearer(token), stream=True, timeout=TIMEOUT_S) as answer:
            refuse_bad_answer(answer, url)
            if not continues_at(answer, partial.size):
                partial.restart()
                if answer.status_code != http.HTTPStatus.OK:
                    raise RetryError("the server does not go on where the download ended; from the beginning", 0)
            promised = size if size is not None else partial.size + int(answer.headers.get("Content-Length", 0))
            began, first = time.monotonic(), partial.size
            # What is here so far; `iter_content` gathers whole chunks, and drops the last where the connection breaks.
            while chunk := answer.raw.read1(CHUNK_BYTES):
                partial.append(chunk)
                speed = (partial.size - first) / max(time.monotonic() - began, 1e-3)
                figures = f"{partial.size / 1e6:,.0f} MB, {speed / 1e6:,.1f} MB/s"
                progress.show(f"Downloading {url.rsplit('/', 1)[-1]}", partial.size, promised, figures)
                if size is not None and partial.size > size:
                    raise LabError(f"{url}: is larger than the {size:,} bytes that it should have; not used")
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise broken(error, url) from error
    if partial.size < promised:
        raise RetryError(f"the connection ended after {partial.size:,} of {promised:,} bytes")


def broken(error: Exception, url: str) -> Exception:
    """A failed request as a RetryError, or as a LabError if it would only fail again."""
    import requests

    lasting = (requests.exceptions.SSLError, requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema)
    if isinstance(error, lasting):
        return LabError(f"{url}: cannot be asked: {reason_of(error)}")
    return RetryError(f"the connection broke: {reason_of(error)}")


def continues_at(answer: requests.Response, received: int) -> bool:
    """Whether the answer is the rest of the file from byte `received` on; a server may ignore that it was asked."""
    says = answer.headers.get("Content-Range", "")
    return answer.status_code == http.HTTPStatus.PARTIAL_CONTENT and says.startswith(f"bytes {received}-")


def refuse_bad_answer(answer: requests.Response, url: str) -> None:
    """Raises RetryError for a status that may pass, LabError for one that will not."""
    status = answer.status_code
    if status == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or status < 400:
        return
    says = f"the server answers {status} {answer.headers.get('X-Error-Message') or answer.reason}"
    if status in (http.HTTPStatus.REQUEST_TIMEOUT, http.HTTPStatus.TOO_MANY_REQUESTS) or status >= 500:
        raise RetryError(says, retry_after_s(answer.headers.get("Retry-After")))
    advice = {401: "; set HF_TOKEN to a token that may read it", 403: "; set HF_TOKEN to a token that may read it"}
    raise LabError(f"{url}: cannot be downloaded: {says}{advice.get(status, '')}")


def retry_after_s(text: str | None) -> float | None:
    """The seconds that a Retry-After header asks for: a number or a date; None if it says neither."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def bearer(token: str | None) -> Callable[[Any], Any]:
    """Puts a token on the request itself. `requests` takes it off when it is sent on to another host; given as a
    function, it is not replaced by what a .netrc file says."""

    def sign(request: Any) -> Any:
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        return request

    return sign


def reason_of(error: Exception) -> str:
    """The innermost reason of a failed request: the outer ones only repeat its address."""
    while isinstance(error.__cause__ or error.__context__, Exception):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(error) or type(error).__name__
