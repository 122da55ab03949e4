"""What is said of the data is so: every figure agrees with a slow recount of the real thing."""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import tiny

from training_lab.data import dataset as datasets
from training_lab.data import stats
from training_lab.data.dataset import STATS, Dataset, measured_updates, prepare_dataset
from training_lab.data.layout import Packs
from training_lab.data.split import content_hash, split_positions
from training_lab.data.stream import TokenStream
from training_lab.data.synthetic import synthetic_document
from training_lab.progress import NoProgress

TEXTS = [synthetic_document(number).text[: 30 + (number * 37) % 400] for number in range(80)]
SHORT = ("data.source=files", 'data.paths=["corpus"]', "eval.tokens=4000", "batch.tokens=256")


def write_corpus(texts: list[str]) -> None:
    Path("corpus").mkdir(exist_ok=True)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    Path("corpus/a.jsonl").write_text("".join(lines), encoding="utf-8")


def prepare(texts: list[str], *overrides: str) -> Dataset:
    write_corpus(texts)
    return prepare_dataset(tiny(*SHORT, *overrides))


def stats_of(texts: list[str], *overrides: str) -> dict[str, Any]:
    return prepare(texts, *overrides).stats(NoProgress())


def documents_of(stream: TokenStream) -> list[list[int]]:
    """The tokens of each document of a stream, without ends of text."""
    places = zip(stream.starts.tolist(), stream.lengths.tolist(), strict=True)
    return [stream.tokens[start : start + length].tolist() for start, length in places]


# --- lengths and sizes ---


@pytest.mark.parametrize(
    "lengths", [[1, 2, 3, 4, 5, 7, 8, 9], [64] * 5, [1, 1000], [255, 256, 257], list(range(1, 300))]
)
def test_quantiles_and_histogram_agree_with_the_real_lengths(lengths: list[int]) -> None:
    found = stats.describe_lengths(np.array(lengths, dtype=np.int64))
    assert found["mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["quantiles"]["0"] == min(lengths)
    assert found["quantiles"]["100"] == max(lengths)
    for name, value in found["quantiles"].items():
        assert value == float(np.percentile(lengths, float(name)))
    bins = found["histogram"]
    assert sum(one["number"] for one in bins) == len(lengths)
    for one in bins:
        assert one["below"] == 2 * one["from"]
        assert one["number"] == sum(one["from"] <= length < one["below"] for length in lengths)
    assert [one["from"] for one in bins[1:]] == [one["below"] for one in bins[:-1]]
    assert bins[0]["number"] > 0 < bins[-1]["number"]


def test_the_sizes_of_a_corpus_are_those_of_its_texts() -> None:
    found = stats_of([*TEXTS, "가나다é", "", " \n", "x"])
    kept = [*TEXTS, "가나다é", "x"]
    sizes = [len(text.encode("utf-8")) for text in kept]
    assert (found["documents"], found["tokens"], found["text_bytes"]) == (len(kept), sum(sizes), sum(sizes))
    assert found["bytes_per_token"] == 1
    assert found["lengths"]["quantiles"]["50"] == float(np.percentile(sizes, 50))
    assert found["rejected"] == {"empty": 1, "white space": 1, "too short to predict anything": 1}
    assert found["rejected_examples"] == [["corpus/a.jsonl#82", "empty"], ["corpus/a.jsonl#83", "white space"]]
    assert stats_of(kept, "data.tokenizer=gpt2")["bytes_per_token"] > 1


# --- duplicates and leaks ---

DUPLICATES = [
    "  " + TEXTS[3].replace(" ", " \n"),
    TEXTS[3],
    TEXTS[5] + "\r\n\r\n",
    unicodedata.normalize("NFD", "Ein schöner Tag, 값을 하나만 바꾼다."),
]
WITH_DUPLICATES = [*TEXTS, "Ein schöner  Tag, 값을 하나만 바꾼다.", *DUPLICATES]


def test_duplicates_are_counted_and_kept_or_all_but_one_dropped() -> None:
    kept, dropped = (prepare(WITH_DUPLICATES, f"data.duplicates={policy}") for policy in ("keep", "drop"))
    hashes = {content_hash(text) for text in WITH_DUPLICATES}
    assert len(hashes) == len(WITH_DUPLICATES) - 4
    for dataset, policy, number in ((kept, "keep", len(WITH_DUPLICATES)), (dropped, "drop", len(hashes))):
        sides = (dataset.streams.train, dataset.streams.validation)
        contents = [row.tobytes() for stream in sides for row in stream.content]
        assert len(contents) == number
        assert set(contents) == hashes
        found = dataset.stats(NoProgress())["duplicates"]
        assert (found["found"], found["policy"]) == (4, policy)
    assert kept.cache.path == dropped.cache.path
    assert kept.manifest["identity"] != dropped.manifest["identity"]


@pytest.mark.parametrize("salt", [str(number) for number in range(8)])
def test_duplicates_fall_on_one_side_and_no_document_leaks(salt: str) -> None:
    dataset = prepare(WITH_DUPLICATES, "data.val_fraction=0.4", f"data.split_salt=salt-{salt}")
    sides = [{row.tobytes() for row in stream.content} for stream in dataset.streams[:2]]
    assert not sides[0] & sides[1]
    assert dataset.stats(NoProgress())["split"]["leaks"]["exact"]["documents"] == 0


def test_a_document_on_both_sides_would_be_told() -> None:
    streams = prepare(TEXTS).streams
    found = stats.leaks(streams._replace(train=streams.validation), NoProgress())
    assert found["exact"]["documents"] == found["windows"]["validation_documents"] == streams.validation.num_documents


def passages() -> list[str]:
    """Texts of which some share a passage, some a part of it that is just too short or just long enough."""
    passage = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(900))
    texts = [text + str(number) for number, text in enumerate(TEXTS)]
    for number in range(0, 80, 3):
        texts[number] = texts[number][: number % 40] + passage[number : number + 40 + 5 * number] + f"#{number}"
    return texts


def slow_windows(stream: TokenStream, sampled: int) -> list[set[tuple[int, ...]]]:
    """The windows of each document, those that are looked at."""
    found = []
    for tokens in documents_of(stream):
        windows = {tuple(tokens[i : i + stats.LEAK_WINDOW]) for i in range(len(tokens) - stats.LEAK_WINDOW + 1)}
        chosen = {w for w in windows if sampled == 1 or int(stats.window_hashes(np.array(w))[0]) % sampled == 0}
        found.append(chosen)
    return found


@pytest.mark.parametrize("sampled", [1, 8, 64])
@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_shared_windows_agree_with_sets_of_windows(
    monkeypatch: pytest.MonkeyPatch, sampled: int, tokenizer: str
) -> None:
    monkeypatch.setattr(stats, "LEAK_SAMPLED", sampled)
    streams = prepare(passages(), "data.val_fraction=0.4", f"data.tokenizer={tokenizer}").streams
    train, validation = (slow_windows(stream, sampled) for stream in streams[:2])
    seen = set().union(*train)
    expected = {
        "documents": sum(bool(windows & seen) for windows in validation),
        "documents_with_a_sampled_run": sum(bool(windows) for windows in validation),
        "validation_documents": len(validation),
    }
    assert 0 < expected["documents"] < expected["documents_with_a_sampled_run"] or tokenizer == "gpt2"
    for chunk in (1, 60, 1000, stats.CHUNK_TOKENS):
        monkeypatch.setattr(stats, "CHUNK_TOKENS", chunk)
        assert stats.shared_windows(streams.train, streams.validation, NoProgress()) == expected


def test_the_hash_of_a_window_depends_on_its_tokens_alone() -> None:
    tokens = np.array([(i * i) % 251 for i in range(300)], dtype=np.uint16)
    hashes = stats.window_hashes(tokens)
    assert len(hashes) == 300 - stats.LEAK_WINDOW + 1
    assert len(set(hashes.tolist())) == len({tuple(tokens[i : i + 50].tolist()) for i in range(251)})
    for place in (0, 1, 77, 250):
        assert stats.window_hashes(tokens[place : place + 50].astype(np.uint32)).tolist() == [int(hashes[place])]
    assert len(stats.window_hashes(tokens[:49])) == 0


# --- packing ---


@pytest.mark.parametrize("packing", ["best_fit", "next_fit", "bfd", "concat"])
@pytest.mark.parametrize("segment_documents", [7, 65_536])
@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_packing_figures_agree_with_a_recount_of_the_pieces(
    monkeypatch: pytest.MonkeyPatch, packing: str, segment_documents: int, tokenizer: str
) -> None:
    monkeypatch.setattr(Packs, "SEGMENT_DOCUMENTS", segment_documents)
    dataset = prepare(TEXTS, "batch.layout=packs", f"batch.packing={packing}", f"data.tokenizer={tokenizer}",
                      "batch.packing_buffer=5", "batch.packs=4")  # fmt: skip
    layout, stream = dataset.layout, dataset.train
    assert isinstance(layout, Packs)
    num_packs = sum(segment.num_packs for segment in layout.epoch(0))
    pieces = layout.pieces_between(0, num_packs)
    found = dataset.stats(NoProgress())["packing"]

    tokens: Counter[int] = Counter()
    pieces_of_pack: Counter[int] = Counter()
    pieces_of_document: Counter[int] = Counter()
    for row, start, length in zip(pieces.rows.tolist(), pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        tokens[row] += length
        pieces_of_pack[row] += 1
        (document,) = [i for i in range(stream.num_documents) if stream.offsets[i] <= start < stream.offsets[i + 1]]
        pieces_of_document[document] += 1
    sizes = np.diff(stream.offsets).tolist()
    cut = [document for document, number in pieces_of_document.items() if number > 1]
    lengths = pieces.lengths.tolist()
    fills = [tokens[pack] / 64 for pack in range(num_packs)]

    assert sum(tokens.values()) == stream.size == sum(sizes)
    assert set(pieces_of_document) == set(range(stream.num_documents))
    assert (found["packing"], found["pack_length"], found["packs"]) == (packing, 64, num_packs)
    assert found["fill"] == pytest.approx(stream.size / (64 * num_packs))
    assert found["worst_pack"]["tokens"] == min(tokens.values()) == tokens[found["worst_pack"]["pack"]]
    assert found["packs_below_90_percent"] == sum(fill < 0.9 for fill in fills)
    for one in found["fill_histogram"]:
        is_last = one["to"] == 1
        assert one["packs"] == sum(one["from"] <= fill < one["to"] or (is_last and fill == 1) for fill in fills)
    assert found["pieces"] == len(lengths)
    assert found["pieces_per_pack"] == {"mean": len(lengths) / num_packs, "max": max(pieces_of_pack.values())}
    assert found["target_tokens"] == sum(length - 1 for length in lengths) == stream.size - len(lengths)
    assert found["target_tokens_per_pack"] == found["target_tokens"] / num_packs
    assert found["documents_cut"] == len(cut) > 0
    assert found["documents_cut_share"] == len(cut) / stream.num_documents
    assert found["tokens_in_cut_documents_share"] == sum(sizes[document] for document in cut) / stream.size
    assert found["sum_of_squared_piece_lengths"] == sum(length**2 for length in lengths)
    assert found["token_weighted_mean_piece"] == sum(length**2 for length in lengths) / sum(lengths)


@pytest.mark.parametrize("layout", ["windows", "token_budget", "packs"])
def test_the_pieces_of_the_first_updates_are_those_of_the_batches(layout: str) -> None:
    small = ("batch.block_size=16", "batch.batch_size=3") if layout == "windows" else ()
    dataset = prepare(TEXTS, f"batch.layout={layout}", *small)
    lengths: list[int] = []
    for update in range(1, measured_updates(dataset.config, dataset.train) + 1):
        for batch in dataset.update_data(update).micro_batches:
            ends = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
            labels = batch.labels_T.numpy() != -100
            lengths += [end - begin for begin, end in ends if labels[begin:end].any()]
    found = dataset.stats(NoProgress())["pieces"]
    with_targets = [one for one in found["histogram"] if one["from"] > 1]
    assert sum(one["number"] for one in with_targets) == sum(length > 1 for length in lengths)
    squares = sum(length**2 for length in lengths)
    alone = found["pieces"] - len(lengths)  # pieces of one token, which have no label
    assert found["input_tokens"] - alone == sum(lengths)
    assert found["sum_of_squared_lengths"] - alone == squares
    assert math.isclose(found["token_weighted_mean"], (squares + alone) / (sum(lengths) + alone))
    if layout != "packs":
        assert dataset.stats(NoProgress())["packing"] is None


# --- kept ---


@pytest.mark.parametrize("damage", ["a bit", "half", "nothing", "another object"])
def test_figures_are_kept_and_made_again_if_the_file_is_damaged(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    dataset = prepare(TEXTS)
    first = dataset.stats(NoProgress())
    path = dataset.folder / STATS
    good = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.delattr(datasets, "data_stats")
        assert dataset.stats(NoProgress()) == prepare(TEXTS).stats(NoProgress()) == first
    flipped = good.replace(b'"documents": 80', b'"documents": 81', 1)
    assert flipped != good
    path.write_bytes({"a bit": flipped, "half": good[:99], "nothing": b"", "another object": b"{}\n"}[damage])
    assert dataset.stats(NoProgress()) == first
    assert path.read_bytes() == good


def after_all_validation_documents() -> str:
    """A text that is held back, and comes after all others that are."""

    def position(text: str) -> float:
        return float(split_positions(np.frombuffer(content_hash(text), dtype=np.uint8).reshape(1, 32), "")[0])

    last = max(place for place in map(position, TEXTS) if place < 0.1)
    return next(text for text in (f"another text {n}" for n in range(10_000)) if last < position(text) < 0.1)


OTHERS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    # name: (texts, overrides) of data that have the same plan and the same validation set
    "more windows an update": (TEXTS, ("batch.batch_size=5",)),
    "a document that is left out": ([*TEXTS, ""], ()),
    "more held back than is measured on": ([*TEXTS, after_all_validation_documents()], ()),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_figures_are_those_of_these_data_and_not_of_others_with_the_same_plan(name: str) -> None:
    windows = ("batch.layout=windows", "batch.block_size=16", "batch.batch_size=3", "eval.tokens=32")
    texts, overrides = OTHERS[name]
    stats_of(TEXTS, *windows)
    found = stats_of(texts, *windows, *overrides)
    assert found == stats_of(texts, *windows, *overrides, "data.cache_dir=elsewhere")
