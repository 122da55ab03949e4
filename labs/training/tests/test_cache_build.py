"""A token cache is the same bytes however it was built: by many or few, at once or after any death."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from tiny import TRAINING, tiny

from experiment_runner import durable
from training_lab.config_data import DataConfig
from training_lab.data import build as building
from training_lab.data.build import Block, BuildOptions, Encoded, find_or_build
from training_lab.data.cache import TokenCache, open_cache
from training_lab.data.sources import Source, find_source
from training_lab.data.synthetic import synthetic_document
from training_lab.data.tokenizers import Tokenizer
from training_lab.errors import LabError, UserError
from training_lab.progress import NoProgress

FILES = ("tokens.bin", "documents.bin", "manifest.json")
KILLS = 12


def write_lines(name: str, texts: list[str]) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def write_corpus() -> None:
    """Some 40 documents in three files, of many lengths, some of them nothing."""
    texts = [synthetic_document(number).text[:700] + "가é" * (number % 3) for number in range(40)]
    write_lines("corpus/a.jsonl", [*texts[:17], "", " \n"])
    write_lines("corpus/b.jsonl", ["", *texts[17:39], "", ""])
    Path("corpus/c.txt").write_text(texts[39], encoding="utf-8")


def settings(*overrides: str) -> DataConfig:
    return tiny("data.source=files", 'data.paths=["corpus"]', *overrides).data


def build(config: DataConfig, workers: int = 1, progress: NoProgress | None = None) -> TokenCache:
    return find_or_build(find_source(config, NoProgress()), config, progress or NoProgress(), BuildOptions(workers))


def content(cache: TokenCache) -> dict[str, bytes]:
    assert sorted(path.name for path in cache.path.iterdir()) == sorted(FILES)
    return {name: (cache.path / name).read_bytes() for name in FILES}


def leftovers(cache_dir: str) -> list[str]:
    """What lies beside the caches, except for locks."""
    folder = Path(cache_dir) / "tokens"
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"] if folder.is_dir() else []


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "BLOCK_DOCUMENTS", 4)
    monkeypatch.setattr(building, "BLOCK_CHARACTERS", 1500)
    monkeypatch.setattr(building, "BLOCK_RULE", [4, 1500])
    write_corpus()


Key = tuple[int, int] | None
original_encode_block = building.encode_block


class Encoding:
    """Stands in for encode_block: notes each block, by its first document, and breaks off at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Key] = []
        self.breaks_at: set[Key] = set()
        monkeypatch.setattr(building, "encode_block", self)

    def __call__(self, block: Block | LabError, source: Source, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Encoded:
        if isinstance(block, LabError):
            raise block
        key = (block.parts[0].file, block.parts[0].document.number) if block.parts else None
        if key in self.breaks_at:
            raise KeyboardInterrupt
        self.seen.append(key)
        return original_encode_block(block, source, tokenizer, dtype)

    def start(self, breaks_at: set[Key] | None = None) -> None:
        self.seen, self.breaks_at = [], breaks_at or set()


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch, small_blocks: None) -> Encoding:
    return Encoding(monkeypatch)


def undisturbed(encoding: Encoding, *overrides: str) -> tuple[dict[str, bytes], list[Key]]:
    """The bytes of a build that nothing happened to, and its blocks in their order."""
    encoding.start()
    made = content(build(settings("data.cache_dir=undisturbed", *overrides)))
    assert len(encoding.seen) > 8
    return made, list(encoding.seen)


def interrupt(encoding: Encoding, config: DataConfig, key: Key, workers: int = 1) -> Path:
    """A build that is broken off at a block; its unfinished folder."""
    encoding.start({key})
    with pytest.raises(KeyboardInterrupt):
        build(config, workers)
    (name,) = leftovers(config.cache_dir)
    assert name.startswith(".building-")
    return Path(config.cache_dir) / "tokens" / name


# --- the same bytes ---


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_any_number_of_workers_makes_the_same_bytes(tokenizer: str) -> None:
    made = [
        content(build(settings(f"data.tokenizer={tokenizer}", f"data.cache_dir=cache-{workers}"), workers))
        for workers in (1, 2, 3, 8, 0)
    ]
    assert all(one == made[0] for one in made)


@pytest.mark.usefixtures("small_blocks")
def test_the_fast_tokenizer_makes_the_same_bytes() -> None:
    pytest.importorskip("gigatoken")
    expected = content(build(settings("data.tokenizer=gpt2", "data.cache_dir=usual")))
    config = settings("data.tokenizer=gpt2", "data.cache_dir=fast")
    source = find_source(config, NoProgress())
    assert content(find_or_build(source, config, NoProgress(), BuildOptions(2, is_fast=True))) == expected


@pytest.mark.usefixtures("small_blocks")
def test_the_order_in_which_files_are_listed_does_not_matter() -> None:
    expected = content(build(settings("data.cache_dir=expected")))
    draws = random.Random(0)
    for number in range(4):
        paths = ["corpus/a.jsonl", "corpus/b.jsonl", "corpus/c.txt", "corpus/*.jsonl"]
        draws.shuffle(paths)
        config = settings(f"data.paths={json.dumps(paths)}", f"data.cache_dir=cache-{number}")
        assert content(build(config)) == expected


def test_small_and_large_blocks_make_the_same_bytes(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = undisturbed(encoding)
    for size in (1, 3, 1000):
        monkeypatch.setattr(building, "BLOCK_DOCUMENTS", size)
        assert content(build(settings(f"data.cache_dir=cache-{size}"), 2)) == expected


# --- broken off ---


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_a_build_broken_off_at_any_block_goes_on_there_to_the_same_bytes(
    encoding: Encoding, tokenizer: str, workers: int
) -> None:
    expected, keys = undisturbed(encoding, f"data.tokenizer={tokenizer}")
    for number, key in enumerate(keys):
        config = settings(f"data.tokenizer={tokenizer}", f"data.cache_dir=cache-{number}")
        interrupt(encoding, config, key, workers)
        encoding.start()
        assert content(build(config, workers)) == expected
        assert sorted(map(str, encoding.seen)) == sorted(map(str, keys[number:]))


class BreakingProgress(NoProgress):
    """Breaks off when it is shown something for the nth time."""

    def __init__(self, shows: int) -> None:
        self.left = shows

    def show(self, what: str, done: float, total: float | None, figures: str) -> None:
        if what == "Tokenising":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def test_a_build_broken_off_after_any_block_tokenises_only_the_others(encoding: Encoding) -> None:
    expected, keys = undisturbed(encoding)
    for number in range(1, len(keys) + 1):
        config = settings(f"data.cache_dir=cache-{number}")
        with pytest.raises(KeyboardInterrupt):
            build(config, 2, BreakingProgress(number))
        encoding.start()
        assert content(build(config, 2)) == expected
        assert sorted(map(str, encoding.seen)) == sorted(map(str, keys[number:]))


def test_a_build_broken_off_again_and_again_is_the_same(encoding: Encoding) -> None:
    expected, keys = undisturbed(encoding)
    config = settings("data.cache_dir=cache")
    for key in keys:
        interrupt(encoding, config, key, workers=2)
    encoding.start()
    assert content(build(config)) == expected
    assert encoding.seen == keys[-1:]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def sizes_before(aside: Path, block: int) -> tuple[int, int]:
    """The bytes of both files before a block."""
    entries = [json.loads(line) for line in (aside / "journal.jsonl").read_bytes().splitlines()]
    return sum(e["bytes"][0] for e in entries[:block]), sum(e["bytes"][1] for e in entries[:block])


def damage_line(aside: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes line 3 (counted from 0) of the journal."""
    lines = (aside / "journal.jsonl").read_bytes().splitlines(keepends=True)
    lines[3] = change(lines[3])
    (aside / "journal.jsonl").write_bytes(b"".join(lines))


DAMAGES: dict[str, tuple[int, Callable[[Path], object]]] = {
    # name: (blocks that stay good of the 6 that are there, what happens)
    "a bit of the tokens": (2, lambda aside: flip(aside / "tokens.bin", sizes_before(aside, 2)[0])),
    "a bit of the rows": (4, lambda aside: flip(aside / "documents.bin", sizes_before(aside, 5)[1] - 1)),
    "the tokens cut off": (3, lambda aside: os.truncate(aside / "tokens.bin", sizes_before(aside, 4)[0] - 1)),
    "the rows cut off": (5, lambda aside: os.truncate(aside / "documents.bin", sizes_before(aside, 6)[1] - 1)),
    "no tokens": (0, lambda aside: (aside / "tokens.bin").unlink()),
    "no rows": (0, lambda aside: (aside / "documents.bin").unlink()),
    "no journal": (0, lambda aside: (aside / "journal.jsonl").unlink()),
    "a line without its end": (
        5,
        lambda aside: os.truncate(aside / "journal.jsonl", (aside / "journal.jsonl").stat().st_size - 1),
    ),
    "a line cut in the middle": (3, lambda aside: damage_line(aside, lambda line: line[: len(line) // 2] + b"\n")),
    "a line of zeros": (3, lambda aside: damage_line(aside, lambda line: b"\0" * (len(line) - 1) + b"\n")),
    "an empty line": (3, lambda aside: damage_line(aside, lambda line: b"\n")),
    "a line that is a number": (3, lambda aside: damage_line(aside, lambda line: b"7\n")),
    "a line that is a list": (3, lambda aside: damage_line(aside, lambda line: b"[]\n")),
    "a line without sizes": (3, lambda aside: damage_line(aside, lambda line: line.replace(b'"bytes"', b'"bites"'))),
    "a line without a tally": (3, lambda aside: damage_line(aside, lambda line: line.replace(b'"tally"', b'"tale"'))),
    "a line that is lost": (3, lambda aside: damage_line(aside, lambda line: b"")),
    "a line that is there twice": (4, lambda aside: damage_line(aside, lambda line: line + line)),
    "more tokens": (6, lambda aside: append(aside / "tokens.bin")),
    "more rows": (6, lambda aside: append(aside / "documents.bin")),
    "half a line more": (6, lambda aside: append(aside / "journal.jsonl")),
}


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b'{"rule": [4')


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_of_a_damaged_unfinished_build_only_the_good_blocks_are_kept(encoding: Encoding, damage: str) -> None:
    expected, keys = undisturbed(encoding)
    good, happen = DAMAGES[damage]
    config = settings("data.cache_dir=cache")
    happen(interrupt(encoding, config, keys[6]))
    encoding.start()
    assert content(build(config)) == expected
    assert encoding.seen == keys[good:]


def test_a_flipped_bit_anywhere_in_the_last_line_of_the_journal_changes_nothing(encoding: Encoding) -> None:
    expected, keys = undisturbed(encoding)
    config = settings("data.cache_dir=cache")
    aside = interrupt(encoding, config, keys[2])
    shutil.copytree(aside, "kept")
    encoding.start()
    wrong: list[int] = []
    journal = (aside / "journal.jsonl").read_bytes()
    for place in range(journal.index(b"\n") + 1, len(journal)):
        shutil.rmtree("cache")
        shutil.copytree("kept", aside)
        flip(aside / "journal.jsonl", place)
        try:
            is_same = content(build(config)) == expected
        except Exception:
            is_same = False
        wrong += [place] * (not is_same)
    assert not wrong, f"another cache, or none, with a bit flipped in {[journal[p - 15 : p + 1] for p in wrong]}"


def test_a_build_by_another_rule_of_blocks_is_begun_anew(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, keys = undisturbed(encoding)
    config = settings("data.cache_dir=cache")
    interrupt(encoding, config, keys[6])
    monkeypatch.setattr(building, "BLOCK_RULE", [5, 1500])
    monkeypatch.setattr(building, "BLOCK_DOCUMENTS", 5)
    encoding.start()
    assert content(build(config)) == expected
    assert encoding.seen[0] == keys[0]


def test_damaged_characters_of_an_unfinished_build_are_found_anew(encoding: Encoding) -> None:
    expected, keys = undisturbed(encoding, "data.tokenizer=char")
    config = settings("data.tokenizer=char", "data.cache_dir=cache")
    flip(interrupt(encoding, config, keys[6]) / "characters.json", 30)
    encoding.start()
    assert content(build(config)) == expected


# --- killed, and at once ---


def start_builds(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).parent / "kill_builds.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(TRAINING)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, encoding="utf-8", env=environment)


def outcome(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return json.loads(out)


def test_a_build_killed_at_random_moments_ends_in_the_same_bytes() -> None:
    write_lines("corpus/a.jsonl", [synthetic_document(number).text[:300] for number in range(400)])
    found = outcome(start_builds("kill", "corpus", "killed", str(KILLS), "1"))
    assert len(found) == KILLS
    assert max(found) > min(found), "no kill hit a build that had begun"
    expected = content(build(settings("data.cache_dir=undisturbed")))
    (name,) = leftovers("killed")
    assert content(open_cache(Path("killed/tokens") / name)) == expected
    for folder in Path("killed").glob("taken-away-*"):
        assert content(open_cache(folder)) == expected


def test_two_builders_at_once_both_succeed_and_build_once() -> None:
    write_lines("corpus/a.jsonl", [synthetic_document(number).text[:300] for number in range(200)])
    processes = [start_builds("build", "corpus", "shared") for _ in range(2)]
    for process in processes:
        process.wait(100)
    one, other = map(outcome, processes)
    assert one["folder"] == other["folder"]
    assert sorted([one["blocks"], other["blocks"]]) == [0, 50]
    assert leftovers("shared") == [one["folder"]]
    assert content(open_cache(Path("shared/tokens") / one["folder"])) == content(build(settings()))


# --- errors leave nothing ---


def refused(config: DataConfig, *words: str, error: type[LabError] = UserError) -> None:
    with pytest.raises(error) as caught:
        build(config, 2)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert leftovers(config.cache_dir) == []


def test_a_bad_line_is_refused_by_its_place_and_leaves_nothing_behind(encoding: Encoding) -> None:
    with open("corpus/b.jsonl", "a", encoding="utf-8") as file:
        file.write("no JSON\n")
    refused(settings(), "corpus/b.jsonl: line 26: not JSON")


class FullDisk(io.BufferedRandom):
    """A file that takes a few writes and then no more."""

    writes = 3

    def write(self, data: Any) -> int:
        if self.writes == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.writes -= 1
        return super().write(data)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "journal.jsonl"])
def test_a_full_disk_is_told_and_leaves_nothing_behind(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def open_full(path: Path, mode: str) -> Any:
        return FullDisk(io.FileIO(path, "a+")) if path.name == name else open(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(building, "open", open_full, raising=False)
        refused(settings(), "cannot be written: No space left on device; free some space")
    build(settings())


def test_a_disk_that_is_full_only_for_the_manifest_leaves_nothing_behind(
    small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync_nothing(file: IO[Any]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "sync_file", sync_nothing)
    refused(settings(), "No space left on device")


@pytest.mark.usefixtures("small_blocks")
def test_a_file_that_changes_after_it_was_hashed_is_refused_and_leaves_nothing_behind() -> None:
    config = settings()
    source = find_source(config, NoProgress())
    flip(Path("corpus/c.txt"), 5)
    with pytest.raises(UserError, match=r"c\.txt: changed while it was read"):
        find_or_build(source, config, NoProgress(), BuildOptions(2))
    assert leftovers(".cache") == []


def test_text_that_is_all_empty_is_refused_with_what_it_was_and_leaves_nothing_behind() -> None:
    write_lines("corpus/a.jsonl", ["", " \t\n", "", "\u3000"])
    Path("corpus/b.txt").touch()
    refused(settings(), "gives no document (", "3 empty", "2 white space")
