"""Which documents are held back: their content alone decides."""

from __future__ import annotations

import hashlib
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny

from training_lab.data.dataset import prepare_dataset
from training_lab.data.split import content_hash, content_order, is_duplicate, split_documents, split_positions
from training_lab.data.synthetic import synthetic_document
from training_lab.errors import UserError

TEXTS = [synthetic_document(number).text for number in range(300)]
FRACTIONS = (0.01, 0.1, 0.3, 0.5, 0.9)


def as_array(hashes: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, 32)


def hashes_of(texts: Sequence[str]) -> np.ndarray:
    """The content hashes of some texts."""
    return as_array([content_hash(text) for text in texts])


def order_of(texts: Sequence[str]) -> np.ndarray:
    """The texts' numbers in the order of their content; of duplicates, by their bytes."""
    return content_order(hashes_of(texts), as_array([hashlib.sha256(text.encode()).digest() for text in texts]))


def numbers(texts: Sequence[str], fraction: float = 0.1, salt: str = "") -> tuple[list[int], list[int]]:
    """The numbers of the texts to train on and of those held back, each in their order."""
    train, validation = split_documents(hashes_of(texts), order_of(texts), salt, fraction)
    return train.tolist(), validation.tolist()


def split(texts: Sequence[str], fraction: float = 0.1, salt: str = "") -> tuple[list[str], list[str]]:
    """The texts to train on and the texts held back, each in its order."""
    train, validation = numbers(texts, fraction, salt)
    return [texts[number] for number in train], [texts[number] for number in validation]


def position(text: str, salt: str = "") -> float:
    return float(split_positions(hashes_of([text]), salt)[0])


def is_held_back(text: str, salt: str = "") -> bool:
    return split([text], 0.5, salt)[1] == [text]


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_every_document_falls_on_exactly_one_side(fraction: float) -> None:
    texts = [*TEXTS, *TEXTS[:50]]
    train, validation = numbers(texts, fraction)
    assert sorted(train + validation) == list(range(len(texts)))


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_adding_and_reordering_documents_moves_no_other_and_keeps_their_order(fraction: float) -> None:
    known, more = TEXTS[:200], TEXTS[200:]
    before = split(known, fraction)
    mixed = TEXTS.copy()
    random.Random(0).shuffle(mixed)
    for texts in (TEXTS, more + known, mixed):
        after = split(texts, fraction)
        for side in (0, 1):
            assert [text for text in after[side] if text in known] == before[side]


def test_the_order_is_that_of_the_content_hashes_read_as_bytes() -> None:
    hashes = hashes_of(TEXTS)
    in_order = [hashes[number].tobytes() for number in order_of(TEXTS)]
    assert in_order == sorted(map(content_hash, TEXTS))
    # Hashes that differ in a single byte, wherever it is, with bytes on both sides of 128.
    close = np.zeros((64, 32), dtype=np.uint8)
    close[np.arange(64), np.arange(64) % 32] = np.where(np.arange(64) < 32, 1, 255)
    found = content_order(close, close)
    assert [close[number].tobytes() for number in found] == sorted(row.tobytes() for row in close)


def test_duplicates_come_in_an_order_of_their_own_wherever_they_were() -> None:
    texts = [space.join(["one", "and", "the", "same"]) for space in (" ", "  ", "\n", "\t", " \n", "\r\n")]
    expected = [texts[number] for number in order_of(texts)]
    for seed in range(10):
        random.Random(seed).shuffle(texts)
        assert [texts[number] for number in order_of(texts)] == expected


def test_of_every_content_exactly_the_first_in_order_is_no_duplicate() -> None:
    texts = [*TEXTS, *(f"  {text}\n" for text in TEXTS[:50]), *TEXTS[40:60]]
    order = order_of(texts)
    repeats = is_duplicate(hashes_of(texts), order)
    assert repeats.sum() == 70
    stay = [content_hash(texts[number]) for number in order[~repeats]]
    assert len(set(stay)) == len(stay) == len(TEXTS)
    assert not is_duplicate(hashes_of(texts), order[~repeats]).any()


DUPLICATES = {
    "the same": "Ein schöner Tag.\n\nEnde",
    "spaces": "Ein  schöner \t Tag.\n\nEnde",
    "line ends": "Ein schöner\r\nTag.\r\n\r\nEnde\r\n",
    "margins": "\n  Ein schöner Tag.\nEnde  \n",
    "other spaces": "Ein\u00a0schöner\u3000Tag.\u2028Ende",
    "taken apart": unicodedata.normalize("NFD", "Ein schöner Tag.\n\nEnde"),
    "both": unicodedata.normalize("NFD", "  Ein schöner  Tag. Ende"),
}


@pytest.mark.parametrize("name", list(DUPLICATES))
def test_a_duplicate_up_to_white_space_and_unicode_form_falls_beside_its_original(name: str) -> None:
    original, duplicate = content_hash(DUPLICATES["the same"]), content_hash(DUPLICATES[name])
    assert duplicate == original
    assert is_duplicate(as_array([original, duplicate]), np.arange(2)).tolist() == [False, True]
    for salt in map(str, range(40)):
        assert position(DUPLICATES[name], salt) == position(DUPLICATES["the same"], salt)
        assert is_held_back(DUPLICATES[name], salt) == is_held_back(DUPLICATES["the same"], salt)


def test_hangul_taken_apart_falls_beside_hangul() -> None:
    for number in range(40):
        text = f"문서 번호 {number}"
        assert is_held_back(unicodedata.normalize("NFD", text)) == is_held_back(text)


@pytest.mark.parametrize("other", ["Ein schoner Tag. Ende", "ein schöner Tag. Ende", "Einschöner Tag. Ende", ""])
def test_another_text_is_no_duplicate(other: str) -> None:
    assert content_hash(other) != content_hash(DUPLICATES["the same"])
    assert not is_duplicate(hashes_of([other, DUPLICATES["the same"]]), np.arange(2)).any()


@pytest.mark.parametrize(("smaller", "larger"), [(0.01, 0.1), (0.1, 0.3), (0.3, 0.9)])
def test_a_smaller_validation_set_is_the_beginning_of_a_larger_one(smaller: float, larger: float) -> None:
    few, many = split(TEXTS, smaller)[1], split(TEXTS, larger)[1]
    assert 0 < len(few) < len(many)
    assert many[: len(few)] == few


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("salt", ["", "other"])
def test_about_the_wanted_fraction_is_held_back(fraction: float, salt: str) -> None:
    texts = [f"document {number}" for number in range(4000)]
    expected, spread = fraction * 4000, (4000 * fraction * (1 - fraction)) ** 0.5
    assert abs(len(split(texts, fraction, salt)[1]) - expected) < 4 * spread


def test_another_salt_holds_other_documents_back() -> None:
    one, other = set(split(TEXTS, 0.3)[1]), set(split(TEXTS, 0.3, "other")[1])
    assert one - other
    assert other - one


def test_the_position_of_a_content_never_changes() -> None:
    assert position("hello world") == 0.11015632910032608, (
        "another position moves documents between training and validation: every validation loss that was "
        "recorded before would no longer be comparable, and the split's rule needs another name"
    )


# --- in a dataset ---


@pytest.mark.parametrize(("fraction", "side"), [("1e-12", "validation"), ("0.999999999999", "training")])
def test_a_split_that_leaves_one_side_empty_is_refused(fraction: str, side: str) -> None:
    config = tiny("data.synthetic_documents=5", f"data.val_fraction={fraction}")
    with pytest.raises(UserError) as caught:
        prepare_dataset(config)
    message = str(caught.value)
    assert message.startswith(f"data: no document falls on the {side} side: there are 5 and data.val_fraction is ")
    assert len(message.splitlines()) == 1


def test_no_content_is_on_both_sides_of_a_dataset() -> None:
    data = prepare_dataset(tiny())
    train, validation = data.streams.train, data.streams.validation
    assert train.num_documents > validation.num_documents > 0
    assert not set(map(bytes, train.content)) & set(map(bytes, validation.content))
    assert data.manifest["split"]["train"]["documents"] == train.num_documents
    assert data.manifest["split"]["validation"]["tokens"] == validation.size
    assert data.manifest["duplicates"] == {"found": 0, "policy": "keep"}


@pytest.mark.parametrize(("policy", "kept"), [("keep", 9), ("drop", 6)])
def test_duplicates_are_counted_and_kept_or_dropped_and_never_on_both_sides(policy: str, kept: int) -> None:
    originals = [f"text number {number} " * 20 for number in range(6)]
    for number, text in enumerate([*originals, *(f"\n{text}" for text in originals[:3])]):
        Path(f"{number}.txt").write_text(text)
    for salt in "abcdef":
        data = prepare_dataset(
            tiny("data.source=files", 'data.paths=["*.txt"]', "data.val_fraction=0.5", f"data.split_salt={salt}",
                 f"data.duplicates={policy}", "batch.tokens=64")
        )  # fmt: skip
        train, validation = data.streams.train, data.streams.validation
        assert data.manifest["duplicates"] == {"found": 3, "policy": policy}
        assert train.num_documents + validation.num_documents == kept
        contents = [set(map(bytes, stream.content)) for stream in (train, validation)]
        assert not contents[0] & contents[1]
        assert contents[0] | contents[1] == set(map(content_hash, originals))
