"""FineWeb as a source: its pinned files, a branch of it, and from the command line to a run and offline again."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fakehub import CONTENT, FLIPPED, NAME, FakeHub, make_parquet
from tiny import TINY, run, tiny

from training_lab.config_data import FINEWEB_REVISION
from training_lab.data.dataset import prepare_dataset
from training_lab.data.fineweb import FINEWEB_FILES, FINEWEB_REPO
from training_lab.data.sources import Source, find_source
from training_lab.errors import UserError
from training_lab.progress import NoProgress

CACHE = Path("cache")

pytestmark = pytest.mark.usefixtures("waits")


def fineweb(*overrides: str) -> Source:
    return find_source(tiny("data.source=fineweb", f"data.cache_dir={CACHE}", *overrides).data, NoProgress())


# --- the files of it ---


def test_the_pinned_files_are_known_without_a_request(hub: FakeHub) -> None:
    source = fineweb('data.fineweb_files=["*"]')
    assert {file.name: (file.sha256, file.bytes) for file in source.files} == FINEWEB_FILES
    assert source.facts["revision"] == FINEWEB_REVISION
    assert "revision_asked_for" not in source.facts
    assert hub.requests == []
    assert not CACHE.exists()


@pytest.mark.parametrize("name", list(FINEWEB_FILES))
def test_each_pinned_file_is_chosen_by_its_name_or_the_end_of_it(name: str) -> None:
    for pattern in (name, Path(name).name):
        assert [file.name for file in fineweb(f'data.fineweb_files=["{pattern}"]').files] == [name]


def test_globs_choose_the_files_that_they_match_in_their_order() -> None:
    chosen = [
        file.name for file in fineweb('data.fineweb_files=["sample/10BT/01*", "*/000_*", "010_00000.parquet"]').files
    ]
    assert chosen == [f"sample/10BT/{number:03}_00000.parquet" for number in (0, 10, 11, 12, 13, 14)]


def test_a_wrong_name_is_refused_with_some_of_the_right_ones() -> None:
    with pytest.raises(
        UserError, match=r"data\.fineweb_files: 015_00000.parquet: no such file is known at 9bb295ddab0e…; known are"
    ):
        fineweb('data.fineweb_files=["014_00000.parquet", "015_00000.parquet"]')


def test_a_branch_of_fineweb_is_resolved_and_what_was_asked_for_is_kept(hub: FakeHub) -> None:
    source = fineweb("data.fineweb_revision=main")
    assert (source.facts["revision"], source.facts["revision_asked_for"]) == (hub.branches["main"], "main")
    (file,) = source.files
    assert file.locate().read_bytes() == file.locate().read_bytes() == CONTENT
    assert len(hub.gets()) == 1


# --- from the command line to the run ---

SETTINGS = (
    "data.source=fineweb", "data.fineweb_revision=main", "data.tokenizer=gpt2", "batch.layout=packs", "batch.packs=4",
    "model.max_positions=64", "model.d_model=16", "model.num_layers=1", "train.updates=2", "schedule.warmup_updates=1",
)  # fmt: skip
TRAIN = ("train", "--config", str(TINY), "--json", *(word for one in SETTINGS for word in ("--set", one)))


def recorded(name: str) -> dict[str, Any]:
    """A file of the one run."""
    (path,) = Path(".runs").glob(f"*/{name}")
    value: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return value


def test_a_run_on_fineweb_says_what_it_read_and_offline_it_is_the_same(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make_parquet(300)
    commit = hub.publish({NAME: content})
    done = run(*TRAIN)
    assert done.returncode == 0, done.stderr
    manifest, stats = recorded("data-manifest.json"), recorded("data-stats.json")
    source = manifest["source"]
    assert (source["repo"], source["revision"], source["revision_asked_for"]) == (FINEWEB_REPO, commit, "main")
    assert source["licence"].startswith("ODC-By 1.0")
    assert source["files"] == [{"name": NAME, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}]
    assert stats["token_count_column"] == {"checked": 300, "mismatches": 0, "examples": []}
    assert stats["licence"]["licence"] == source["licence"]
    assert [request.method for request in hub.requests] == ["GET", "GET"]

    hub.stop()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    identity = manifest["identity"]
    assert prepare_dataset(tiny(*SETTINGS)).manifest["identity"] == identity
    shutil.rmtree(".cache/tokens")
    assert prepare_dataset(tiny(*SETTINGS)).manifest["identity"] == identity, "from the download alone"


def test_a_flipped_byte_ends_a_run_in_one_line_before_anything_is_made_of_it(hub: FakeHub) -> None:
    hub.publish({NAME: make_parquet(20)})
    hub.always(FLIPPED)
    done = run(*TRAIN)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "has SHA-256" in done.stderr
    assert [path.name for path in Path(".cache").glob("tokens/*") if not path.name.startswith(".")] == []
    assert list(Path(".cache/downloads").rglob("*.parquet")) == []
