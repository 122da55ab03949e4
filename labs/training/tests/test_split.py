"""Which documents are held back: their content alone decides."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence

import pytest
from tiny import tiny

from training_lab.data.corpus import build_corpus
from training_lab.data.documents import synthetic_document
from training_lab.data.split import content_hash, split_documents, split_position
from training_lab.errors import UserError

TEXTS = [synthetic_document(number).text for number in range(300)]
FRACTIONS = (0.01, 0.1, 0.3, 0.5, 0.9)


def split(texts: Sequence[str], fraction: float = 0.1, salt: str = "") -> tuple[list[str], list[str]]:
    """The texts to train on and the texts held back, each in its order."""
    train, validation = split_documents([content_hash(text) for text in texts], salt, fraction)
    return [texts[number] for number in train], [texts[number] for number in validation]


def is_held_back(text: str, salt: str = "") -> bool:
    return split([text], 0.5, salt)[1] == [text]


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_every_document_falls_on_exactly_one_side(fraction: float) -> None:
    texts = [*TEXTS, *TEXTS[:50]]
    numbers = split_documents([content_hash(text) for text in texts], "", fraction)
    assert sorted(numbers[0] + numbers[1]) == list(range(len(texts)))


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
    assert duplicate.normalised == original.normalised
    assert (duplicate.exact == original.exact) == (name == "the same")
    for salt in map(str, range(40)):
        assert split_position(duplicate, salt) == split_position(original, salt)
        assert is_held_back(DUPLICATES[name], salt) == is_held_back(DUPLICATES["the same"], salt)


def test_hangul_taken_apart_falls_beside_hangul() -> None:
    for number in range(40):
        text = f"문서 번호 {number}"
        assert is_held_back(unicodedata.normalize("NFD", text)) == is_held_back(text)


@pytest.mark.parametrize("other", ["Ein schoner Tag. Ende", "ein schöner Tag. Ende", "Einschöner Tag. Ende", ""])
def test_another_text_is_no_duplicate(other: str) -> None:
    assert content_hash(other).normalised != content_hash(DUPLICATES["the same"]).normalised


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
    assert split_position(content_hash("hello world"), "") == 0.11015632910032608, (
        "another position moves documents between training and validation: every validation loss that was "
        "recorded before would no longer be comparable, and the split's rule needs another name"
    )


# --- in a corpus ---


@pytest.mark.parametrize(("fraction", "side"), [("1e-12", "validation"), ("0.999999999999", "training")])
def test_a_split_that_leaves_one_side_empty_is_refused(fraction: str, side: str) -> None:
    config = tiny("data.synthetic_documents=5", f"data.val_fraction={fraction}")
    with pytest.raises(UserError) as caught:
        build_corpus(config)
    message = str(caught.value)
    assert message.startswith(f"data: no document falls on the {side} side: there are 5 and data.val_fraction is ")
    assert len(message.splitlines()) == 1


def test_no_content_is_on_both_sides_of_a_corpus() -> None:
    corpus = build_corpus(tiny())
    assert len(corpus.train.hashes) > len(corpus.validation.hashes) > 0
    assert not set(corpus.train.hashes.tolist()) & set(corpus.validation.hashes.tolist())
    assert corpus.manifest["split"]["train"]["documents"] == corpus.train.num_documents
    assert corpus.manifest["split"]["validation"]["tokens"] == len(corpus.validation.tokens)
    assert corpus.manifest["duplicates"] == 0
