"""The one download: checked against its hash, kept, and never half there, whatever the server does."""

from __future__ import annotations

import http.server
import os
import socket
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from urllib.error import HTTPError

import pytest
from tiny import tiny

from training_lab.data import documents
from training_lab.data.documents import (
    SHAKESPEARE_SHA256,
    Collection,
    read_documents,
)
from training_lab.errors import LabError


def write(name: str, content: str | bytes) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))


def texts(collection: Collection) -> list[str]:
    return [document.text for document in collection.documents]


PLAY = b"First Citizen:\nBefore we proceed\n\nAll:\nSpeak, speak.\n"


class Server:
    """A web server on this machine that gives one answer and counts the requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.status, self.content, self.promised_bytes = 200, PLAY, len(PLAY)
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append(self.path)
                self.send_response(server.status)
                self.send_header("Content-Length", str(server.promised_bytes))
                self.end_headers()
                self.wfile.write(server.content)

            def log_message(self, format: str, *arguments: object) -> None:
                """Says nothing."""

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/input.txt"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that stands in for the real address, with the hash that its content has."""
    running = Server()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(documents, "SHAKESPEARE_URL", running.url)
    monkeypatch.setattr(documents, "SHAKESPEARE_SHA256", sha256(PLAY).hexdigest())
    yield running
    running.close()


def shakespeare(cache_dir: str = "cache", unit: str = "paragraph") -> Collection:
    return read_documents(tiny("data.source=shakespeare", f"data.cache_dir={cache_dir}", f"data.documents={unit}").data)


def cached_file(cache_dir: str = "cache") -> Path:
    return Path(cache_dir) / "downloads" / sha256(PLAY).hexdigest() / "tinyshakespeare.txt"


def files_below(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def download_error() -> str:
    """The one line with which a download is refused."""
    with pytest.raises(LabError) as caught:
        shakespeare()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    answer = caught.value.__cause__
    assert not isinstance(answer, HTTPError) or answer.closed, "the connection was left open"
    return message


def test_shakespeare_is_downloaded_once_and_cut_into_paragraphs(server: Server) -> None:
    first, second = shakespeare(), shakespeare()
    assert server.requests == ["/input.txt"]
    assert texts(first) == ["First Citizen:\nBefore we proceed\n\n", "All:\nSpeak, speak.\n"]
    assert second == first
    assert cached_file().read_bytes() == PLAY
    assert first.manifest["url"] == server.url
    assert first.manifest["files"] == [
        {"name": "tinyshakespeare.txt", "bytes": len(PLAY), "sha256": sha256(PLAY).hexdigest()}
    ]


def test_where_shakespeare_is_kept_does_not_change_what_it_is(server: Server) -> None:
    assert shakespeare("가 나/cache") == shakespeare("other")
    assert cached_file("가 나/cache").read_bytes() == PLAY


def test_a_download_with_another_hash_is_refused_and_leaves_nothing(server: Server) -> None:
    server.content = PLAY.replace(b"Citizen", b"Denizen")
    message = download_error()
    assert message.startswith(f"{server.url}: has SHA-256 {sha256(server.content).hexdigest()}, expected ")
    assert files_below("cache") == []


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_download_that_the_server_refuses_is_told_with_address_and_place(server: Server, status: int) -> None:
    server.status = status
    message = download_error()
    assert message.startswith(f"{server.url}: cannot be downloaded: ")
    assert str(cached_file()) in message
    assert files_below("cache") == []


def test_a_download_that_breaks_off_is_told_and_leaves_nothing(server: Server) -> None:
    server.content = PLAY[:10]
    assert download_error().startswith(f"{server.url}: cannot be downloaded: ")
    assert files_below("cache") == []


def test_an_answer_that_is_not_the_webs_is_told_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr(documents, "SHAKESPEARE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}/")
        message = download_error()
        thread.join()
    assert ": cannot be downloaded: " in message
    assert files_below(".") == []


def test_without_a_server_the_error_says_where_to_put_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(documents, "SHAKESPEARE_URL", f"http://127.0.0.1:{port}/input.txt")
    monkeypatch.setattr(documents, "SHAKESPEARE_SHA256", sha256(PLAY).hexdigest())
    message = download_error()
    assert message.startswith(f"http://127.0.0.1:{port}/input.txt: cannot be downloaded: ")
    assert f"put the file at {cached_file()} yourself" in message
    assert files_below(".") == []


def test_a_file_that_was_put_in_place_by_hand_is_used_without_a_request(server: Server) -> None:
    write(str(cached_file()), PLAY)
    assert len(shakespeare().documents) == 2
    assert server.requests == []


@pytest.mark.parametrize("content", [b"", PLAY[:-1], PLAY + b"\n", PLAY.swapcase()])
def test_a_damaged_file_in_the_cache_is_refused_and_not_replaced(server: Server, content: bytes) -> None:
    write(str(cached_file()), content)
    message = download_error()
    assert message.startswith(f"{cached_file()}: damaged")
    assert server.requests == []
    assert cached_file().read_bytes() == content


def test_a_cache_folder_that_cannot_be_made_is_told_by_name(server: Server) -> None:
    write("cache", "a file is in the way")
    assert "cache" in download_error().partition(": ")[0]


def test_a_full_disk_while_downloading_is_told_and_leaves_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert download_error().endswith("No space left on device")
    assert files_below("cache") == []


def test_the_real_tiny_shakespeare_has_the_pinned_hash_and_its_paragraphs_joined_are_the_text() -> None:
    path = Path(__file__).parents[3] / "../shared/data/tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip("needs the real file, which lies outside the repository")
    assert sha256(path.read_bytes()).hexdigest() == SHAKESPEARE_SHA256
    write(f"cache/downloads/{SHAKESPEARE_SHA256}/tinyshakespeare.txt", path.read_bytes())
    text = path.read_text("utf-8")
    parts = texts(shakespeare())
    assert len(parts) > 7000
    assert "".join(parts) == text
    assert len(set(text)) == 65
    assert texts(shakespeare(unit="file")) == [text]
