"""The documents of one side of the split, joined in an order that their content decides: a view of the token cache.

A place in a stream is a number from 0 to `size`; which token stands there is looked up in the cache. So a stream costs
no copy, and the token <|endoftext|>, which no text can contain, is put between documents here and not in the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from training_lab.config_data import DataConfig
from training_lab.data.cache import TokenCache
from training_lab.data.sources import Source
from training_lab.data.split import content_order, is_duplicate, split_documents
from training_lab.data.tokenizers import GPT2_END_OF_TEXT
from training_lab.errors import UserError
from training_lab.identity import identity_of


class EndOfText(NamedTuple):
    """Where each document of a stream has a token of its own that is no text."""

    place: Literal["none", "start", "end"] = "none"
    token: int = GPT2_END_OF_TEXT

    @property
    def size(self) -> int:
        """Tokens that it adds to a document."""
        return 0 if self.place == "none" else 1


NO_END_OF_TEXT = EndOfText()


@dataclass(frozen=True)
class TokenStream:
    """The documents of one side of the split. Arrays are as long as there are documents."""

    tokens: np.ndarray
    """Token ids that documents are taken from, shape [tokens]."""
    starts: np.ndarray
    """Where each document begins in `tokens`; int64."""
    lengths: np.ndarray
    """How many tokens of `tokens` each document has; int64."""
    content: np.ndarray
    """Hash of each document's text, up to white space; uint8 [documents, 32]."""
    sha256: np.ndarray
    """Hash of each document's token ids; uint8 [documents, 32]."""
    name_of: Callable[[int], str]
    """What a person calls document number i of the stream."""
    end_of_text: EndOfText = NO_END_OF_TEXT

    @property
    def num_documents(self) -> int:
        return len(self.starts)

    @cached_property
    def offsets(self) -> np.ndarray:
        """The place at which each document begins, and `size`; int64 [documents + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths + self.end_of_text.size)]).astype(np.int64)

    @property
    def size(self) -> int:
        """Tokens of the stream."""
        return int(self.offsets[-1])

    @cached_property
    def order_keys(self) -> np.ndarray:
        """The first 8 bytes of each document's content hash; uint64."""
        return np.ascontiguousarray(self.content[:, :8]).view(">u8").ravel().astype(np.uint64)

    @cached_property
    def identity(self) -> str:
        """The hash of the tokens and of where documents begin, through the hash of each document."""
        parts = (self.sha256.tobytes(), self.lengths.astype("<i8").tobytes())
        return identity_of([self.end_of_text, *(hashlib.sha256(part).hexdigest() for part in parts)])

    def take(self, places: np.ndarray) -> np.ndarray:
        """The token ids at some places, int64, of the shape of `places`."""
        document = np.searchsorted(self.offsets, places, "right") - 1
        inside = places - self.offsets[document]
        if self.end_of_text.place == "none":
            found: np.ndarray = self.tokens[self.starts[document] + inside].astype(np.int64)
            return found
        if self.end_of_text.place == "start":
            is_text, inside = inside > 0, inside - 1
        else:
            is_text = inside < self.lengths[document]
        taken = np.full(np.shape(places), self.end_of_text.token, dtype=np.int64)
        taken[is_text] = self.tokens[(self.starts[document] + inside)[is_text]]
        return taken

    def documents_between(self, start: int, end: int) -> list[str]:
        """The names of the documents that the places from `start` up to `end` belong to."""
        first = int(np.searchsorted(self.offsets, start, "right")) - 1
        last = int(np.searchsorted(self.offsets, end, "left"))
        return [self.name_of(number) for number in range(first, last)]

    def describe(self) -> dict[str, Any]:
        """The stream in a manifest."""
        return {"documents": self.num_documents, "tokens": self.size, "sha256": self.identity}


class Streams(NamedTuple):
    """Both sides of the split, and what was found on the way."""

    train: TokenStream
    validation: TokenStream
    duplicates: int
    """Documents that are the same, up to white space, as one that stays."""
    too_short: int
    """Documents left out because one token alone has nothing to predict."""


def split_cache(cache: TokenCache, source: Source, config: DataConfig) -> Streams:
    """The two streams of a cache. Raises UserError if one side of the split is empty."""
    end_of_text = EndOfText(config.end_of_text)
    content = np.ascontiguousarray(cache.documents["content"])
    hashes = np.ascontiguousarray(cache.documents["sha256"])
    order = content_order(content, hashes)
    repeats = is_duplicate(content, order)
    num_duplicates = int(repeats.sum())
    if config.duplicates == "drop":
        order = order[~repeats]
    is_short = cache.documents["tokens"][order] + end_of_text.size < 2
    order = order[~is_short]
    sides = split_documents(content, order, config.split_salt, config.val_fraction)
    for side, numbers in zip(("training", "validation"), sides, strict=True):
        if not len(numbers):
            raise UserError(
                f"data: no document falls on the {side} side: there are {len(order)} and data.val_fraction is "
                f"{config.val_fraction}; give more documents, set data.documents=paragraph, or change the fraction"
            )

    def stream_of(numbers: np.ndarray) -> TokenStream:
        rows = cache.documents[numbers]

        def name_of(number: int) -> str:
            return source.document_name(int(rows["file"][number]), int(rows["number"][number]))

        lengths = rows["tokens"].astype(np.int64)
        return TokenStream(
            cache.tokens, cache.starts[numbers], lengths, content[numbers], hashes[numbers], name_of, end_of_text
        )

    train, validation = map(stream_of, sides)
    return Streams(train, validation, num_duplicates, int(is_short.sum()))
