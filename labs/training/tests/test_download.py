"""A file over HTTP is whole and right or not there; whatever the server does, as few bytes as possible come twice."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from hashlib import sha256
from pathlib import Path

import pytest
from fakehub import FLIPPED, GOOD, NO_RANGES, FakeHub, Fault
from tiny import TRAINING

from training_lab.data import download
from training_lab.data.download import ATTEMPTS, LONGEST_WAIT_S, PartialFile, fetch_file, retry_after_s
from training_lab.errors import LabError, UserError
from training_lab.progress import NoProgress

NAME = "sample/file.bin"
CONTENT = random.Random(0).randbytes(2_500_000)
SHA256 = sha256(CONTENT).hexdigest()
PATH = Path("folder/file.bin")
PARTIAL = Path("folder/file.bin.partial")
real_sleep = time.sleep


class Notes(NoProgress):
    """Keeps what a person would be told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.shown: list[tuple[str, float, float | None]] = []

    def show(self, what: str, done: float, total: float | None, figures: str) -> None:
        self.shown.append((what, done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("no_proxy", "*")
    with FakeHub() as running:
        running.publish({NAME: CONTENT})
        yield running


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the download would have waited; it goes on at once."""
    recorded: list[float] = []

    def sleep(seconds: float) -> None:
        recorded.append(seconds)
        real_sleep(0.001)

    monkeypatch.setattr("training_lab.data.download.time.sleep", sleep)
    return recorded


def fetch(hub: FakeHub, token: str | None = None, size: int | None = len(CONTENT)) -> Notes:
    """Fetches the file; what a person would have been told."""
    notes = Notes()
    fetch_file(hub.address(NAME), SHA256, size, PATH, token, notes)
    return notes


def refusal(hub: FakeHub, kind: type[LabError] = LabError, size: int | None = len(CONTENT)) -> str:
    """The one line with which a download is refused; nothing is at its place then."""
    with pytest.raises(LabError) as caught:
        fetch(hub, size=size)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert not PATH.exists()
    return message


def leave_partial(content: bytes) -> None:
    """What a killed process leaves."""
    PARTIAL.parent.mkdir(parents=True, exist_ok=True)
    PARTIAL.write_bytes(content)


def assert_whole() -> None:
    assert PATH.read_bytes() == CONTENT
    assert not PARTIAL.exists()


# --- as it should be ---


def test_a_file_comes_in_one_request_and_leaves_nothing_else(hub: FakeHub) -> None:
    fetch(hub)
    assert_whole()
    (request,) = hub.requests
    assert (request.method, request.range, request.authorization) == ("GET", None, None)
    assert request.headers["accept-encoding"] == "identity"
    assert {path.name for path in PATH.parent.iterdir()} == {"file.bin", "file.bin.lock"}


def test_a_file_that_another_process_had_meanwhile_is_not_asked_for(hub: FakeHub) -> None:
    fetch(hub)
    fetch(hub)
    assert len(hub.requests) == 1


def test_the_progress_ends_at_the_size_of_the_file(hub: FakeHub) -> None:
    what, done, total = fetch(hub).shown[-1]
    assert (what, done, total) == ("Downloading file.bin", len(CONTENT), len(CONTENT))


def test_a_file_of_unknown_size_is_fetched_as_well(hub: FakeHub) -> None:
    hub.once(Fault(cut_after=1_200_000))
    fetch(hub, size=None)
    assert_whole()


# --- wrong content ---


def test_a_flipped_byte_is_refused_with_both_hashes_after_a_second_try(hub: FakeHub) -> None:
    hub.always(FLIPPED)
    message = refusal(hub)
    flipped = CONTENT[:1_250_000] + bytes([CONTENT[1_250_000] ^ 1]) + CONTENT[1_250_001:]
    assert message.startswith(f"{hub.address(NAME)}: ")
    assert SHA256 in message
    assert sha256(flipped).hexdigest() in message
    assert len(hub.requests) == 2
    assert not PARTIAL.exists()


def test_a_byte_that_is_flipped_once_costs_a_second_download(hub: FakeHub) -> None:
    hub.once(FLIPPED)
    fetch(hub)
    assert_whole()
    assert [request.range for request in hub.requests] == [None, None]


@pytest.mark.parametrize(
    "left", [b"\0" * 1000, CONTENT[:-1] + b"\0", CONTENT + b"\0", b"\0" * len(CONTENT)],
    ids=["shorter", "last byte", "longer", "all of it"],
)  # fmt: skip
def test_a_bad_partial_is_thrown_away_once_and_the_file_then_comes_whole(hub: FakeHub, left: bytes) -> None:
    leave_partial(left)
    fetch(hub)
    assert_whole()
    assert hub.requests[-1].range is None


def test_a_file_that_is_larger_than_it_should_be_is_refused_before_all_of_it_came(hub: FakeHub) -> None:
    message = refusal(hub, size=1000)
    assert "larger than the 1,000 bytes" in message
    assert len(hub.requests) == 1


# --- broken connections ---


@pytest.mark.parametrize("received", [0, 1, 300_000, 1_048_576, 2_499_999])
def test_after_a_broken_connection_only_the_rest_is_asked_for(hub: FakeHub, received: int) -> None:
    hub.once(Fault(cut_after=received))
    notes = fetch(hub)
    assert_whole()
    assert [request.range for request in hub.requests] == [None, f"bytes={received}-" if received else None]
    assert hub.sent_bytes == len(CONTENT)
    assert len(notes.notes) == 1
    assert "trying again in" in notes.notes[0]


def test_a_download_goes_on_as_long_as_bytes_arrive(hub: FakeHub, waits: list[float]) -> None:
    hub.always(Fault(cut_after=100_000))
    fetch(hub)
    assert_whole()
    assert len(hub.requests) == 25 > ATTEMPTS
    assert hub.sent_bytes == len(CONTENT)
    assert all(wait <= 1.5 for wait in waits), "each failure with progress is a first one"


def test_a_download_without_progress_is_given_up_and_says_what_is_kept(hub: FakeHub, waits: list[float]) -> None:
    hub.once(Fault(cut_after=1_048_576))
    hub.always(Fault(cut_after=0))
    message = refusal(hub)
    assert "1,048,576 bytes are kept" in message
    assert f"({ATTEMPTS} times)" in message
    assert len(hub.requests) == ATTEMPTS
    assert PARTIAL.read_bytes() == CONTENT[:1_048_576]
    for number, wait in enumerate(waits):
        assert 2**number <= wait <= 1.5 * 2**number
    hub.always(GOOD)
    fetch(hub)
    assert_whole()


def test_what_a_process_left_is_not_sent_again_to_the_next(hub: FakeHub) -> None:
    leave_partial(CONTENT[:2_000_000])
    fetch(hub)
    assert_whole()
    assert [request.range for request in hub.requests] == ["bytes=2000000-"]
    assert hub.sent_bytes == 500_000


def test_a_whole_partial_needs_no_request(hub: FakeHub) -> None:
    leave_partial(CONTENT)
    fetch(hub)
    assert_whole()
    assert hub.requests == []


def test_a_killed_process_leaves_what_the_next_goes_on_from(hub: FakeHub) -> None:
    hub.once(Fault(pause_s=0.02, piece_bytes=100_000))
    program = f"""
        from pathlib import Path
        from training_lab.data.download import fetch_file
        from training_lab.progress import NoProgress
        fetch_file({hub.address(NAME)!r}, {SHA256!r}, {len(CONTENT)}, Path({str(PATH)!r}), None, NoProgress())
    """
    environment = {**os.environ, "PYTHONPATH": str(TRAINING)}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], env=environment)
    deadline = time.monotonic() + 20
    while not (PARTIAL.exists() and PARTIAL.stat().st_size) and time.monotonic() < deadline:
        real_sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    left = PARTIAL.stat().st_size
    assert 0 < left < len(CONTENT)
    assert not PATH.exists()
    fetch(hub)
    assert_whole()
    assert hub.requests[-1].range == f"bytes={left}-"
    assert hub.requests[-1].sent_bytes == len(CONTENT) - left


def test_a_slow_server_is_waited_for(hub: FakeHub) -> None:
    hub.always(Fault(pause_s=0.05, piece_bytes=500_000))
    fetch(hub)
    assert_whole()
    assert len(hub.requests) == 1


def test_a_server_that_falls_silent_is_asked_again_for_the_rest(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT_S", (5, 0.1))
    hub.once(Fault(pause_s=0.3, piece_bytes=2_000_000))
    notes = fetch(hub)
    assert_whole()
    assert "timed out" in notes.notes[0].lower()


def test_an_address_where_nobody_answers_is_named_in_one_line(hub: FakeHub, waits: list[float]) -> None:
    hub.stop()
    message = refusal(hub)
    assert message.startswith(f"{hub.address(NAME)}: cannot be downloaded: the connection broke: ")
    assert "refused" in message
    assert len(waits) == ATTEMPTS - 1


def test_an_answer_that_is_not_the_webs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/file"
        with pytest.raises(LabError, match=r": cannot be downloaded: the connection broke: .*SSH"):
            fetch_file(url, SHA256, len(CONTENT), PATH, None, NoProgress())
        thread.join()
    assert not PATH.exists()


# --- ranges ---


def test_a_server_that_ignores_ranges_sends_the_file_from_its_beginning(hub: FakeHub) -> None:
    leave_partial(CONTENT[:2_000_000])
    hub.always(NO_RANGES)
    fetch(hub)
    assert_whole()
    assert len(hub.requests) == 1


def test_a_range_that_begins_elsewhere_is_not_appended(hub: FakeHub) -> None:
    leave_partial(CONTENT[:2_000_000])
    hub.once(Fault(range_shift=1))
    fetch(hub)
    assert_whole()
    assert [request.range for request in hub.requests] == ["bytes=2000000-", None]


def test_a_range_that_the_server_does_not_have_is_given_up_for_the_whole_file(hub: FakeHub, waits: list[float]) -> None:
    leave_partial(CONTENT[:2_000_000])
    hub.once(Fault(status=416))
    fetch(hub)
    assert_whole()
    assert [request.range for request in hub.requests] == ["bytes=2000000-", None]
    assert sum(waits) == 0


@pytest.mark.parametrize("status", [304, 416])
def test_the_text_of_an_answer_that_is_not_the_file_does_not_become_part_of_it(hub: FakeHub, status: int) -> None:
    hub.once(Fault(status=status))
    fetch(hub)
    assert_whole()
    assert [request.range for request in hub.requests] == [None, None]


# --- refusals ---


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_failure_that_may_pass_is_waited_for(hub: FakeHub, waits: list[float], status: int) -> None:
    hub.once(Fault(status=status), Fault(status=status))
    notes = fetch(hub)
    assert_whole()
    assert len(waits) == 2
    assert 1 <= waits[0] <= 1.5
    assert 2 <= waits[1] <= 3
    assert all(f"the server answers {status}" in note for note in notes.notes)


def test_the_server_says_how_long_to_wait_and_no_longer_than_the_limit(hub: FakeHub, waits: list[float]) -> None:
    in_a_minute = formatdate(time.time() + 60, usegmt=True)
    for says in ("7", in_a_minute, "86400"):
        hub.once(Fault(status=429, headers={"Retry-After": says}))
    notes = fetch(hub)
    assert waits[0] == 7
    assert 55 < waits[1] <= 60
    assert waits[2] == LONGEST_WAIT_S
    assert "trying again in 7 s" in notes.notes[0]


@pytest.mark.parametrize(
    ("says", "seconds"),
    [(None, None), ("0", 0), ("7", 7), ("1.5", 1.5), ("-3", 0), ("nan", 0), ("soon", None), ("", None),
     ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("Wed, 99 Oct 2015 07:28:00 GMT", None)],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(says: str | None, seconds: float | None) -> None:
    assert retry_after_s(says) == seconds


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 451])
def test_a_refusal_is_told_at_once(hub: FakeHub, waits: list[float], status: int) -> None:
    hub.once(Fault(status=status, headers={"X-Error-Message": "Access is\trestricted"}))
    message = refusal(hub)
    assert message.startswith(f"{hub.address(NAME)}: cannot be downloaded: the server answers {status} Access is")
    assert ("HF_TOKEN" in message) == (status in (401, 403))
    assert len(hub.requests) == 1
    assert waits == []


# --- the token ---


def test_a_token_is_sent_to_the_first_host_and_not_to_the_one_it_sends_on_to(hub: FakeHub) -> None:
    with FakeHub() as storage:
        storage.publish({NAME: CONTENT})
        hub.storage = storage
        storage.once(Fault(cut_after=1_048_576))
        fetch(hub, token="hf_secret")
    assert_whole()
    assert [request.authorization for request in hub.requests] == ["Bearer hf_secret"] * 2
    assert [request.authorization for request in storage.requests] == [None, None]
    assert [request.range for request in storage.requests] == [None, "bytes=1048576-"]


@pytest.mark.parametrize("token", [None, "hf_secret"])
def test_a_netrc_file_neither_replaces_the_token_nor_stands_in_for_it(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    Path("netrc").write_text("machine 127.0.0.1 login somebody password something\n")
    Path("netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", "netrc")
    fetch(hub, token=token)
    assert hub.requests[0].authorization == (f"Bearer {token}" if token else None)


# --- the disk, and others ---


def test_a_full_disk_is_one_clear_line_and_leaves_nothing_at_the_path(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(self: PartialFile, chunk: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PartialFile, "append", append)
    message = refusal(hub, UserError)
    assert message.startswith(f"{PATH}: cannot be written: No space left on device; free some space")
    assert len(hub.requests) == 1


def test_a_disk_that_is_full_at_the_very_end_is_told_as_well(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in refusal(hub, UserError)


def test_a_folder_that_cannot_be_made_is_told_by_name(hub: FakeHub) -> None:
    Path("folder").write_text("a file is in the way")
    assert refusal(hub, UserError).startswith("folder: cannot be written: ")
    assert hub.requests == []


def test_two_at_once_download_a_file_once_and_one_says_that_it_waits(hub: FakeHub) -> None:
    hub.always(Fault(pause_s=0.1, piece_bytes=500_000))
    told: list[str] = []
    threads = [threading.Thread(target=lambda: told.extend(fetch(hub).notes)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_whole()
    assert len(hub.requests) == 1
    assert told == ["Another process downloads file.bin; waiting for it"]


def test_a_partial_file_knows_its_size_and_hash_whatever_was_there_before() -> None:
    path = Path("partial")
    path.write_bytes(CONTENT[:1_500_000])
    with open(path, "a+b") as file:
        partial = PartialFile(file)
        assert (partial.size, partial.digest.digest()) == (1_500_000, sha256(CONTENT[:1_500_000]).digest())
        partial.append(CONTENT[1_500_000:])
        assert (partial.size, partial.digest.hexdigest()) == (len(CONTENT), SHA256)
        partial.restart()
        assert (partial.size, partial.digest.digest()) == (0, sha256().digest())
        partial.append(b"new")
    assert path.read_bytes() == b"new"
