"""Where building and keeping data meets the world: limits, lost sources, shared and read-only folders, no locks."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from reading import read_files, write
from streams import stream_of
from tiny import tiny

from experiment_runner import durable
from training_lab import cli
from training_lab.config import Config
from training_lab.data import build, split
from training_lab.data.build import BuildOptions, find_or_build
from training_lab.data.cache import DOCUMENTS, TOKENS
from training_lab.data.dataset import STATS, prepare_dataset
from training_lab.data.layout import TokenBudget
from training_lab.data.sources import Source, SourceFile, find_source
from training_lab.data.split import content_hash
from training_lab.errors import LabError, UserError
from training_lab.progress import NoProgress
from training_lab.sealed import read_sealed, write_sealed

LINES = [json.dumps({"text": f"document {number} " + "x" * number}) + "\n" for number in range(60)]


def config_of(*settings: str) -> Config:
    return tiny("data.source=files", 'data.paths=["texts"]', "data.tokenizer=byte", *settings)


def built(source: Source, config: Config) -> Path:
    return find_or_build(source, config.data, NoProgress(), BuildOptions(2)).path


# --- a source that is not what it was ---


def write_text(name: str, content: str) -> None:
    data = content.encode("utf-8")
    write(name, gzip.compress(data, mtime=0) if name.endswith(".gz") else data)


@pytest.mark.parametrize("limit", ["data.max_documents=3", "data.max_tokens=60"])
@pytest.mark.parametrize("name", ["texts/a.jsonl", "texts/a.jsonl.gz"])
def test_a_file_that_changed_after_it_was_hashed_is_refused_though_it_is_not_read_to_its_end(
    name: str, limit: str
) -> None:
    write_text(name, "".join(LINES))
    config = config_of(limit)
    source = find_source(config.data, NoProgress())
    write_text(name, "".join([json.dumps({"text": "tampered"}) + "\n", *LINES[1:]]))
    with pytest.raises(UserError, match="changed while it was read"):
        built(source, config)
    assert [path.name for path in Path(".cache/tokens").iterdir() if path.is_dir()] == []


def test_a_build_that_loses_its_source_keeps_its_blocks_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BLOCK_DOCUMENTS", 4)
    monkeypatch.setattr(build, "BLOCK_RULE", [4, build.BLOCK_CHARACTERS])
    for name in ("a", "b"):
        write(f"texts/{name}.jsonl", "".join(LINES[: 30 if name == "a" else 60]).encode())
    config = config_of()
    source = find_source(config.data, NoProgress())

    def unreachable() -> Path:
        raise LabError("the network is gone")

    lost = source._replace(files=[source.files[0], SourceFile(*source.files[1][:3], unreachable, unreachable)])
    with pytest.raises(LabError, match="the network is gone"):
        built(lost, config)
    assert [path.name for path in Path(".cache/tokens").iterdir() if not path.name.startswith(".")] == []
    encoded: list[int] = []
    encode_block = build.encode_block

    def counting(block: build.Block | LabError, *rest: object) -> build.Encoded:
        encoded.append(len(block.parts) if isinstance(block, build.Block) else 0)
        return encode_block(block, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "encode_block", counting)
    kept = built(source, config)
    assert 0 < sum(encoded) < 90
    fresh = built(source, config_of("data.cache_dir=fresh"))
    assert [(kept / name).read_bytes() for name in (TOKENS, DOCUMENTS)] == [
        (fresh / name).read_bytes() for name in (TOKENS, DOCUMENTS)
    ]


def test_verify_never_builds_and_says_that_files_changed(capsys: pytest.CaptureFixture[str]) -> None:
    write("texts/a.jsonl", "".join(LINES).encode())
    config = ["--config", "c.json"]
    Path("c.json").write_text(json.dumps({"data": {"source": "files", "paths": ["texts"]}, "batch": {"batch_size": 1}}))
    assert cli.main(["data", "verify", *config]) == 1
    assert "BAD  cache: " in capsys.readouterr().out
    assert not Path(".cache/tokens").exists()
    assert cli.main(["data", "prepare", *config]) == 0
    assert cli.main(["data", "verify", *config]) == 0
    write("texts/a.jsonl", "".join(LINES[:-1]).encode())
    capsys.readouterr()
    assert cli.main(["data", "verify", *config]) == 1
    assert "they have changed since, or were never prepared" in capsys.readouterr().out


# --- folders that are shared, read-only or without locks ---


def test_many_that_write_one_sealed_file_at_once_all_succeed() -> None:
    path = Path("folder/a.json")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write_sealed(path, {"number": number}), range(200)))
    assert read_sealed(path)["number"] in range(200)
    assert [other.name for other in path.parent.iterdir()] == ["a.json"]


def test_two_builders_without_locks_never_publish_a_cache_that_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    write("texts/a.jsonl", "".join(LINES).encode())
    config = config_of()
    source = find_source(config.data, NoProgress())
    real = build.add_to_tally

    def intruding(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        with open(next(Path(".cache/tokens").glob(".building-*")) / TOKENS, "ab") as file:
            file.write(b"other")

    monkeypatch.setattr(build, "add_to_tally", intruding)
    with pytest.raises(LabError, match="on a file system without locks; build it once, alone"):
        built(source, config)
    assert [path.name for path in Path(".cache/tokens").iterdir() if not path.name.startswith(".")] == []


def test_a_prepared_cache_that_cannot_be_written_to_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    write("texts/a.jsonl", "".join(LINES).encode())
    config = config_of()
    expected = prepare_dataset(config).stats(NoProgress())
    for path in Path(".cache/datasets").rglob(STATS):
        path.unlink()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(30, os.strerror(30))

    for writer in (durable, build):
        monkeypatch.setattr(writer, "sync_file", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    dataset = prepare_dataset(config)
    assert dataset.stats(NoProgress()) == expected


def test_the_cache_folder_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write("texts/a.jsonl", "".join(LINES).encode())
    prepare_dataset(config_of("data.cache_dir=~/kept")).stats(NoProgress())
    assert {path.name for path in (tmp_path / "home/kept").iterdir()} == {"tokens", "datasets"}


# --- what is read ---


def test_hidden_files_and_folders_are_not_read_from_folders_and_can_be_named() -> None:
    for name in ("texts/a.txt", "texts/.hidden.txt", "texts/.venv/lib.py", "texts/.cache/downloads/x.txt"):
        write(name, b"text")
    assert [name for name, _ in read_files("texts").documents] == ["texts/a.txt"]
    assert [name for name, _ in read_files("texts/.venv").documents] == ["texts/.venv/lib.py"]
    assert [name for name, _ in read_files("texts/.hidden.txt").documents] == ["texts/.hidden.txt"]


@pytest.mark.parametrize("suffix", [".ndjson", ".jsonlines", ".NDJSON", ".ndjson.gz"])
def test_other_names_of_jsonl_are_jsonl(suffix: str) -> None:
    write_text(f"a{suffix}", LINES[0])
    assert [text for _, text in read_files(f"a{suffix}").documents] == [json.loads(LINES[0])["text"]]


@pytest.mark.timeout(20)
def test_a_record_with_very_many_keys_one_of_them_twice_is_refused_at_once() -> None:
    keys = ",".join(f'"key{number}":1' for number in range(100_000))
    write("a.jsonl", ('{"text":"x",' + keys + ',"key7":2}\n').encode())
    with pytest.raises(UserError, match="the key 'key7' is there twice"):
        read_files("a.jsonl")


# --- long texts ---


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_the_content_hash_does_not_depend_on_the_pieces_in_which_a_text_is_hashed(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["", " ", "a", " a ", "a  b\n\nc", "\u3000가 나\u2028다 e\u0301 " * 7, "word" * 50, " x" * 30 + "\t"]
    whole = [content_hash(text) for text in texts]
    monkeypatch.setattr(split, "PIECE_CHARACTERS", size)
    assert [content_hash(text) for text in texts] == whole


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_the_hash_of_tokens_does_not_depend_on_its_slices(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Callable[[np.ndarray], np.ndarray]] = [lambda t: t, lambda t: t.astype(np.uint8)]
    tokens = np.arange(200, dtype=np.uint32)
    expected = build.token_hash(tokens)
    monkeypatch.setattr(build, "HASHED_TOKENS", size)
    assert {build.token_hash(kind(tokens)) for kind in kinds} == {expected}


def test_an_update_that_touches_two_epochs_of_short_documents_stays_within_the_limit_of_a_long_run() -> None:
    layout = TokenBudget(stream_of([1, 1, 1, 1, 30, 31]), 8, 64, 0)
    limit = layout.max_pieces(10**9, 1)
    assert max(len(layout.pieces_of_update(update).lengths) for update in range(1, 3000)) <= limit
