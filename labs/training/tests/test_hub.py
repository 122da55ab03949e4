"""Files of a dataset on a hub: asked for once, pinned for good, and used only if they are what was promised."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakehub import CONTENT, FLIPPED, NAME, FakeHub, Fault

from training_lab.data import hub as hub_module
from training_lab.data.download import ATTEMPTS, LONGEST_WAIT_S
from training_lab.data.fineweb import FINEWEB_REPO
from training_lab.data.hub import HubFile, Listing, chosen_files, find_or_fetch, list_files, local_path
from training_lab.errors import LabError, UserError
from training_lab.progress import NoProgress

SHA256 = hashlib.sha256(CONTENT).hexdigest()
CACHE = Path("cache")
PIN = CACHE / "hub" / FINEWEB_REPO / "main.json"
pytestmark = pytest.mark.usefixtures("waits")


def listing(revision: str = "main") -> Listing:
    return list_files(FINEWEB_REPO, revision, CACHE, NoProgress())


def fetched(hub: FakeHub) -> Path:
    """Where the file at the head of `main` is, here."""
    return find_or_fetch(file_of(hub), CACHE, NoProgress())


def file_of(hub: FakeHub) -> HubFile:
    return HubFile(FINEWEB_REPO, hub.branches["main"], NAME, SHA256, len(CONTENT))


def refusal(kind: type[LabError], revision: str = "main") -> str:
    with pytest.raises(LabError) as caught:
        listing(revision)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


# --- which files there are ---


def test_a_listing_has_the_commit_and_the_large_files_with_hash_and_size(hub: FakeHub) -> None:
    found = listing()
    assert found.commit == hub.branches["main"]
    assert set(found.files) == {NAME, "sample/10BT/000_00000.parquet"}
    assert found.files[NAME] == (SHA256, len(CONTENT))


def test_a_branch_stays_what_it_was_the_first_time_without_being_asked_for_again(hub: FakeHub) -> None:
    first = listing()
    hub.publish({NAME: CONTENT + b"more"})
    assert hub.branches["main"] != first.commit
    assert listing() == first
    assert len(hub.requests) == 1
    assert list_files(FINEWEB_REPO, "main", Path("other_cache"), NoProgress()) != first


def test_a_branch_with_a_slash_in_its_name_is_found(hub: FakeHub) -> None:
    commit = hub.publish({NAME: CONTENT}, branch="refs/pr/1")
    assert listing("refs/pr/1").commit == commit


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"\xff", b'{"sha": "x"}', b'{"sha": "x", "files": []}',
     b'{"sha": "x", "files": {"a": 1}}', b'{"sha": 5, "files": {}}'],
)  # fmt: skip
def test_a_damaged_pin_is_named_and_not_replaced(hub: FakeHub, content: bytes) -> None:
    listing()
    PIN.write_bytes(content)
    assert refusal(UserError).startswith(f"{PIN}: damaged")
    assert PIN.read_bytes() == content
    assert len(hub.requests) == 1


@pytest.mark.parametrize("place", ["sha", "files"])
def test_a_pin_in_which_one_digit_changed_is_refused(hub: FakeHub, place: str) -> None:
    kept = listing()
    digits = kept.commit if place == "sha" else SHA256
    other = ("0" if digits[0] != "0" else "1") + digits[1:]
    PIN.write_text(PIN.read_text("utf-8").replace(digits, other), "utf-8")
    assert refusal(UserError).startswith(f"{PIN}: damaged")


def test_a_commit_is_listed_by_its_own_name_only(hub: FakeHub) -> None:
    commit = hub.branches["main"]
    assert listing(commit).commit == commit
    hub.once(Fault(commit="a" * 40), of="listing")
    other = hub.publish({NAME: b"other"})
    assert f"the hub answers with commit {'a' * 40}; not used" in refusal(LabError, other)
    assert listing(other).commit == other, "the wrong answer was kept"


@pytest.mark.parametrize(
    "says",
    [[], {}, {"sha": "abc", "siblings": []}, {"sha": "a" * 40, "siblings": [1]},
     {"sha": "a" * 40, "siblings": [{"rfilename": "a", "lfs": {"size": 1}}]},
     {"sha": "a" * 40, "siblings": [{"rfilename": "a", "lfs": {"sha256": "../../a", "size": 1}}]}],
)  # fmt: skip
def test_an_answer_that_is_no_listing_is_refused_and_not_kept(hub: FakeHub, says: Any) -> None:
    hub.always(Fault(json=says), of="listing")
    assert "not the answer of a hub" in refusal(LabError)
    assert not PIN.exists()


def test_a_revision_or_dataset_that_is_not_there_is_the_users_mistake(hub: FakeHub) -> None:
    assert "RevisionNotFound: there is no such dataset or revision" in refusal(UserError, "mian")
    hub.repo = "somebody/else"
    assert "RepoNotFound: there is no such dataset or revision" in refusal(UserError)
    assert not PIN.exists()


def test_the_hub_is_asked_again_after_a_failure_that_may_pass(hub: FakeHub, waits: list[float]) -> None:
    hub.once(Fault(status=429, headers={"Retry-After": "11"}), Fault(status=503), of="listing")
    assert listing().commit == hub.branches["main"]
    assert waits[0] == 11
    assert 2 <= waits[1] <= 3


def test_nobody_waits_for_the_hub_longer_than_the_limit(hub: FakeHub, waits: list[float]) -> None:
    hub.once(Fault(status=429, headers={"Retry-After": "86400"}), of="listing")
    listing()
    assert waits == [LONGEST_WAIT_S]


@pytest.mark.parametrize(("status", "asked"), [(503, ATTEMPTS), (401, 1), (403, 1)])
def test_a_hub_that_refuses_is_named(hub: FakeHub, status: int, asked: int) -> None:
    hub.always(Fault(status=status), of="listing")
    message = refusal(LabError)
    assert message.startswith(f"{hub.url}/api/datasets/{FINEWEB_REPO}/revision/main")
    assert str(status) in message
    assert ("HF_TOKEN" in message) == (status != 503)
    assert len(hub.requests) == asked


def test_a_hub_that_nobody_can_reach_is_named(hub: FakeHub) -> None:
    hub.stop()
    assert refusal(LabError).startswith(f"{hub.url}/api/")


@pytest.mark.parametrize(
    ("name", "value"), [("HF_TOKEN", "hf_ключ"), ("HF_TOKEN", "hf_a\nb"), ("HF_ENDPOINT", "127.0.0.1:1")]
)
def test_a_setting_that_cannot_be_used_is_named_at_once(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, waits: list[float], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert name in refusal(UserError)
    assert waits == []


def test_two_that_ask_for_a_branch_at_once_both_have_it(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def sync_when_both_wrote(_: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)

    monkeypatch.setattr(os, "fsync", sync_when_both_wrote)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(listing), pool.submit(listing)
        assert first.result() == second.result()


def test_the_patterns_stand_for_files_once_each_and_sorted() -> None:
    here = Listing("c" * 40, {"b/1.parquet": ("x", 1), "a/1.parquet": ("y", 1), "a/2.parquet": ("z", 1)})
    assert chosen_files(here, ("b/*", "2.parquet", "a/1.parquet"), ".parquet") == sorted(here.files)
    assert chosen_files(here, ("2.parquet", "a/2.parquet"), ".parquet") == ["a/2.parquet"]


def test_a_name_without_its_folder_is_refused_where_it_stands_for_several_files() -> None:
    here = Listing("c" * 40, {"b/1.parquet": ("x", 1), "a/1.parquet": ("y", 1)})
    with pytest.raises(UserError, match=r"1.parquet: stands for 2 files: a/1.parquet, b/1.parquet"):
        chosen_files(here, ("1.parquet",), ".parquet")


# --- each of them here ---


def test_a_file_is_fetched_once_to_a_folder_named_by_its_hash(hub: FakeHub) -> None:
    assert fetched(hub) == fetched(hub) == CACHE / "downloads" / SHA256 / "014_00000.parquet"
    assert fetched(hub).read_bytes() == CONTENT
    assert [one.path for one in hub.gets()] == [
        f"/datasets/{FINEWEB_REPO}/resolve/{hub.branches['main']}/sample/10BT/014_00000.parquet"
    ]


def test_a_damaged_download_is_refused_and_not_replaced(hub: FakeHub) -> None:
    path = local_path(file_of(hub), CACHE)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match=r"damaged: its SHA-256 is .* delete it to download it again"):
        fetched(hub)
    assert path.read_bytes() == CONTENT[:-1]
    assert hub.requests == []


def client_blob(content: bytes) -> Path:
    """What the hub's own client keeps of the file."""
    blob = hub_module.hub_cache() / "datasets--HuggingFaceFW--fineweb" / "blobs" / SHA256
    blob.parent.mkdir(parents=True)
    blob.write_bytes(content)
    return blob


@pytest.mark.parametrize("setting", ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"])
def test_a_file_that_the_hubs_client_has_is_not_fetched(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv(setting, "somewhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    blob = client_blob(CONTENT)
    assert blob.is_relative_to("somewhere")
    assert fetched(hub) == blob
    assert hub.requests == []


def test_a_corrupted_file_of_the_hubs_client_is_left_alone_and_not_used(hub: FakeHub) -> None:
    blob = client_blob(CONTENT.replace(b"PAR1", b"PAR2"))
    assert fetched(hub).read_bytes() == CONTENT
    assert blob.read_bytes() != CONTENT
    assert len(hub.gets()) == 1


@pytest.mark.parametrize("setting", ["1", "ON", "yes", "True"])
def test_offline_what_is_here_is_enough_and_what_is_not_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    first, path = listing(), fetched(hub)
    monkeypatch.setenv("HF_HUB_OFFLINE", setting)
    asked = len(hub.requests)
    assert listing() == first
    assert fetched(hub) == path
    assert "HF_HUB_OFFLINE is set" in refusal(LabError, "v1.4.0")
    path.unlink()
    with pytest.raises(LabError, match=f"HF_HUB_OFFLINE is set.* put the file at {path}"):
        fetched(hub)
    assert len(hub.requests) == asked


@pytest.mark.parametrize("setting", ["", "0", "off"])
def test_a_setting_that_says_no_is_not_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", setting)
    assert listing().commit == hub.branches["main"]


def tokens_sent(hub: FakeHub) -> list[str | None]:
    """What is sent with the request for the listing, and with that for the file."""
    listing()
    fetched(hub)
    return [request.authorization for request in hub.requests]


def test_without_an_account_nothing_is_sent_that_names_one(hub: FakeHub) -> None:
    assert tokens_sent(hub) == [None, None]


def test_the_token_of_the_environment_goes_before_the_kept_one(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Path(os.environ["HF_HOME"]) / "token"
    kept.parent.mkdir()
    kept.write_text("hf_kept\n")
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    assert tokens_sent(hub) == ["Bearer hf_environment"] * 2
    monkeypatch.setenv("HF_TOKEN", "")
    assert hub_module.token() == "hf_kept"
    monkeypatch.setenv("HF_TOKEN_PATH", "elsewhere")
    assert hub_module.token() is None
    Path("elsewhere").write_text(" hf_elsewhere ")
    assert hub_module.token() == "hf_elsewhere"


def test_without_a_setting_the_hub_is_the_public_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_module.endpoint() == "https://huggingface.co"
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    assert HubFile("a/b", "c", "d", "", 0).url == "https://mirror.example/datasets/a/b/resolve/c/d"


# --- the hub's own client ---

CLIENT = """
import sys
from huggingface_hub import HfApi, hf_hub_download
repo, name, commit = sys.argv[1:]
info = HfApi().dataset_info(repo, revision="main", files_metadata=True)
assert info.sha == commit, info
assert {one.rfilename: one.lfs.sha256 for one in info.siblings if one.lfs}[name]
print(hf_hub_download(repo, name, repo_type="dataset", revision="main"))
"""


def test_the_hubs_own_client_takes_the_fake_for_a_hub_and_a_flipped_byte_for_the_file(hub: FakeHub) -> None:
    hub.publish({NAME: CONTENT})
    hub.once(FLIPPED)
    quiet = ("DISABLE_TELEMETRY", "DISABLE_IMPLICIT_TOKEN", "DISABLE_UPDATE_CHECK", "DISABLE_XET")
    environment = {**os.environ, **{f"HF_HUB_{name}": "1" for name in quiet}}
    arguments = (FINEWEB_REPO, NAME, hub.branches["main"])
    command = [sys.executable, "-c", CLIENT, *arguments]
    flipped = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert flipped.returncode == 0, flipped.stderr
    kept = Path(flipped.stdout.splitlines()[-1])
    assert kept.resolve().name == SHA256
    assert len(kept.read_bytes()) == len(CONTENT)
    assert kept.read_bytes() != CONTENT
    hub.always(FLIPPED)
    with pytest.raises(LabError, match=f"expected {SHA256}"):
        fetched(hub)
    hub.always(Fault())
    assert fetched(hub).read_bytes() == CONTENT
    shutil.rmtree(os.environ["HF_HOME"])
    right = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert right.returncode == 0, right.stderr
    assert Path(right.stdout.splitlines()[-1]).read_bytes() == CONTENT
