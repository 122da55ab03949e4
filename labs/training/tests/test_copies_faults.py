"""What goes wrong with a storage: training goes on, the record says it, and nothing is believed that was not seen."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from copied_runs import (
    ADDRESS,
    PLENTY_S,
    SECRET,
    content,
    copied,
    events,
    make_run,
    s3_server,
    save,
    starting,
    states,
    unreachable,
    until,
    updates_there,
)
from fakes3 import FakeS3

from training_lab.copies import Copier
from training_lab.errors import LabError, UserError
from training_lab.record import CHECKPOINTS, COPIES, RunFolder
from training_lab.storage import check_address, need_copies


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def folder() -> RunFolder:
    return make_run("run-1")


@pytest.fixture
def start(folder: RunFolder) -> Iterator[Callable[..., Copier]]:
    with starting(folder) as begin:
        yield begin


def test_an_upload_that_is_cut_is_made_again_and_told_once(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    s3.is_cut = lambda asked: len(s3.puts("state.pt")) < 4 and asked.method == "PUT" and "state.pt" in asked.path
    save(folder, 100)
    copier = start()
    assert copier.wait(PLENTY_S)
    news = copier.news()
    assert [one["event"] for one in news] == ["not copied", "copied"]
    assert news[0]["update"] == 100
    assert len(s3.puts("state.pt")) == 4
    assert copied(s3)["checkpoints/update-000100/state.pt"] == content(folder)["checkpoints/update-000100/state.pt"]


def test_a_copy_that_differs_is_found_and_uploaded_anew(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    s3.flips = lambda asked: len(s3.puts("state.pt")) == 1 and asked.path.endswith("state.pt")
    save(folder, 100)
    copier = start()
    assert copier.close(PLENTY_S) == []
    first, second = copier.news()
    assert (first["event"], second["event"]) == ("not copied", "copied")
    assert "differs from what was uploaded" in first["message"]
    assert copied(s3) == content(folder)


def test_refused_credentials_are_told_at_once_and_without_the_secret(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    s3.refuses = (403, f"SignatureDoesNotMatch: {SECRET}")
    save(folder, 100)
    copier = start()
    began = time.monotonic()
    (warning,) = copier.close(PLENTY_S)
    assert time.monotonic() - began < PLENTY_S / 2
    assert "refused" in warning
    assert "checkpoint 100" in warning
    assert str(folder.path) in warning
    (fact,) = events(copier, "not copied")
    assert fact["update"] == 100
    assert states(folder) == {"100": "failed"}
    assert SECRET not in warning + json.dumps(fact) + folder.file(COPIES).read_text("utf-8")


def test_a_full_storage_takes_the_record_still_and_the_rest_once_there_is_room(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    s3.quota_bytes = 2000
    save(folder, 100)
    copier = start()
    assert not copier.wait(PLENTY_S)
    assert "config.json" in copied(s3)
    (fact,) = events(copier, "not copied")
    assert "full" in fact["message"]
    s3.quota_bytes = None
    assert copier.close(PLENTY_S) == []
    assert copied(s3) == content(folder)


def test_a_damaged_checkpoint_here_is_not_copied_and_the_others_are(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]
) -> None:
    save(folder, 100)
    save(folder, 200)
    state = folder.file(CHECKPOINTS) / "update-000200/state.pt"
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    copier = start()
    (warning,) = copier.close(PLENTY_S)
    assert "checkpoint 200 is not copied" in warning
    assert "damaged on this machine" in warning
    assert updates_there(s3) == {100}


def test_training_goes_on_while_nobody_answers_and_the_end_waits_no_longer_than_it_may(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as black_hole:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{black_hole.getsockname()[1]}")
        copier = start()
        for update in range(100, 400, 100):
            save(folder, update)
            began = time.monotonic()
            copier.notify()
            copier.news()
            assert time.monotonic() - began < 0.5
        began = time.monotonic()
        (warning,) = copier.close(0.5)
        assert time.monotonic() - began < 2.5
        assert "checkpoints 200, 300" in warning
        assert states(folder)["300"] == "failed"
        before = folder.file(COPIES).read_bytes()
    copier._thread.join(30)
    assert not copier._thread.is_alive()
    assert folder.file(COPIES).read_bytes() == before


def test_a_slow_server_is_waited_for(s3: FakeS3, folder: RunFolder, start: Callable[..., Copier]) -> None:
    s3.before = lambda _: time.sleep(0.05)
    save(folder, 100)
    assert start().close(PLENTY_S) == []


def test_a_disk_that_refuses_the_state_file_stops_neither_copies_nor_training(
    s3: FakeS3, folder: RunFolder, start: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise LabError("copies.json: cannot write 10 bytes: No space left on device")

    save(folder, 100)
    folder.write_json(COPIES, {})
    with monkeypatch.context() as context:
        context.setattr(folder, "write_json", full)
        copier = start()
        until(lambda: updates_there(s3) == {100} and bool(copier._problems))
        assert [one["message"] for one in events(copier, "not copied")] == [str(copier._problems[0].message)]
    assert copier.close(PLENTY_S) == []
    assert states(folder) == {"100": "verified"}


def test_what_only_a_person_can_change_is_said_before_training(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    assert need_copies(ADDRESS) == []
    assert s3.names() == set()
    with pytest.raises(UserError, match="no such bucket"):
        need_copies("s3://nobodys/kept")
    s3.refuses = (403, "InvalidAccessKeyId")
    with pytest.raises(UserError, match="refused"):
        need_copies(ADDRESS)
    s3.refuses = None
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UserError, match="no credentials"):
        need_copies(ADDRESS)


def test_a_server_that_does_not_answer_now_is_a_warning(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", unreachable())
    (warning,) = need_copies(ADDRESS)
    assert "cannot be reached" in warning
    with socket.create_server(("127.0.0.1", 0)) as black_hole:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{black_hole.getsockname()[1]}")
        (warning,) = need_copies(ADDRESS, wait_s=0.2)
        assert "no answer" in warning
        time.sleep(0.1)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("s3fs", "fsspec"):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, missing, None)
            context.setitem(sys.modules, f"{missing}.core", None)
            if missing == "s3fs":
                context.delitem(
                    sys.modules["fsspec.registry"]._registry, "s3", raising=False
                )  # it remembers what it imported
            with pytest.raises(UserError, match=r"pip install 'training-lab\[s3\]'"):
                need_copies(ADDRESS)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "kept",
        "/kept",
        "s3://",
        "s3:///kept",
        "file://kept",
        "nonsense://kept",
        "s3://a/../b",
        "simplecache::s3://a",
    ],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError) as caught:
        need_copies(address)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("address", [f"s3://key:{SECRET}@lab/kept", f"s3://lab/kept?secret={SECRET}"])
def test_an_address_with_credentials_is_refused_without_quoting_them(address: str) -> None:
    with pytest.raises(UserError) as caught:
        check_address(address)
    assert SECRET not in str(caught.value)
