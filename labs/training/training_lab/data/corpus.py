"""The tokenised text of a run: a stream to train on, and a fixed set to measure on, each with an identity.

This first form builds both in memory at each start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from training_lab.config import Config
from training_lab.data.documents import Document, read_documents
from training_lab.data.split import ContentHash, content_hash, split_documents
from training_lab.data.tokenizers import Tokenizer, make_tokenizer
from training_lab.errors import UserError
from training_lab.identity import identity_of, sha256_of_bytes


@dataclass(frozen=True)
class TokenStream:
    """The documents of one split, joined."""

    tokens: np.ndarray
    """Token ids, uint16 or uint32 by the size of the vocabulary, shape [tokens]."""
    offsets: np.ndarray
    """Where each document begins, and the end of the last; int64, shape [documents + 1]."""
    hashes: np.ndarray
    """First 8 bytes of each document's content hash; uint64, shape [documents]."""
    names: list[str]

    @property
    def num_documents(self) -> int:
        return len(self.names)

    @cached_property
    def identity(self) -> str:
        """The hash of the tokens and of where documents begin."""
        parts = [self.tokens.astype("<u4"), self.offsets.astype("<i8")]
        return identity_of([sha256_of_bytes(part.tobytes()) for part in parts])

    def documents_between(self, start: int, end: int) -> list[str]:
        """The names of the documents that tokens `start` to `end` belong to."""
        first = int(np.searchsorted(self.offsets, start, "right")) - 1
        last = int(np.searchsorted(self.offsets, end, "left"))
        return self.names[first:last]


@dataclass(frozen=True)
class Corpus:
    """What the source, the tokenizer and the split make of the configured text."""

    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream
    manifest: dict[str, Any]


def build_corpus(config: Config) -> Corpus:
    """Reads, splits and tokenises. Raises UserError if one side of the split is empty."""
    collection = read_documents(config.data)
    documents = collection.documents
    hashes = [content_hash(document.text) for document in documents]
    train_numbers, val_numbers = split_documents(hashes, config.data.split_salt, config.data.val_fraction)
    for side, numbers in (("training", train_numbers), ("validation", val_numbers)):
        if not numbers:
            raise UserError(
                f"data: no document falls on the {side} side: there are {len(documents)} and data.val_fraction is "
                f"{config.data.val_fraction}; give more documents, set data.documents=paragraph, or change the fraction"
            )
    tokenizer = make_tokenizer(config.data.tokenizer, (document.text for document in documents))
    train = make_stream(documents, hashes, train_numbers, tokenizer)
    validation = make_stream(documents, hashes, val_numbers, tokenizer)
    split = {"rule": "content-hash-v1", "salt": config.data.split_salt, "val_fraction": config.data.val_fraction}
    manifest = {
        "source": collection.manifest,
        "tokenizer": tokenizer.manifest(),
        "split": {**split, "train": describe(train), "validation": describe(validation)},
        "duplicates": len(hashes) - len({hashed.normalised for hashed in hashes}),
    }
    return Corpus(tokenizer, train, validation, manifest)


def make_stream(
    documents: Sequence[Document], hashes: Sequence[ContentHash], numbers: Sequence[int], tokenizer: Tokenizer
) -> TokenStream:
    """The chosen documents, tokenised and joined."""
    encoded = tokenizer.encode([documents[number].text for number in numbers])
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    tokens = np.concatenate(encoded).astype(dtype)
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in encoded])]).astype(np.int64)
    short = [int.from_bytes(hashes[number].normalised[:8], "big") for number in numbers]
    return TokenStream(tokens, offsets, np.array(short, dtype=np.uint64), [documents[n].name for n in numbers])


def describe(stream: TokenStream) -> dict[str, Any]:
    """A stream in the manifest."""
    return {"documents": stream.num_documents, "tokens": len(stream.tokens), "sha256": stream.identity}
