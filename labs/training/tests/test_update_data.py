"""The data of an update as the model gets them: micro-batches, padding, <|endoftext|>, isolation, and reading ahead."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from streams import MANY, same, stream_of
from tiny import tiny

from training_lab.config import ModelConfig
from training_lab.data.batches import IGNORED, Batch, UpdateData, make_batch, make_update_data
from training_lab.data.dataset import Dataset, prepare_dataset
from training_lab.data.layout import Layout, Packs, Pieces, TokenBudget, Windows
from training_lab.data.reading_ahead import ReadingAhead
from training_lab.data.stream import EndOfText
from training_lab.data.tokenizers import GPT2_END_OF_TEXT
from training_lab.loss import ChunkedLoss
from training_lab.model import Decoder, initialise

UPDATES = 12
VOCABULARY = 300

STREAMS = {
    "no end of text": stream_of(MANY),
    "start": stream_of(MANY, EndOfText("start", VOCABULARY - 1)),
    "end": stream_of(MANY, EndOfText("end", VOCABULARY - 1)),
}


def layout_of(name: str, place: str = "no end of text") -> Layout:
    """A layout over documents of very different lengths, five rows an update where it has rows."""
    stream = STREAMS[place]
    if name == "windows":
        return Windows(stream, 32, 5, 3)
    if name == "token_budget":
        return TokenBudget(stream, 90, 32, 3)
    return Packs(stream, 32, 5, name, 4, 3)


PACKINGS = ("best_fit", "next_fit", "bfd", "concat")
LAYOUTS = ("windows", "token_budget", *PACKINGS)

every_layout = pytest.mark.parametrize("name", LAYOUTS)
every_packing = pytest.mark.parametrize("name", PACKINGS)
every_place = pytest.mark.parametrize("place", list(STREAMS))


def run_of(name: str, micro_batches: int, place: str = "no end of text", spare: int = 0) -> list[UpdateData]:
    """The data of every update of a run."""
    layout, stream = layout_of(name, place), STREAMS[place]
    room = layout.max_pieces(UPDATES, micro_batches) + spare
    return [make_update_data(stream, layout, update, micro_batches, room) for update in range(1, UPDATES + 1)]


def borders_of(batch: Batch) -> list[tuple[int, int]]:
    """Where each piece that is not empty begins and ends, padding included."""
    return [(first, last) for first, last in itertools.pairwise(batch.cu_seqlens) if first < last]


def all_pieces(part: Pieces, batch: Batch) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The borders of the real pieces of a micro-batch, and of those that are padding."""
    borders = borders_of(batch)
    return borders[: len(part.lengths)], borders[len(part.lengths) :]


# --- micro-batches ---


@every_layout
@every_place
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_micro_batches_together_hold_exactly_the_pieces_of_the_update_in_order(
    name: str, place: str, micro_batches: int
) -> None:
    for update, data in enumerate(run_of(name, micro_batches, place), start=1):
        assert same(data.pieces, layout_of(name, place).pieces_of_update(update))
        assert same(Pieces(*(np.concatenate(arrays) for arrays in zip(*data.parts, strict=True))), data.pieces)
        whole = make_batch(STREAMS[place], data.pieces)
        real = [(batch, sum(part.lengths)) for part, batch in zip(data.parts, data.micro_batches, strict=True)]
        for field in ("tokens_T", "labels_T", "positions_T"):
            found = torch.cat([getattr(batch, field)[:size] for batch, size in real])
            assert torch.equal(found, getattr(whole, field))
        for part, batch in zip(data.parts, data.micro_batches, strict=True):
            assert [last - first for first, last in all_pieces(part, batch)[0]] == part.lengths.tolist()
            assert batch.num_target_tokens == part.num_targets.sum() == (batch.labels_T != IGNORED).sum()
        assert data.num_target_tokens == whole.num_target_tokens


@every_layout
def test_the_hash_of_an_update_does_not_depend_on_micro_batches_or_padding(name: str) -> None:
    layout = layout_of(name)
    expected = [
        make_batch(STREAMS["no end of text"], layout.pieces_of_update(update)).sha256()
        for update in range(1, UPDATES + 1)
    ]
    assert len(set(expected)) == UPDATES
    for micro_batches, spare in itertools.product((1, 2, 3, 5), (0, 7)):
        assert [data.sha256 for data in run_of(name, micro_batches, spare=spare)] == expected


@every_layout
@every_place
def test_every_micro_batch_of_a_run_has_the_same_number_of_pieces(name: str, place: str) -> None:
    for micro_batches in (1, 2, 3, 5):
        room = layout_of(name, place).max_pieces(UPDATES, micro_batches)
        batches = [batch for data in run_of(name, micro_batches, place) for batch in data.micro_batches]
        assert {len(batch.cu_seqlens) for batch in batches} == {room + 1}
        for batch in batches:
            assert batch.cu_seqlens[0] == 0
            assert list(batch.cu_seqlens) == sorted(batch.cu_seqlens)
            assert batch.cu_seqlens[-1] == len(batch.tokens_T) == len(batch.labels_T) == len(batch.positions_T)
            assert {x.dtype for x in (batch.tokens_T, batch.labels_T, batch.positions_T)} == {torch.int64}


@every_packing
@every_place
def test_a_micro_batch_of_packs_has_all_slots_of_its_packs(name: str, place: str) -> None:
    for micro_batches in (1, 2, 3, 5):
        for data in run_of(name, micro_batches, place):
            rows = [len(set(part.rows.tolist())) for part in data.parts]
            assert sum(rows) == 5
            assert len(rows) == micro_batches
            assert max(rows) == math.ceil(5 / micro_batches)
            assert [len(batch.tokens_T) for batch in data.micro_batches] == [32 * max(rows)] * micro_batches


@every_packing
@every_place
def test_padding_has_no_labels_and_short_pieces_of_its_own(name: str, place: str) -> None:
    padded = 0
    for micro_batches in (1, 2, 3, 5):
        for data in run_of(name, micro_batches, place):
            for part, batch in zip(data.parts, data.micro_batches, strict=True):
                end = int(part.lengths.sum())
                padding = all_pieces(part, batch)[1]
                assert [first for first, _ in padding[:1]] == [end] * (len(batch.tokens_T) > end)
                assert all(last - first <= 32 for first, last in padding)
                assert set(batch.labels_T[end:].tolist()) <= {IGNORED}
                assert set(batch.tokens_T[end:].tolist()) <= {0}
                padded += len(batch.tokens_T) - end
    assert padded > 0 or name == "concat"


@every_layout
@every_place
def test_positions_restart_with_every_piece_and_padding_and_stay_below_the_longest(name: str, place: str) -> None:
    for micro_batches in (1, 3):
        for data in run_of(name, micro_batches, place):
            for batch in data.micro_batches:
                for first, last in borders_of(batch):
                    assert batch.positions_T[first:last].tolist() == list(range(last - first))
                assert batch.positions_T.max() < 32


@every_layout
@every_place
def test_labels_are_the_next_tokens_and_never_cross_the_end_of_a_piece(name: str, place: str) -> None:
    for micro_batches in (1, 3):
        for data in run_of(name, micro_batches, place):
            for part, batch in zip(data.parts, data.micro_batches, strict=True):
                for (first, last), start in zip(all_pieces(part, batch)[0], part.starts.tolist(), strict=True):
                    inside, after = batch.tokens_T[first + 1 : last].tolist(), batch.labels_T[last - 1]
                    assert batch.labels_T[first : last - 1].tolist() == inside
                    following = start + last - first
                    expected = STREAMS[place].take(np.array([following])) if name == "windows" else [IGNORED]
                    assert after == int(expected[0])


# --- the end of a text ---


@pytest.mark.parametrize("place", ["start", "end"])
def test_the_end_of_text_is_at_the_border_of_every_document_and_nothing_else_changes(place: str) -> None:
    stream, plain = STREAMS[place], STREAMS["no end of text"]
    expected: list[int] = []
    for first, last in itertools.pairwise(plain.offsets.tolist()):
        text = list(range(first, last))
        expected += [VOCABULARY - 1, *text] if place == "start" else [*text, VOCABULARY - 1]
    assert stream.take(np.arange(stream.size)).tolist() == expected
    assert stream.size == len(expected) == plain.size + len(MANY)
    backwards = np.arange(stream.size)[::-1].reshape(-1, 1)
    assert stream.take(backwards).ravel().tolist() == expected[::-1]


@pytest.mark.parametrize("place", ["none", "start", "end"])
def test_text_that_reads_like_the_end_of_text_is_text(place: Literal["none", "start", "end"]) -> None:
    mark = "<|endoftext|>"
    texts = [mark, mark * 3, f"{mark} in front", f"at the end{mark}", f"in {mark} between"]
    texts += [f"An ordinary text, number {number}. " * (number + 1) for number in range(12)]
    for number, text in enumerate(texts):
        Path(f"{number}.txt").write_text(text)
    data = prepare_dataset(
        tiny("data.source=files", 'data.paths=["*.txt"]', "data.tokenizer=gpt2", f"data.end_of_text={place}",
             "data.val_fraction=0.3", "batch.layout=packs", "batch.packs=3", "batch.micro_batches=2")
    )  # fmt: skip
    stream = data.train
    assert GPT2_END_OF_TEXT not in data.cache.tokens
    tokens = stream.take(np.arange(stream.size))
    borders: list[int] = []
    if place != "none":
        borders = (stream.offsets[:-1] if place == "start" else stream.offsets[1:] - 1).tolist()
    assert np.flatnonzero(tokens == GPT2_END_OF_TEXT).tolist() == borders
    for update in range(1, 13):
        update_data = data.update_data(update)
        for part, batch in zip(update_data.parts, update_data.micro_batches, strict=True):
            marked = {slot for slot, token in enumerate(batch.tokens_T.tolist()) if token == GPT2_END_OF_TEXT}
            expected = set()
            for (first, _), start, size in zip(all_pieces(part, batch)[0], part.starts, part.lengths, strict=True):
                expected |= {first + at - int(start) for at in borders if start <= at < start + size}
            assert marked == expected


# --- what the model makes of it ---


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The models are so small that several threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_model() -> Decoder:
    model = Decoder(ModelConfig(num_layers=2, d_model=32, num_heads=2, max_positions=32, dropout=0.0), VOCABULARY)
    initialise(model, 0)
    with torch.no_grad():  # so that a token has a large effect on all that can see it
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def logits(model: Decoder, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        hidden_Td: torch.Tensor = model(batch.tokens_T, batch.positions_T, batch.cu_seqlens)
        return hidden_Td @ model.head_Vd.T


@pytest.mark.usefixtures("one_thread")
@every_packing
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_another_token_in_a_document_changes_no_logit_of_any_other_and_none_before_it(
    name: str, micro_batches: int
) -> None:
    model = small_model()
    changed_pieces = 0
    for data in run_of(name, micro_batches)[:2]:
        for part, batch in zip(data.parts, data.micro_batches, strict=True):
            before = logits(model, batch)
            for first, last in borders_of(batch):  # padding as well
                for place in {first, (first + last) // 2}:
                    tokens_T = batch.tokens_T.clone()
                    tokens_T[place] = (tokens_T[place] + 7) % VOCABULARY
                    after = logits(model, dataclasses.replace(batch, tokens_T=tokens_T))
                    is_same = (before == after).all(dim=1)
                    assert is_same[:place].all()
                    assert is_same[last:].all()
                    assert not is_same[place:last].any(), "the test must be able to see a change"
                    changed_pieces += 1
            assert len(part.lengths) > 1
    assert changed_pieces > 30


def loss_and_gradient(batches: list[Batch], num_targets: int) -> tuple[float, list[torch.Tensor]]:
    model = small_model()
    total = 0.0
    for batch in batches:
        hidden_Td = model(batch.tokens_T, batch.positions_T, batch.cu_seqlens)
        loss = ChunkedLoss()(hidden_Td, model.head_Vd, batch.labels_T) / num_targets
        loss.backward()
        total += loss.item()
    return total, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("one_thread")
@every_layout
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_padding_and_micro_batches_change_neither_loss_nor_gradient(name: str, micro_batches: int) -> None:
    stream = STREAMS["no end of text"]
    for data in run_of(name, micro_batches, spare=3)[:2]:
        bare = loss_and_gradient([make_batch(stream, data.pieces)], data.num_target_tokens)
        padded = loss_and_gradient(data.micro_batches, data.num_target_tokens)
        assert abs(bare[0] - padded[0]) <= 1e-6 * abs(bare[0])
        assert len(bare[1]) == len(padded[1]) == len(list(small_model().parameters()))
        for one, other in zip(bare[1], padded[1], strict=True):
            assert (one - other).abs().max() <= 1e-6 * max(1.0, float(one.abs().max()))


# --- reading ahead ---


class Recorded(Dataset):
    """A dataset that notes what it was asked for, and whose data of some updates cannot be made at first."""

    asked: ClassVar[list[int]] = []
    broken: ClassVar[set[int]] = set()

    def update_data(self, update: int) -> UpdateData:
        self.asked.append(update)
        if update in self.broken:
            self.broken.remove(update)
            raise OSError(f"update {update} cannot be read")
        return super().update_data(update)


@pytest.fixture
def dataset() -> Recorded:
    data = prepare_dataset(tiny("batch.layout=packs", "batch.packs=6", "batch.micro_batches=4", "train.updates=30"))
    Recorded.asked.clear()
    Recorded.broken.clear()
    return Recorded(**{field.name: getattr(data, field.name) for field in dataclasses.fields(data)})


def identical(one: UpdateData, other: UpdateData) -> bool:
    """Whether two are the same in everything that the model or the record sees."""
    batches = list(zip(one.micro_batches, other.micro_batches, strict=True))
    return (
        one.sha256 == other.sha256
        and same(one.pieces, other.pieces)
        and all(same(*parts) for parts in zip(one.parts, other.parts, strict=True))
        and all(a.sha256() == b.sha256() and a.num_target_tokens == b.num_target_tokens for a, b in batches)
    )


def interrupt(reader: ReadingAhead) -> None:
    reader.take(1)
    raise KeyboardInterrupt


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reading ahead")]


@pytest.mark.parametrize("ahead", [0, 1, 2, 5, 100])
def test_what_is_read_ahead_is_what_would_have_been_read_in_any_order(dataset: Recorded, ahead: int) -> None:
    expected = {update: dataset.update_data(update) for update in range(1, 31)}
    mixed = [*expected] * 2
    random.Random(ahead).shuffle(mixed)
    for order in ([*expected], [*range(13, 31)], [*reversed(expected)], [7, 7, 7, 8, 8], mixed):
        with ReadingAhead(dataset, 30, ahead) as reader:
            for update in order:
                assert identical(reader.take(update), expected[update])


def test_nothing_after_the_last_update_is_made_and_in_order_nothing_twice(dataset: Recorded) -> None:
    with ReadingAhead(dataset, 30) as reader:
        for update in range(4, 31):
            reader.take(update)
    assert dataset.asked == list(range(4, 31))


def test_what_cannot_be_made_is_raised_where_it_is_taken_and_can_be_taken_again(dataset: Recorded) -> None:
    expected = {update: dataset.update_data(update) for update in range(1, 31)}
    dataset.broken.update({3, 4, 9})
    with ReadingAhead(dataset, 30) as reader:
        for update in range(1, 31):
            if update in (3, 4, 9):
                with pytest.raises(OSError, match=f"update {update} cannot be read"):
                    reader.take(update)
            assert identical(reader.take(update), expected[update])


def test_its_thread_ends_with_it_also_after_an_error(dataset: Recorded) -> None:
    with ReadingAhead(dataset, 30) as reader:
        reader.take(1)
        assert len(readers()) == 1
    assert readers() == []
    dataset.broken.update({2})
    with pytest.raises(OSError, match="update 2"), ReadingAhead(dataset, 30) as reader:
        reader.take(2)
    assert readers() == []
    stopped = ReadingAhead(dataset, 30, ahead=29)  # much of what it began is never taken
    with pytest.raises(KeyboardInterrupt), stopped:
        interrupt(stopped)
    assert readers() == []


def test_how_far_it_reads_ahead_never_shows_in_the_state(dataset: Recorded) -> None:
    before = [dataset.sampler_state(update) for update in range(31)]
    assert before[7] == {"plan": dataset.plan, "next_pack": 42}
    with ReadingAhead(dataset, 30, ahead=9) as reader:
        for update in (1, 2, 11, 5):
            reader.take(update)
            assert [dataset.sampler_state(update) for update in range(31)] == before
    assert [dataset.sampler_state(update) for update in range(31)] == before


def test_a_text_smaller_than_a_pack_is_padded_to_a_whole_pack() -> None:
    stream = stream_of([3])
    data = make_update_data(stream, Packs(stream, 32, 1, "best_fit", 4, 0), 1, 1, 2)
    assert data.micro_batches[0].cu_seqlens == (0, 3, 32)
    assert data.micro_batches[0].labels_T.tolist() == [1, 2, *[IGNORED] * 30]
    assert data.micro_batches[0].positions_T.tolist() == [0, 1, 2, *range(29)]
