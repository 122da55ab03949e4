"""An address where copies are kept: `s3://bucket/prefix`, `file:///folder`, or whatever else fsspec knows.

A few operations on files by their names below the address, and one language for what goes wrong, whatever package
speaks to the storage. Credentials come from where that package looks for them (for S3 the environment's
AWS_ACCESS_KEY_ID and the like), never from the address: an address is written into records.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from experiment_runner.redaction import Secrets
from training_lab.errors import LabError, UserError

BLOCK_BYTES = 16 << 20
"""How much is read from the storage at once."""
PARTS_AT_ONCE = 2
"""Parts of a large file that s3fs uploads side by side; each of 50 MB is held in memory, beside the training."""
PROBE_S = 45.0
"""After so long a storage that does not answer is left to the retries during the run."""
FULL = (errno.ENOSPC, errno.EDQUOT)
EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Which extra of this package brings what a protocol needs."""


class StorageError(LabError):
    """The storage could not do something. `kind` names the sort of failure; a lasting one needs a person."""

    def __init__(self, message: str, kind: str, is_lasting: bool) -> None:
        super().__init__(message)
        self.kind, self.is_lasting = kind, is_lasting


class Digest(NamedTuple):
    """What is compared to say that a copy is right."""

    size: int
    sha256: str


def digest_of(content: bytes) -> Digest:
    return Digest(len(content), hashlib.sha256(content).hexdigest())


class Patience(NamedTuple):
    """How long one request waits for the storage, and how often the client tries it anew by itself."""

    connect_s: float = 10.0
    read_s: float = 60.0
    attempts: int = 4


ONE_TRY = Patience(connect_s=5.0, read_s=15.0, attempts=1)


def check_address(address: str) -> str:
    """The address without a slash at its end. Raises UserError if it is none, or has credentials in it."""
    protocol, separator, _ = address.partition("://")
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise UserError(f"the address for copies cannot be read: {error}; it is like s3://bucket/prefix") from error
    if "@" in parts.netloc or parts.query or parts.fragment:
        # Not quoted: the message would be one more place where a secret is.
        raise UserError(
            f"the {protocol}:// address for copies has credentials or options in it, and addresses are written into "
            "the record; leave them out, and set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL "
            "(or what the storage has instead)"
        )
    if not separator or not protocol.isalnum() or "::" in address:
        raise UserError(f"{address}: not an address for copies; write it as s3://bucket/prefix or file:///folder")
    is_local = protocol in ("file", "local", "memory")
    if (not is_local and not parts.netloc) or (protocol in ("file", "local") and not parts.path.startswith("/")):
        raise UserError(f"{address}: names no {'folder' if is_local else 'bucket'}; write it as {protocol}://…")
    if protocol in ("file", "local") and parts.netloc:
        raise UserError(f"{address}: begins with a machine's name; a folder here is file:///{parts.netloc}{parts.path}")
    if ".." in parts.path.split("/"):
        raise UserError(f"{address}: leave the .. out of it")
    return address if address.endswith("://") else address.rstrip("/")


class Storage:
    """The files below an address. Every method raises StorageError."""

    def __init__(self, address: str, patience: Patience = Patience()) -> None:  # noqa: B008 - immutable
        """Raises UserError if what the address needs is not installed, and asks the storage nothing yet."""
        self.address = check_address(address)
        self._fs, root = open_file_system(self.address, patience)
        self._root = root.rstrip("/")

    def sizes(self) -> dict[str, int]:
        """The files there, by name, and their bytes."""
        with translated(self.address):
            found = self._fs.find(self._root, detail=True)
        beginning = self._root + "/"
        return {
            name.removeprefix(beginning): int(facts["size"])
            for name, facts in found.items()
            if name.startswith(beginning) and facts["type"] == "file" and not name.endswith("/")
        }

    def put(self, path: Path, name: str) -> None:
        """Uploads a file. Raises FileNotFoundError if that is gone."""
        try:
            with translated(self.address):
                self._fs.put_file(str(path), self._path(name))
        except StorageError:
            path.stat()  # a file that is gone here is no failure of the storage
            raise

    def put_bytes(self, content: bytes, name: str) -> None:
        with translated(self.address):
            self._fs.pipe_file(self._path(name), content)

    def read(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """The bytes of a file from `start` to `end`, in blocks; less if it is shorter."""
        for begin in range(start, end, BLOCK_BYTES):
            wanted = min(BLOCK_BYTES, end - begin)
            with translated(f"{self.address}/{name}"):
                block: bytes = self._fs.cat_file(self._path(name), start=begin, end=begin + wanted)
            yield block
            if len(block) < wanted:
                break

    def verifies(self, name: str, wanted: Digest) -> bool:
        """Whether a file has this size and SHA-256, by reading all of it."""
        if wanted.size == 0:  # there is no range in nothing
            with translated(f"{self.address}/{name}"):
                return int(self._fs.info(self._path(name))["size"]) == 0
        digest, size = hashlib.sha256(), 0
        for block in self.read(name, 0, wanted.size + 1):  # one more, to see that it ends there
            digest.update(block)
            size += len(block)
        return Digest(size, digest.hexdigest()) == wanted

    def remove(self, name: str) -> None:
        with translated(self.address):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def open_file_system(address: str, patience: Patience) -> tuple[Any, str]:
    """fsspec's object for an address, and the address as that object wants it. Raises UserError if a package lacks."""
    protocol = address.partition("://")[0]
    extra = EXTRAS.get(protocol)
    try:
        import fsspec.core

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        how = f"pip install 'training-lab[{extra}]'" if extra else f"install it ({error})"
        raise UserError(f"{address}: copies there need a package that is not installed: {how}") from error
    except ValueError as error:
        raise UserError(f"{address}: fsspec knows no storage called {protocol}://") from error
    # fsspec remembers objects and listings; another process, or a test, may have changed what they say.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("file", "local"):
        options["auto_mkdir"] = True
    if extra == "s3":
        options["max_concurrency"] = PARTS_AT_ONCE
        options["config_kwargs"] = {
            "connect_timeout": patience.connect_s,
            "read_timeout": patience.read_s,
            "retries": {"total_max_attempts": patience.attempts, "mode": "standard"},
            # Newer checksums are unknown to many storages that speak S3, and each copy is verified by its SHA-256.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
    try:
        file_system, root = fsspec.core.url_to_fs(address, **options)
    except Exception as error:  # each storage has its own ways of refusing an address
        raise UserError(f"{address}: not an address that {protocol}:// takes: {said(error)}") from error
    if extra == "s3":
        file_system.retries = 1  # s3fs would repeat each of the client's attempts five times
    return file_system, root


class translated:
    """Turns what a storage's package raises into a StorageError about `subject`."""

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, LabError):
            raise failure_of(error, self.subject) from error


def failure_of(error: Exception, subject: str) -> StorageError:
    """What went wrong, in words that say what to do."""
    chain = list(causes(error))
    names = {base.__name__ for one in chain for base in type(one).__mro__}
    codes = {code for one in chain for code in codes_of(one)}
    text = said(error)
    if codes & {"QuotaExceeded", "QuotaExceededException", "InsufficientStorage", "XMinioStorageFull", "507"} or any(
        getattr(one, "errno", None) in FULL for one in chain
    ):
        return StorageError(f"{subject}: full: {text}; make room there", "full", True)
    if "NoSuchBucket" in codes:
        return StorageError(f"{subject}: there is no such bucket; create it, or correct the address", "no bucket", True)
    if names & {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}:
        message = f"{subject}: no credentials: {text}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return StorageError(message, "no credentials", True)
    if names & {"PermissionError"} or codes & {"403", "401"}:
        message = f"{subject}: refused: {text}; check the credentials, and what they may do there"
        return StorageError(message, "refused", True)
    if names & {"HTTPClientError", "ConnectionError", "TimeoutError", "FSTimeoutError", "ClientConnectionError"}:
        return StorageError(f"{subject}: cannot be reached: {text}", "unreachable", False)
    if "FileNotFoundError" in names:
        return StorageError(f"{subject}: not there: {text}", "missing", False)
    return StorageError(f"{subject}: {text}", "failed", False)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def codes_of(error: BaseException) -> set[str]:
    """The code and the HTTP status of an S3 answer; none for an error that is no answer."""
    answer = getattr(error, "response", None)
    if not isinstance(answer, dict):
        return set()
    return {str(answer.get("Error", {}).get("Code")), str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode"))}


def said(error: BaseException) -> str:
    """An error's text on one line, without secrets and without a full stop."""
    message = getattr(error, "strerror", None) or str(error)
    text = " ".join(message.split()).rstrip(". ") or type(error).__name__
    return Secrets.from_environment(os.environ).redact(text)


def need_copies(address: str, wait_s: float = PROBE_S) -> list[str]:
    """Makes sure, before anything is trained, that copies can be made there: a tiny file is written and removed.

    Returns warnings: a storage that does not answer now may answer later, and training does not depend on it. Raises
    UserError for what only a person can change.
    """
    storage = Storage(address, ONE_TRY)
    try:
        in_time(lambda: probe(storage), wait_s, storage.address)
    except StorageError as error:
        if error.is_lasting:
            raise UserError(str(error)) from error
        return [f"{error}; the run begins, and copies are tried again as it goes on"]
    return []


def probe(storage: Storage) -> None:
    """Writes a tiny file and removes it."""
    name = f".training-lab-{secrets.token_hex(8)}"
    storage.put_bytes(b"written to see whether copies can be made here\n", name)
    storage.remove(name)


def in_time(work: Callable[[], None], wait_s: float, subject: str) -> None:
    """Does some work, but waits for it no longer than `wait_s`. Raises what it raises, or StorageError."""
    raised: list[Exception] = []

    def do() -> None:
        try:
            work()
        except Exception as error:  # raised again below, where somebody waits for it
            raised.append(error)

    thread = threading.Thread(target=do, name="probe", daemon=True)
    thread.start()
    thread.join(wait_s)
    if thread.is_alive():
        raise StorageError(f"{subject}: no answer within {wait_s:.0f} s", "unreachable", False)
    if raised:
        raise raised[0]
