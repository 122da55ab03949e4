"""A Hugging Face hub on this machine: the addresses, headers and refusals of the real one, and every fault on demand.

`test_hub.py` checks with the hub's own client that it is close enough to the real thing.
"""

from __future__ import annotations

import hashlib
import http
import http.server
import io
import json
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from training_lab.data.fineweb import FINEWEB_REPO
from training_lab.data.synthetic import synthetic_document
from training_lab.data.tokenizers import Gpt2Tokenizer

LARGE = (".parquet", ".bin")
"""Suffixes of the files that are kept in Git LFS, and so have a SHA-256 in the listing."""

NAME = "sample/10BT/014_00000.parquet"
CONTENT = b"PAR1" + bytes(range(256)) * 40 + b"PAR1"
"""A file that a test hub has, and its content where nobody parses it."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with one answer; with nothing set it is as it should be."""

    status: int = 0
    """This status, without the content."""
    headers: Mapping[str, str] = field(default_factory=dict)
    flips_byte: bool = False
    cut_after: int | None = None
    """The connection is closed after so many bytes of the content, however many were promised."""
    has_ranges: bool = True
    range_shift: int = 0
    """A part of the file that begins so many bytes before the one that was asked for, and says so."""
    pause_s: float = 0.0
    """How long the server waits before each piece of the content."""
    piece_bytes: int = 1 << 20
    commit: str = ""
    """This commit, whatever was asked for."""
    json: Any = None
    """This in place of a listing."""


GOOD = Fault()
FLIPPED = Fault(flips_byte=True)
NO_RANGES = Fault(has_ranges=False)


@dataclass
class Request:
    """What a client asked, and how many bytes of content it was sent."""

    method: str
    path: str
    headers: dict[str, str]
    sent_bytes: int = 0

    @property
    def range(self) -> str | None:
        return self.headers.get("range")

    @property
    def authorization(self) -> str | None:
        return self.headers.get("authorization")


class FakeHub:
    """A hub with one dataset, for a `with` statement. Switch faults on with `once` and `always`."""

    def __init__(self, repo: str = FINEWEB_REPO) -> None:
        self.repo = repo
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.requests: list[Request] = []
        self.storage: FakeHub | None = None
        """Where requests for files are sent on to."""
        self._once: dict[str, list[Fault]] = {"file": [], "listing": []}
        self._always = {"file": GOOD, "listing": GOOD}
        self._http = Server(self)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the server; nobody answers at its address any more. Again: nothing."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()

    def publish(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Makes these the files at the head of a branch; the commit."""
        digest = hashlib.sha1(b"".join(name.encode() + content for name, content in sorted(files.items())))
        commit = digest.hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        return commit

    def address(self, name: str, revision: str = "main") -> str:
        return f"{self.url}/datasets/{self.repo}/resolve/{revision}/{name}"

    def once(self, *faults: Fault, of: str = "file") -> None:
        """The next answers have these faults, one each."""
        self._once[of] += faults

    def always(self, fault: Fault, of: str = "file") -> None:
        """Every answer has this fault, from the next on."""
        self._always[of] = fault

    def next_fault(self, of: str) -> Fault:
        return self._once[of].pop(0) if self._once[of] else self._always[of]

    def gets(self) -> list[Request]:
        """The requests for the content of files."""
        return [one for one in self.requests if one.method == "GET" and "/resolve/" in one.path]

    @property
    def sent_bytes(self) -> int:
        """Bytes of file content on the wire."""
        return sum(one.sent_bytes for one in self.gets())

    def listing(self, commit: str) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for name, content in sorted(self.commits[commit].items()):
            one: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
            if name.endswith(LARGE):
                sha256 = hashlib.sha256(content).hexdigest()
                one["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(one)
        return {"id": self.repo, "sha": commit, "siblings": siblings}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, hub: FakeHub) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that went away."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""

    def answer(self) -> None:
        hub = self.server.hub
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_made = Request(self.command, self.path, headers)
        hub.requests.append(self.request_made)
        address = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(address.path)
        file, listing = f"/datasets/{hub.repo}/resolve/", f"/api/datasets/{hub.repo}/revision/"
        if path.startswith(file):
            revision, _, name = path.removeprefix(file).partition("/")
            self.answer_file(revision, name)
        elif path.startswith(listing):
            has_blobs = urllib.parse.parse_qs(address.query).get("blobs") == ["true"]
            self.answer_listing(path.removeprefix(listing), has_blobs)
        else:
            self.refuse(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def refuse(self, status: int, headers: Mapping[str, str]) -> None:
        self.head(status, {"Content-Length": "7", **headers})
        self.content(b"refused", GOOD)

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def content(self, content: bytes, fault: Fault) -> None:
        if self.command == "HEAD":
            return
        for begin in range(0, len(content), fault.piece_bytes):
            if fault.pause_s:
                threading.Event().wait(fault.pause_s)
            piece = content[begin : begin + fault.piece_bytes]
            self.request_made.sent_bytes += len(piece)
            self.wfile.write(piece)

    def answer_listing(self, revision: str, has_blobs: bool) -> None:
        hub = self.server.hub
        fault = hub.next_fault("listing")
        commit = hub.branches.get(revision, revision)
        if fault.status:
            self.refuse(fault.status, fault.headers)
            return
        if commit not in hub.commits:
            self.refuse(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
            return
        said = hub.listing(commit) if fault.json is None else fault.json
        if fault.commit:
            said["sha"] = fault.commit
        if not has_blobs:
            said["siblings"] = [{"rfilename": one["rfilename"]} for one in said["siblings"]]
        text = json.dumps(said).encode("utf-8")
        self.head(200, {"Content-Type": "application/json", "Content-Length": str(len(text))})
        self.content(text, GOOD)

    def answer_file(self, revision: str, name: str) -> None:
        hub = self.server.hub
        fault = hub.next_fault("file") if self.command == "GET" else GOOD
        commit = hub.branches.get(revision, revision)
        if fault.status:
            self.refuse(fault.status, fault.headers)
            return
        if name not in hub.commits.get(commit, {}):
            code = "EntryNotFound" if commit in hub.commits else "RevisionNotFound"
            self.refuse(404, {"X-Error-Code": code, "X-Error-Message": f"{name} does not exist on {revision}"})
            return
        whole = hub.commits[commit][name]
        sha256 = hashlib.sha256(whole).hexdigest()
        headers = {
            "X-Repo-Commit": fault.commit or commit,
            "ETag": f'"{sha256}"',
            "X-Linked-Etag": f'"{sha256}"',
            "X-Linked-Size": str(len(whole)),
            "Accept-Ranges": "bytes",
        }
        if hub.storage:
            self.head(302, {**headers, "Location": hub.storage.url + self.path, "Content-Length": "0"})
            return
        if fault.flips_byte:
            middle = len(whole) // 2
            whole = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        begin = self.first_byte(fault)
        if begin is not None and begin >= len(whole):
            self.head(416, {"Content-Range": f"bytes */{len(whole)}", "Content-Length": "0"})
            return
        body = whole[begin or 0 :]
        headers["Content-Length"] = str(len(body))
        if begin is not None:
            headers["Content-Range"] = f"bytes {begin}-{len(whole) - 1}/{len(whole)}"
        self.head(200 if begin is None else 206, headers)
        self.content(body[: fault.cut_after], fault)

    def first_byte(self, fault: Fault) -> int | None:
        """Where the part that was asked for begins; None for the whole file."""
        says = self.headers.get("Range")
        if says is None or not fault.has_ranges:
            return None
        return max(0, int(says.removeprefix("bytes=").partition("-")[0]) - fault.range_shift)


def make_parquet(rows: int, first: int = 0) -> bytes:
    """A file of FineWeb's columns, with made documents and their real GPT-2 token counts."""
    texts = [synthetic_document(number).text for number in range(first, first + rows)]
    names = [f"{number:08d}" for number in range(first, first + rows)]
    table = pa.table(
        {
            "text": texts,
            "id": [f"<urn:uuid:{name}>" for name in names],
            "dump": ["CC-MAIN-2024-10"] * rows,
            "url": [f"https://example.com/{name}" for name in names],
            "date": ["2024-02-21T00:00:00Z"] * rows,
            "file_path": ["s3://commoncrawl/made-up.warc.gz"] * rows,
            "language": ["en"] * rows,
            "language_score": [0.9] * rows,
            "token_count": pa.array([len(ids) for ids in Gpt2Tokenizer().encode(texts)], pa.int64()),
        }
    )
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=100)
    return file.getvalue()
