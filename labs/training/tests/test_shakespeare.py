"""The one download: checked against its hash, kept, and never half there, whatever the server does."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fakehub import FLIPPED, FakeHub, Fault
from tiny import tiny

from training_lab.data import sources
from training_lab.data.documents import Document
from training_lab.data.sources import SHAKESPEARE_BYTES, SHAKESPEARE_SHA256, Source, find_source
from training_lab.errors import LabError, UserError
from training_lab.progress import NoProgress

PLAY = b"First Citizen:\nBefore we proceed\n\nAll:\nSpeak, speak.\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A server that stands in for the real address, with the hash that its content has. Nobody waits for it."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("training_lab.data.download.time.sleep", lambda seconds: None)
    with FakeHub() as running:
        running.publish({"input.txt": PLAY})
        monkeypatch.setattr(sources, "SHAKESPEARE_URL", running.address("input.txt"))
        monkeypatch.setattr(sources, "SHAKESPEARE_SHA256", sha256(PLAY).hexdigest())
        monkeypatch.setattr(sources, "SHAKESPEARE_BYTES", len(PLAY))
        yield running


def shakespeare(cache_dir: str = "cache", *overrides: str) -> Source:
    return find_source(tiny("data.source=shakespeare", f"data.cache_dir={cache_dir}", *overrides).data, NoProgress())


def texts(source: Source) -> list[str]:
    return [document.text for _, document in source.documents() if isinstance(document, Document)]


def entries(source: Source) -> list[dict[str, Any]]:
    return [file.entry() for file in source.files]


def cached_file(cache_dir: str = "cache") -> Path:
    return Path(cache_dir) / "downloads" / sha256(PLAY).hexdigest() / "tinyshakespeare.txt"


def put_in_place(content: bytes) -> None:
    cached_file().parent.mkdir(parents=True)
    cached_file().write_bytes(content)


def content_below(folder: str) -> list[str]:
    """The names of the files that hold anything."""
    return [path.name for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size]


def refusal(kind: type[LabError] = LabError) -> str:
    """The one line with which the source is refused."""
    with pytest.raises(LabError) as caught:
        texts(shakespeare())
    assert type(caught.value) is kind
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def test_shakespeare_is_downloaded_once_and_cut_into_paragraphs(hub: FakeHub) -> None:
    first, second = shakespeare(), shakespeare()
    assert texts(first) == texts(second) == ["First Citizen:\nBefore we proceed\n\n", "All:\nSpeak, speak.\n"]
    assert len(hub.requests) == 1
    assert cached_file().read_bytes() == PLAY
    assert first.facts == {"url": hub.address("input.txt"), "licence": "public domain"}
    assert entries(first) == [{"name": "tinyshakespeare.txt", "bytes": len(PLAY), "sha256": sha256(PLAY).hexdigest()}]
    assert first.document_name(0, 1) == "tinyshakespeare.txt#1"


def test_what_shakespeare_is_is_known_before_it_is_downloaded(hub: FakeHub) -> None:
    assert entries(shakespeare())[0]["sha256"] == sha256(PLAY).hexdigest()
    assert hub.requests == []
    assert not Path("cache").exists()


def test_where_shakespeare_is_kept_does_not_change_what_it_is(hub: FakeHub) -> None:
    here, there = shakespeare("가 나/cache"), shakespeare("other")
    assert texts(here) == texts(there)
    assert (here.facts, entries(here), here.reading) == (there.facts, entries(there), there.reading)
    assert cached_file("가 나/cache").read_bytes() == PLAY


def test_a_download_with_another_hash_is_refused_and_leaves_nothing(hub: FakeHub) -> None:
    hub.always(FLIPPED)
    message = refusal()
    assert message.startswith(f"{hub.address('input.txt')}: has SHA-256 ")
    assert f"expected {sha256(PLAY).hexdigest()}" in message
    assert content_below("cache") == []


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_download_that_the_server_refuses_is_told_with_its_address(hub: FakeHub, status: int) -> None:
    hub.always(Fault(status=status))
    assert refusal().startswith(f"{hub.address('input.txt')}: cannot be downloaded: the server answers {status} ")
    assert content_below("cache") == []


def test_a_download_that_breaks_off_at_its_beginning_is_told_and_leaves_nothing(hub: FakeHub) -> None:
    hub.always(Fault(cut_after=0))
    assert refusal().startswith(f"{hub.address('input.txt')}: cannot be downloaded: ")
    assert content_below("cache") == []


def test_a_download_that_breaks_off_again_and_again_comes_whole_in_the_end(hub: FakeHub) -> None:
    hub.always(Fault(cut_after=5))
    assert "".join(texts(shakespeare())) == PLAY.decode()
    assert hub.sent_bytes == len(PLAY)


def test_without_a_server_the_error_names_the_address(hub: FakeHub) -> None:
    hub.stop()
    assert refusal().startswith(f"{hub.address('input.txt')}: cannot be downloaded: the connection broke: ")
    assert content_below(".") == []


def test_offline_the_error_says_where_to_put_the_file(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refusal().endswith(f"put the file at {cached_file()}")
    assert hub.requests == []
    put_in_place(PLAY)
    assert len(texts(shakespeare())) == 2


def test_a_file_that_was_put_in_place_by_hand_is_used_without_a_request(hub: FakeHub) -> None:
    put_in_place(PLAY)
    assert len(texts(shakespeare())) == 2
    assert hub.requests == []


@pytest.mark.parametrize("content", [b"", PLAY[:-1], PLAY + b"\n", PLAY.swapcase()])
def test_a_damaged_file_in_the_cache_is_refused_and_not_replaced(hub: FakeHub, content: bytes) -> None:
    put_in_place(content)
    assert refusal(UserError).startswith(f"{cached_file()}: damaged")
    assert hub.requests == []
    assert cached_file().read_bytes() == content


def test_a_cache_folder_that_cannot_be_made_is_told_by_name(hub: FakeHub) -> None:
    Path("cache").write_text("a file is in the way")
    assert "cache" in refusal(UserError).partition(": ")[0]


def test_a_full_disk_while_downloading_is_told_and_no_file_is_there(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in refusal(UserError)
    assert not cached_file().exists()


def test_the_real_tiny_shakespeare_has_the_pinned_hash_and_its_paragraphs_joined_are_the_text() -> None:
    path = Path(__file__).parents[3] / "../shared/data/tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip("needs the real file, which lies outside the repository")
    content = path.read_bytes()
    assert (sha256(content).hexdigest(), len(content)) == (SHAKESPEARE_SHA256, SHAKESPEARE_BYTES)
    place = Path("cache/downloads") / SHAKESPEARE_SHA256 / "tinyshakespeare.txt"
    place.parent.mkdir(parents=True)
    place.write_bytes(content)
    parts, text = texts(shakespeare()), content.decode("utf-8")
    assert len(parts) > 7000
    assert "".join(parts) == text
    assert len(set(text)) == 65
    assert texts(shakespeare("cache", "data.documents=file")) == [text]
