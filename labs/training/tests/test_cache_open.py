"""A finished cache is what was written, to the last bit, or it is refused; and it is its documents' text."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny

from training_lab.config_data import DataConfig
from training_lab.data import build as building
from training_lab.data.build import BuildOptions, find_or_build
from training_lab.data.cache import DOCUMENT, TokenCache, open_cache, token_dtype
from training_lab.data.documents import Document
from training_lab.data.sources import find_source
from training_lab.data.split import content_hash
from training_lab.data.synthetic import synthetic_document
from training_lab.data.tokenizers import GPT2_END_OF_TEXT, decode
from training_lab.errors import UserError
from training_lab.identity import identity_of
from training_lab.progress import NoProgress

TOKENIZERS = ("byte", "char", "gpt2")
FILES = ("tokens.bin", "documents.bin", "manifest.json")
TEXTS = [
    *(synthetic_document(number).text[:300] for number in range(12)),
    "<|endoftext|>",
    "before<|endoftext|>after<|endoftext|>",
    "one",
    "x",
    " one \r\n",
    "안녕하세요, 세계!\n\n값을 하나만 바꾼다.\u2028",
    "\u1112\u1161\u11ab e\u0301",
    "👩‍👩‍👧‍👦 \U0010ffff \ufeff\ufffe",
    "a\0b\x7f",
]


def settings(*overrides: str) -> DataConfig:
    return tiny("data.source=files", 'data.paths=["corpus"]', *overrides).data


def build(config: DataConfig) -> TokenCache:
    return find_or_build(find_source(config, NoProgress()), config, NoProgress(), BuildOptions(2))


@pytest.fixture(autouse=True)
def corpus(in_empty_folder: None) -> None:
    Path("corpus").mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    Path("corpus/a.jsonl").write_text("".join(lines[:10]), encoding="utf-8")
    Path("corpus/b.jsonl").write_text("".join(lines[10:]), encoding="utf-8")


def refused(cache: TokenCache, name: str, why: str) -> None:
    """The cache cannot be opened, and one line says which file it is and what to do."""
    with pytest.raises(UserError) as caught:
        open_cache(cache.path)
    message = str(caught.value)
    assert message.startswith(f"{cache.path / name}: {why}")
    assert message.endswith("delete the folder to make it again")
    assert len(message.splitlines()) == 1


# --- damage ---


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_refused() -> None:
    Path("corpus/a.jsonl").write_text('{"text": "가나다 \\u0000 é"}\n{"text": ""}\n', encoding="utf-8")
    cache = build(settings("data.tokenizer=char", 'data.paths=["corpus/a.jsonl"]'))
    path = cache.path / "manifest.json"
    good = path.read_bytes()
    for place in range(len(good)):
        for bit in (0, 5):
            damaged = bytearray(good)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            refused(cache, "manifest.json", "damaged")
    path.write_bytes(good)
    open_cache(cache.path)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_a_flipped_bit_anywhere_in_the_data_is_refused(name: str) -> None:
    cache = build(settings())
    path = cache.path / name
    good = path.read_bytes()
    draws = random.Random(0)
    for place in [0, len(good) - 1, *(draws.randrange(len(good)) for _ in range(200))]:
        damaged = bytearray(good)
        damaged[place] ^= 1 << draws.randrange(8)
        path.write_bytes(damaged)
        refused(cache, name, "damaged")
    path.write_bytes(good)
    open_cache(cache.path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("bytes_more", [-1, -10, 1, 2])
def test_a_file_that_is_shorter_or_longer_is_refused(name: str, bytes_more: int) -> None:
    cache = build(settings())
    os.truncate(cache.path / name, (cache.path / name).stat().st_size + bytes_more)
    refused(cache, name, "damaged")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_empty_or_missing_is_refused(name: str) -> None:
    cache = build(settings())
    os.truncate(cache.path / name, 0)
    refused(cache, name, "damaged")
    (cache.path / name).unlink()
    refused(cache, name, "missing")


@pytest.mark.parametrize("content", ["", "null", "[]", "7", '"text"', "{}", '{"sha256": 1}', "[" * 100_000, "{", "NaN"])
def test_a_manifest_that_is_something_else_is_refused(content: str) -> None:
    cache = build(settings())
    (cache.path / "manifest.json").write_text(content, encoding="utf-8")
    refused(cache, "manifest.json", "damaged")


def test_a_damaged_cache_is_refused_by_who_looks_for_it_and_made_again_once_it_is_deleted() -> None:
    cache = build(settings())
    good = {name: (cache.path / name).read_bytes() for name in FILES}
    os.truncate(cache.path / "tokens.bin", 5)
    with pytest.raises(UserError, match=r"tokens\.bin: damaged.*delete the folder"):
        build(settings())
    for path in cache.path.iterdir():
        path.unlink()
    cache.path.rmdir()
    assert build(settings()).path == cache.path
    assert {name: (cache.path / name).read_bytes() for name in FILES} == good


# --- what is in it ---


def test_nothing_is_loaded_into_memory() -> None:
    cache = build(settings())
    for array in (cache.tokens, cache.documents):
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(1, "<u2"), (256, "<u2"), (65535, "<u2"), (65536, "<u2"), (65537, "<u4")]
)
def test_ids_take_two_bytes_as_long_as_all_of_them_fit(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(name)
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


@pytest.mark.parametrize(("vocab_size", "name"), [(65535, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_text_of_so_many_characters_survives_its_cache(vocab_size: int, name: str) -> None:
    codes = [code for code in range(0x20, 0x20000) if not 0xD800 <= code < 0xE000][:vocab_size]
    text = "".join(map(chr, reversed(codes)))
    Path("corpus/many.txt").write_bytes(text.encode("utf-8"))
    cache = build(settings("data.tokenizer=char", 'data.paths=["corpus/many.txt"]'))
    assert cache.tokenizer.vocab_size == vocab_size
    assert cache.tokens.dtype == np.dtype(name)
    assert sorted(cache.tokens.tolist()) == list(range(vocab_size))
    assert decode(cache.tokenizer, cache.tokens.tolist()) == text


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_tokens_of_each_document_are_its_text_and_nothing_lies_between_them(tokenizer: str) -> None:
    cache = build(settings(f"data.tokenizer={tokenizer}"))
    assert cache.starts.tolist() == np.cumsum([0, *cache.documents["tokens"].tolist()])[:-1].tolist()
    assert int(cache.documents["tokens"].sum()) == len(cache.tokens) == cache.manifest["tokens"]
    found = [
        decode(cache.tokenizer, cache.tokens[start : start + length].tolist())
        for start, length in zip(cache.starts.tolist(), cache.documents["tokens"].tolist(), strict=True)
    ]
    assert found == TEXTS
    assert cache.manifest["documents"] == len(TEXTS)
    assert cache.manifest["text_bytes"] == sum(len(text.encode("utf-8")) for text in TEXTS)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_row_of_each_document_has_its_hashes_and_its_place(tokenizer: str) -> None:
    config = settings(f"data.tokenizer={tokenizer}")
    cache = build(config)
    assert cache.documents.dtype == DOCUMENT
    assert DOCUMENT.itemsize == 8 + 32 + 32 + 4 + 4
    source = find_source(config, NoProgress())
    for number, ((file, document), row) in enumerate(zip(source.documents(), cache.documents, strict=True)):
        assert isinstance(document, Document)
        assert document.text == TEXTS[number]
        assert row["content"].tobytes() == content_hash(document.text)
        tokens = cache.tokens[cache.starts[number] :][: int(row["tokens"])]
        assert row["sha256"].tobytes() == hashlib.sha256(tokens.astype("<u4").tobytes()).digest()
        assert (int(row["file"]), int(row["number"])) == (file, document.number)


def test_an_end_of_text_that_is_written_in_a_text_is_text() -> None:
    cache = build(settings("data.tokenizer=gpt2"))
    assert GPT2_END_OF_TEXT not in cache.tokens
    assert cache.tokens[cache.starts[12] : cache.starts[13]].tolist() == [27, 91, 437, 1659, 5239, 91, 29]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("character", ["a", " ", "가"])
def test_a_million_times_one_character_is_no_trouble(character: str) -> None:
    text = "x" + character * 1_000_000
    Path("corpus/long.txt").write_text(text, encoding="utf-8")
    cache = build(settings("data.tokenizer=gpt2", 'data.paths=["corpus/long.txt"]'))
    assert decode(cache.tokenizer, cache.tokens.tolist()) == text


# --- what a cache is known by ---

OTHERS: dict[str, tuple[str, ...]] = {
    "reading": ("data.documents=paragraph",),
    "text field": ("data.text_field=body",),
    "invalid text": ("data.invalid_text=skip",),
    "documents": ("data.max_documents=7",),
    "tokens": ("data.max_tokens=5000",),
    "characters": ("data.tokenizer=char",),
    "gpt2": ("data.tokenizer=gpt2",),
}
SAME: dict[str, tuple[str, ...]] = {
    "fraction": ("data.val_fraction=0.5",),
    "salt": ("data.split_salt=other",),
    "duplicates": ("data.duplicates=drop",),
    "order": ("data.order_seed=99",),
    "batch": ("batch.tokens=100", "model.max_positions=32"),
    "layout": ("batch.layout=packs",),
}


def folder_name(config: DataConfig) -> str:
    return identity_of(building.cache_identity(find_source(config, NoProgress()), config))[:16]


def test_whatever_decides_the_bytes_of_a_cache_decides_its_folder() -> None:
    names = {folder_name(settings(*overrides)) for overrides in OTHERS.values()}
    names.add(folder_name(settings()))
    content = Path("corpus/b.jsonl").read_text(encoding="utf-8")
    Path("corpus/b.jsonl").write_text(content.replace("a", "b", 1), encoding="utf-8")
    names.add(folder_name(settings()))
    Path("corpus/b.jsonl").rename("corpus/c.jsonl")
    names.add(folder_name(settings()))
    assert len(names) == len(OTHERS) + 3
    assert build(settings()).path.name in names


@pytest.mark.parametrize("name", list(SAME))
def test_what_does_not_decide_the_bytes_of_a_cache_finds_it_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    first = build(settings())
    elsewhere = build(settings("data.cache_dir=elsewhere", *SAME[name]))
    assert elsewhere.path.name == first.path.name
    assert all((elsewhere.path / name).read_bytes() == (first.path / name).read_bytes() for name in FILES)
    monkeypatch.delattr(building, "build")
    assert build(settings(*SAME[name])).path == first.path


def test_the_cache_of_another_tokenizer_is_never_used() -> None:
    of_bytes, of_gpt2 = build(settings()), build(settings("data.tokenizer=gpt2"))
    assert of_bytes.path != of_gpt2.path
    shutil.rmtree(of_gpt2.path)
    shutil.copytree(of_bytes.path, of_gpt2.path)
    with pytest.raises(UserError, match=of_gpt2.path.name):
        build(settings("data.tokenizer=gpt2"))
