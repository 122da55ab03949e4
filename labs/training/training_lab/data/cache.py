"""The token cache: every document of a source as token ids, named by a hash of all that it was made from.

A folder `<cache_dir>/tokens/<first 16 digits of the identity>/` with three files:

- `tokens.bin`: the ids of all documents, one after the other, uint16 or uint32, little-endian, nothing between them;
- `documents.bin`: a row of `DOCUMENT` for each;
- `manifest.json`: what it was made from, what was left out, and the SHA-256 of the other two and of itself.

The folder appears whole or not at all (see `build.py`), and is hashed each time it is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from experiment_runner.durable import sha256_of_file
from training_lab.data.tokenizers import Tokenizer, tokenizer_from_manifest
from training_lab.errors import UserError
from training_lab.sealed import read_sealed

SCHEMA = "token-cache-v1"
TOKENS = "tokens.bin"
DOCUMENTS = "documents.bin"
CACHE_MANIFEST = "manifest.json"

DOCUMENT = np.dtype(
    [
        ("tokens", "<u8"),  # how many
        ("content", "u1", 32),  # hash of the text, the same up to white space: see split.content_hash
        ("sha256", "u1", 32),  # of the token ids as uint32, little-endian
        ("file", "<u4"),  # number of its file in the source
        ("number", "<u4"),  # its place in the file
    ]
)


@dataclass(frozen=True)
class TokenCache:
    """An opened, verified cache. The arrays are mapped from the disk, not in memory."""

    path: Path
    manifest: dict[str, Any]
    tokens: np.ndarray
    """Token ids of all documents, shape [tokens]."""
    documents: np.ndarray
    """A row of DOCUMENT for each, in the order of the source."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_manifest(self.manifest["tokenizer"])

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each document begins in `tokens`, int64."""
        ends = np.cumsum(self.documents["tokens"].astype(np.int64))
        return np.concatenate([[0], ends[:-1]])


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type of a cache that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def verify_files(path: Path, manifest: dict[str, Any]) -> None:
    """Raises UserError, naming the file, unless each has its size and hash."""
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise UserError(f"{file}: missing; delete the folder to make it again")
        if file.stat().st_size != entry["bytes"] or sha256_of_file(file) != entry["sha256"]:
            raise UserError(f"{file}: damaged: not as it was written; delete the folder to make it again")


def open_cache(path: Path) -> TokenCache:
    """A cache, every byte of it verified. Raises UserError, naming the file, if one is damaged."""
    try:
        manifest = read_sealed(path / CACHE_MANIFEST)
    except UserError as error:
        raise UserError(f"{error}; delete the folder to make it again") from error
    verify_files(path, manifest)
    tokens = np.memmap(path / TOKENS, dtype=manifest["dtype"], mode="r")
    documents = np.memmap(path / DOCUMENTS, dtype=DOCUMENT, mode="r")
    return TokenCache(path, manifest, tokens, documents)
