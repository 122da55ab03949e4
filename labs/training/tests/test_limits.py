"""A part of a source: its first documents, whoever reads them; and what is left out is counted, with examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny

from training_lab.config_data import DataConfig
from training_lab.data import build as building
from training_lab.data.build import MOST_EXAMPLES, BuildOptions, find_or_build
from training_lab.data.cache import TokenCache
from training_lab.data.dataset import prepare_dataset
from training_lab.data.sources import find_source
from training_lab.data.synthetic import synthetic_document
from training_lab.data.tokenizers import decode
from training_lab.errors import UserError
from training_lab.progress import NoProgress

FILES = ("tokens.bin", "documents.bin", "manifest.json")
TEXTS = [synthetic_document(number).text[: 20 + 7 * (number % 11)] for number in range(30)]
SIZES = [len(text) for text in TEXTS]
"""Bytes, and so tokens, of each."""


def write_corpus(texts: list[str], more: str = "") -> None:
    Path("corpus").mkdir(exist_ok=True)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    Path("corpus/a.jsonl").write_text("".join(lines[:9]), encoding="utf-8")
    Path("corpus/b.jsonl").write_text("".join(lines[9:]) + more, encoding="utf-8")


@pytest.fixture(autouse=True)
def corpus(in_empty_folder: None) -> None:
    write_corpus(TEXTS)


def settings(*overrides: str) -> DataConfig:
    return tiny("data.source=files", 'data.paths=["corpus"]', *overrides).data


def set_block(patch: pytest.MonkeyPatch, documents: int) -> None:
    patch.setattr(building, "BLOCK_DOCUMENTS", documents)
    patch.setattr(building, "BLOCK_RULE", [documents, building.BLOCK_CHARACTERS])


def build(config: DataConfig, workers: int = 1) -> TokenCache:
    return find_or_build(find_source(config, NoProgress()), config, NoProgress(), BuildOptions(workers))


def content(cache: TokenCache) -> dict[str, bytes]:
    return {name: (cache.path / name).read_bytes() for name in FILES}


def texts_of(cache: TokenCache) -> list[str]:
    lengths = cache.documents["tokens"].tolist()
    places = zip(cache.starts.tolist(), lengths, strict=True)
    return [decode(cache.tokenizer, cache.tokens[start : start + length].tolist()) for start, length in places]


def every_way(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[dict[str, bytes]]:
    """The cache of a config, built with blocks of several sizes and by several workers."""
    found = []
    for documents in (1, 2, 5, 1024):
        for workers in (1, 2, 8):
            set_block(monkeypatch, documents)
            config = settings(f"data.cache_dir=cache-{documents}-{workers}", *overrides)
            found.append(content(build(config, workers)))
    return found


# --- limits ---


@pytest.mark.parametrize("limit", [1, 2, 8, 9, 10, 29, 30, 31, 1000])
def test_so_many_documents_are_the_first_ones(limit: int) -> None:
    cache = build(settings(f"data.max_documents={limit}"))
    assert texts_of(cache) == TEXTS[:limit]
    assert cache.manifest["documents"] == min(limit, 30)


@pytest.mark.parametrize("documents", [1, 2, 8, 9, 10, 29, 30])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_so_many_tokens_are_those_of_the_first_documents_that_fit(documents: int, more: int) -> None:
    limit = sum(SIZES[:documents]) + more
    if documents == 1 and more == -1:
        return  # nothing fits: see below
    cache = build(settings(f"data.max_tokens={limit}"))
    assert texts_of(cache) == TEXTS[: documents - (more < 0)]
    assert len(cache.tokens) == cache.manifest["tokens"] <= limit


def test_a_document_that_does_not_fit_ends_the_text_even_if_a_later_one_would_fit() -> None:
    write_corpus(["aaaa", "b" * 100, "c"])
    assert texts_of(build(settings("data.max_tokens=50"))) == ["aaaa"]


def test_both_limits_hold_together() -> None:
    tokens = sum(SIZES[:12])
    assert texts_of(build(settings("data.max_documents=9", f"data.max_tokens={tokens}"))) == TEXTS[:9]
    assert texts_of(build(settings("data.max_documents=20", f"data.max_tokens={tokens}"))) == TEXTS[:12]


def test_no_limit_is_all() -> None:
    assert texts_of(build(settings("data.max_documents=0", "data.max_tokens=0"))) == TEXTS


@pytest.mark.parametrize("limit", ["max_documents=13", "max_tokens=700"])
@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_a_limit_gives_the_same_whatever_the_blocks_and_the_workers(
    monkeypatch: pytest.MonkeyPatch, limit: str, tokenizer: str
) -> None:
    found = every_way(monkeypatch, f"data.{limit}", f"data.tokenizer={tokenizer}")
    assert all(one == found[0] for one in found)


def test_what_is_left_out_after_the_limit_is_not_counted_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(["aaaa", "", "bbbb", " ", "", "cccc", "", "dddd", " "])
    found = every_way(monkeypatch, "data.max_tokens=9")
    assert json.loads(found[0]["manifest.json"])["documents"] == 2
    assert sum(json.loads(found[0]["manifest.json"])["rejected"]["counts"].values()) <= 3
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_whether_a_bad_line_after_the_limit_is_met_does_not_depend_on_the_workers(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    set_block(monkeypatch, 1)
    write_corpus(TEXTS, "no JSON\n")
    cache = build(settings(f"data.max_tokens={sum(SIZES[:25])}"), workers)
    assert texts_of(cache) == TEXTS[:25]


def test_a_bad_line_after_so_many_documents_is_not_met() -> None:
    write_corpus(TEXTS, "no JSON\n")
    assert texts_of(build(settings("data.max_documents=30"))) == TEXTS


def test_a_limit_that_lets_no_document_in_is_refused_by_its_name() -> None:
    with pytest.raises(UserError, match="max_tokens"):
        build(settings("data.max_tokens=5"))
    assert not list(Path(".cache/tokens").glob("[!.]*"))
    assert not list(Path(".cache/tokens").glob(".building*"))


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
@pytest.mark.parametrize("limit", ["max_documents=13", "max_tokens=700"])
def test_a_build_with_a_limit_broken_off_at_any_block_goes_on_to_the_same(
    monkeypatch: pytest.MonkeyPatch, limit: str, tokenizer: str
) -> None:
    set_block(monkeypatch, 3)
    overrides = (f"data.{limit}", f"data.tokenizer={tokenizer}")
    expected = content(build(settings("data.cache_dir=undisturbed", *overrides)))
    broken = 0
    for number in range(1, 8):
        config = settings(f"data.cache_dir=cache-{number}", *overrides)
        broken += break_off(monkeypatch, config, number)
        assert content(build(config, 2)) == expected
    assert broken >= 4


def break_off(monkeypatch: pytest.MonkeyPatch, config: DataConfig, shows: int) -> bool:
    """Builds until a number of blocks are written, and says whether the build was then broken off."""
    left = [shows]

    def show(progress: NoProgress, what: str, done: float, total: float | None, figures: str) -> None:
        left[0] -= what == "Tokenising"
        if left[0] == 0 and what == "Tokenising":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NoProgress, "show", show)
        try:
            build(config)
        except KeyboardInterrupt:
            return True
    return False


# --- what is left out ---


def write_rejected() -> None:
    """20 documents; between them 13 empty, 2 of white space, and one that is not UTF-8."""
    texts = TEXTS[:20]
    for number in range(13):
        texts.insert(2 * number, "")
    texts.insert(5, " \n\t")
    texts.insert(30, "\u3000")
    write_corpus(texts)
    with open("corpus/b.jsonl", "ab") as file:
        file.write(b'{"text": "caf\xe9"}\n')
    Path("corpus/c.txt").touch()


def rejected(cache: TokenCache) -> dict[str, Any]:
    found: dict[str, Any] = cache.manifest["rejected"]
    return found


def test_what_is_left_out_is_counted_by_reason_with_the_first_examples() -> None:
    write_rejected()
    cache = build(settings("data.invalid_text=skip"))
    assert texts_of(cache) == TEXTS[:20]
    assert rejected(cache)["counts"] == {"empty": 14, "white space": 2, "not UTF-8": 1}
    examples = rejected(cache)["examples"]
    assert len(examples) == MOST_EXAMPLES == 10
    assert examples[0] == ["corpus/a.jsonl#1", "empty"]
    assert ["corpus/a.jsonl#6", "white space"] in examples


def test_an_empty_file_is_left_out_and_named() -> None:
    Path("corpus/c.txt").touch()
    Path("corpus/d.txt").write_text(" \n", encoding="utf-8")
    assert rejected(build(settings())) == {
        "counts": {"empty": 1, "white space": 1},
        "examples": [["corpus/c.txt", "empty"], ["corpus/d.txt", "white space"]],
    }


def test_a_limit_counts_no_document_that_is_left_out() -> None:
    write_rejected()
    cache = build(settings("data.invalid_text=skip", "data.max_documents=5"))
    assert texts_of(cache) == TEXTS[:5]
    assert sum(rejected(cache)["counts"].values()) < 17


def test_the_tally_of_what_is_left_out_survives_any_break(monkeypatch: pytest.MonkeyPatch) -> None:
    write_rejected()
    set_block(monkeypatch, 3)
    overrides = ("data.invalid_text=skip",)
    expected = content(build(settings("data.cache_dir=undisturbed", *overrides)))
    for number in range(1, 9):
        config = settings(f"data.cache_dir=cache-{number}", *overrides)
        assert break_off(monkeypatch, config, number) == (number <= 7)
        assert content(build(config, 2)) == expected


def test_documents_too_short_to_predict_anything_are_counted_and_used_with_an_end_of_text() -> None:
    write_corpus([*TEXTS, "x", "y"])
    paths = ("data.source=files", 'data.paths=["corpus"]')
    without = prepare_dataset(tiny(*paths))
    assert without.streams.too_short == 2
    assert without.train.num_documents + without.validation.stream.num_documents == 30
    with_it = prepare_dataset(tiny(*paths, "data.tokenizer=gpt2", "data.end_of_text=start", "batch.tokens=64"))
    assert with_it.streams.too_short == 0
    assert with_it.train.num_documents + with_it.validation.stream.num_documents == 32


# --- token counts that a file states ---


def test_a_stated_token_count_that_is_wrong_is_reported_also_after_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    right = build(settings("data.tokenizer=gpt2")).documents["tokens"].tolist()
    stated = [*right[:3], right[3] + 1, None, *right[5:29], 0]
    pq.write_table(pa.table({"text": TEXTS, "token_count": stated}), "counts.parquet")
    overrides = ('data.paths=["counts.parquet"]', "data.tokenizer=gpt2")
    cache = build(settings(*overrides))
    assert cache.manifest["token_count_column"] == {
        "checked": 29,
        "mismatches": 2,
        "examples": [
            {"document": "counts.parquet#3", "says": right[3] + 1, "has": right[3]},
            {"document": "counts.parquet#29", "says": 0, "has": right[29]},
        ],
    }
    set_block(monkeypatch, 4)
    config = settings("data.cache_dir=broken", *overrides)
    assert break_off(monkeypatch, config, 3)
    assert content(build(config)) == content(cache)
    by_bytes = build(settings(overrides[0], "data.tokenizer=byte"))
    assert by_bytes.manifest["token_count_column"]["checked"] == 0
