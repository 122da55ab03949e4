"""Which documents are learned from and which are held back: a pure function of each document's content.

Because the content decides, a duplicate falls on the side of its original, and adding, removing or reordering files
moves no other document.

Arrays: N documents; a content hash is 32 bytes, so hashes have the shape [N, 32].
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator

import numpy as np

SPLIT_RULE = "content-hash-v1"
PIECE_CHARACTERS = 1 << 20


def content_hash(text: str) -> bytes:
    """SHA-256 of the NFC text with white space collapsed: the same for texts that differ in nothing else."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    digest = hashlib.sha256()
    for begin, words in enumerate(words_in_pieces(text)):
        digest.update((f" {words}" if begin else words).encode("utf-8"))
    return digest.digest()


def words_in_pieces(text: str) -> Iterator[str]:
    """The words of a text with single spaces between them, in pieces: all words of a very long one are too many."""
    begin = 0
    while begin < len(text):
        end = begin + PIECE_CHARACTERS
        while end < len(text) and not text[end].isspace():
            end += 1
        words = " ".join(text[begin:end].split())
        if words:
            yield words
        begin = end


def split_positions(hashes: np.ndarray, salt: str) -> np.ndarray:
    """Where in [0, 1) each document's content lies; below the validation fraction it is held back. float64 [N]."""
    prefix = b"training-lab-split-v1\0" + salt.encode("utf-8") + b"\0"
    content = hashes.tobytes()
    digests = (hashlib.sha256(prefix + content[i : i + 32]).digest()[:8] for i in range(0, len(content), 32))
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.float64) / 2**64


def content_order(hashes: np.ndarray, tie_breakers: np.ndarray) -> np.ndarray:
    """The numbers of the documents in the order of their content hashes; of duplicates, by their own other hashes
    [N, 32]. int64 [N]."""
    columns = [array.view(">u8").astype(np.uint64) for array in map(np.ascontiguousarray, (hashes, tie_breakers))]
    return np.lexsort([column[:, i] for column in reversed(columns) for i in reversed(range(4))])


def is_duplicate(hashes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Which documents of an order by content have the hash of the one before them. bool, as long as `order`."""
    ordered = hashes[order]
    repeats = np.zeros(len(order), dtype=bool)
    repeats[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return repeats


def split_documents(
    hashes: np.ndarray, order: np.ndarray, salt: str, val_fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """The documents of `order`, one by content, as those to train on and those held back.

    Validation documents come in the order of their split position, so that a smaller validation fraction or size is
    the beginning of a larger one.
    """
    positions = split_positions(hashes, salt)[order]
    held_back = np.flatnonzero(positions < val_fraction)
    held_back = held_back[np.argsort(positions[held_back], kind="stable")]
    return order[positions >= val_fraction], order[held_back]
