"""Which documents are learned from and which are held back: a pure function of each document's content.

Because the content decides, a duplicate falls on the side of its original, and adding, removing or reordering files
moves no other document.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple


class ContentHash(NamedTuple):
    """The names of a document's content: the same text up to white space and Unicode form, then the exact text."""

    normalised: bytes
    exact: bytes


def content_hash(text: str) -> ContentHash:
    """SHA-256 of the NFC text with white space collapsed, and of the text as it is."""
    normalised = re.sub(r"\s+", " ", unicodedata.normalize("NFC", text)).strip()
    return ContentHash(sha256(normalised), sha256(text))


def sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


def split_position(hashed: ContentHash, salt: str) -> float:
    """Where in [0, 1) a document's content lies; below the validation fraction it is held back."""
    digest = hashlib.sha256(b"training-lab-split-v1\0" + salt.encode("utf-8") + b"\0" + hashed.normalised).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_documents(hashes: Sequence[ContentHash], salt: str, val_fraction: float) -> tuple[list[int], list[int]]:
    """The numbers of the training and of the validation documents, each in an order that only content decides.

    Validation documents come in the order of their split position, so that a smaller validation fraction or size is
    the beginning of a larger one.
    """
    positions = [split_position(hashed, salt) for hashed in hashes]
    train = [number for number, position in enumerate(positions) if position >= val_fraction]
    validation = [number for number, position in enumerate(positions) if position < val_fraction]
    train.sort(key=lambda number: hashes[number])
    validation.sort(key=lambda number: (positions[number], hashes[number]))
    return train, validation
