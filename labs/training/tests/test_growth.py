"""A corpus that grows stays what it was; and how its text lies in files does not matter."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny

from training_lab.data.batches import make_batch
from training_lab.data.dataset import Dataset, prepare_dataset
from training_lab.data.layout import document_order
from training_lab.data.stream import TokenStream
from training_lab.data.synthetic import synthetic_document

TEXTS = [synthetic_document(number).text[: 40 + (number * 53) % 300] for number in range(120)]
OLD, NEW = TEXTS[:70], TEXTS[70:]
UPDATES = range(1, 25)
LAYOUTS = {
    "windows": ("batch.layout=windows", "batch.block_size=32", "batch.batch_size=4"),
    "token_budget": ("batch.layout=token_budget", "batch.tokens=256"),
    "packs": ("batch.layout=packs", "batch.packs=3", "batch.micro_batches=2"),
}

every_layout = pytest.mark.parametrize("layout", list(LAYOUTS))


def write(folder: str, files: Mapping[str, list[str]]) -> None:
    """JSONL files, and text files of one document each."""
    for name, texts in files.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        records = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        path.write_text(records if name.endswith(".jsonl") else "".join(texts), encoding="utf-8")


def prepare(folder: str, files: Mapping[str, list[str]], *overrides: str) -> Dataset:
    write(folder, files)
    return prepare_dataset(tiny("data.source=files", f"data.paths={json.dumps([folder])}", *overrides))


def contents(stream: TokenStream) -> list[bytes]:
    return [row.tobytes() for row in stream.content]


def sides(dataset: Dataset) -> list[list[bytes]]:
    return [contents(stream) for stream in dataset.streams[:2]]


def only(those: list[bytes], known: list[bytes]) -> list[bytes]:
    return [content for content in those if content in set(known)]


# --- growing ---

GROWN: dict[str, dict[str, list[str]]] = {
    "a file after it": {"m.jsonl": OLD, "z.jsonl": NEW},
    "a file before it": {"m.jsonl": OLD, "a.jsonl": NEW},
    "files on both sides": {"a.jsonl": NEW[:20], "m.jsonl": OLD, "z.jsonl": NEW[20:]},
    "records at its end": {"m.jsonl": OLD + NEW},
    "records before its first": {"m.jsonl": NEW + OLD},
    "a single document": {"m.jsonl": OLD, "one.txt": NEW[:1]},
    "a duplicate": {"m.jsonl": OLD, "z.jsonl": [OLD[3], OLD[50], *NEW]},
}


@pytest.mark.parametrize("name", list(GROWN))
@pytest.mark.parametrize("fraction", ["0.1", "0.5"])
def test_a_corpus_that_grows_moves_no_document_to_the_other_side_and_none_past_another(
    name: str, fraction: str
) -> None:
    overrides = (f"data.val_fraction={fraction}", "data.duplicates=drop")
    before = prepare("before", {"m.jsonl": OLD}, *overrides)
    after = prepare("after", GROWN[name], *overrides)
    for old, new in zip(sides(before), sides(after), strict=True):
        assert only(new, old) == old
        assert len(new) >= len(old) > 0
    assert sum(map(len, sides(after))) == len({text for texts in GROWN[name].values() for text in texts})


@pytest.mark.parametrize("name", list(GROWN))
def test_every_epoch_reads_the_old_documents_of_a_grown_corpus_in_their_old_order(name: str) -> None:
    before = prepare("before", {"m.jsonl": OLD}, "data.duplicates=drop").train
    after = prepare("after", GROWN[name], "data.duplicates=drop").train
    for seed in (0, 1337):
        for epoch in range(6):
            old, new = (
                [contents(stream)[number] for number in document_order(stream, seed, epoch).tolist()]
                for stream in (before, after)
            )
            assert only(new, old) == old
            assert sorted(new) == sorted(contents(after))


def test_kept_duplicates_lie_beside_their_originals_and_move_nothing_else() -> None:
    before = prepare("before", {"m.jsonl": OLD})
    after = prepare("after", {"m.jsonl": [*OLD, OLD[3], " " + OLD[50]]})
    for old, new in zip(sides(before), sides(after), strict=True):
        assert list(dict.fromkeys(new)) == old
    assert sum(map(len, sides(after))) == len(OLD) + 2


def test_a_document_is_never_read_in_two_epochs_in_the_same_order() -> None:
    train = prepare("corpus", {"m.jsonl": OLD}).train
    orders = {tuple(document_order(train, seed, epoch).tolist()) for seed in (0, 1) for epoch in range(5)}
    assert len(orders) == 10


# --- the same text in other files ---


def shuffled(texts: list[str]) -> list[str]:
    mixed = texts.copy()
    random.Random(0).shuffle(mixed)
    return mixed


ELSEWHERE: dict[str, dict[str, list[str]]] = {
    "renamed": {"another name.jsonl": TEXTS[:60], "a/folder/b.jsonl": TEXTS[60:]},
    "names exchanged": {"b.jsonl": TEXTS[:60], "a.jsonl": TEXTS[60:]},
    "split in two": {"a.jsonl": TEXTS[:60], "b1.jsonl": TEXTS[60:77], "b2.jsonl": TEXTS[77:]},
    "joined": {"a.jsonl": TEXTS},
    "records shuffled": {"a.jsonl": shuffled(TEXTS)},
    "backwards": {"a.jsonl": TEXTS[::-1]},
    "a file each": {f"{number}.txt": [text] for number, text in enumerate(TEXTS)},
    "with empty files": {"a.jsonl": TEXTS[:60], "b.jsonl": ["", *TEXTS[60:], " "], "empty.txt": []},
}


def names_of(dataset: Dataset) -> dict[str, object]:
    """All that says which data a run sees, and what it sees."""
    return {
        "train": dataset.train.identity,
        "validation stream": dataset.streams.validation.identity,
        "plan": dataset.plan,
        "validation": dataset.validation.identity,
        "data": dataset.manifest["identity"],
        "batches": [dataset.update_data(update).sha256 for update in UPDATES],
        "micro-batches": [batch.sha256() for u in UPDATES for batch in dataset.update_data(u).micro_batches],
    }


@pytest.mark.parametrize(("layout", "tokenizer"), [*((layout, "byte") for layout in LAYOUTS), ("packs", "gpt2")])
@pytest.mark.parametrize("name", list(ELSEWHERE))
def test_how_the_text_lies_in_files_changes_no_identity_and_no_batch(name: str, layout: str, tokenizer: str) -> None:
    overrides = (*LAYOUTS[layout], f"data.tokenizer={tokenizer}")
    before = prepare("before", {"a.jsonl": TEXTS[:60], "b.jsonl": TEXTS[60:]}, *overrides)
    after = prepare("after", ELSEWHERE[name], *overrides)
    assert before.cache.path != after.cache.path
    assert names_of(after) == names_of(before)


@every_layout
def test_another_text_changes_every_identity(layout: str) -> None:
    before = names_of(prepare("before", {"a.jsonl": TEXTS}, *LAYOUTS[layout]))
    after = names_of(prepare("after", {"a.jsonl": [text + "." for text in TEXTS]}, *LAYOUTS[layout]))
    assert all(before[name] != after[name] for name in before)


def test_the_order_in_which_paths_are_listed_changes_nothing() -> None:
    files = {f"{number}.jsonl": TEXTS[number * 20 : number * 20 + 20] for number in range(6)}
    write("corpus", files)
    paths = [f"corpus/{name}" for name in files]
    first, other = (
        prepare_dataset(tiny("data.source=files", f"data.paths={json.dumps(listed)}"))
        for listed in (paths, shuffled(paths))
    )
    assert first.cache.path == other.cache.path
    assert names_of(first) == names_of(other)


# --- nested validation sets ---


@pytest.mark.parametrize("pieces", ["documents", "windows"])
@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_a_smaller_validation_set_is_the_beginning_of_a_larger_one(pieces: str, tokenizer: str) -> None:
    overrides = (f"eval.pieces={pieces}", f"data.tokenizer={tokenizer}", "data.val_fraction=0.3", "batch.tokens=128")
    found: list[np.ndarray] = []
    for size in (2, 3, 63, 64, 65, 66, 200, 512, 10**6):
        validation = prepare("corpus", {"a.jsonl": TEXTS}, *overrides, f"eval.tokens={size}").validation
        batch = make_batch(validation.stream, validation.pieces)
        labelled = batch.labels_T.numpy() != -100
        assert labelled.sum() == validation.num_target_tokens > 0
        found.append(np.stack([batch.tokens_T.numpy(), batch.positions_T.numpy()]))
        assert found[-1].shape[1] <= size
    for few, many in itertools.pairwise(found):
        assert few.shape[1] <= many.shape[1]
        assert np.array_equal(few, many[:, : few.shape[1]])
    left_out = 1 if pieces == "windows" else 0  # the last token of all is only a label
    assert found[-1].shape[1] == validation.stream.size - left_out


def test_the_documents_held_back_by_a_smaller_fraction_come_first_among_those_of_a_larger_one() -> None:
    found = [
        sides(prepare("corpus", {"a.jsonl": TEXTS}, f"data.val_fraction={fraction}"))[1]
        for fraction in (0.05, 0.1, 0.3, 0.5, 0.8)
    ]
    for few, many in itertools.pairwise(found):
        assert 0 < len(few) < len(many)
        assert many[: len(few)] == few


def test_a_larger_fraction_changes_nothing_that_is_measured() -> None:
    found = [
        prepare("corpus", {"a.jsonl": TEXTS}, "eval.tokens=300", f"data.val_fraction={fraction}").validation.identity
        for fraction in (0.1, 0.3, 0.5)
    ]
    assert len(set(found)) == 1
