"""The one form in which data reaches the model: a flat row of tokens with labels, positions and `cu_seqlens`.

Shapes: T input tokens, P pieces.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from training_lab.data.layout import Layout, Pieces
from training_lab.data.stream import TokenStream

IGNORED = -100
"""The label of a position that has none; torch's own default for `ignore_index`."""


@dataclass(frozen=True)
class Batch:
    """Pieces as the model sees them. Nothing attends across pieces, and positions restart with each."""

    tokens_T: torch.Tensor
    """Input token ids, int64."""
    labels_T: torch.Tensor
    """The token to predict at each position, or IGNORED; int64."""
    positions_T: torch.Tensor
    """Distance from the beginning of the piece, int64."""
    cu_seqlens: tuple[int, ...]
    """Where each piece begins in the row, and the end of the last: P + 1 numbers. Pieces at the end may be padding,
    without a label, or empty."""
    num_target_tokens: int

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return dataclasses.replace(
            self,
            tokens_T=self.tokens_T.to(device),
            labels_T=self.labels_T.to(device),
            positions_T=self.positions_T.to(device),
        )

    def sha256(self) -> str:
        """The hash of everything that the model would see."""
        digest = hashlib.sha256()
        for tensor in (self.tokens_T, self.labels_T, self.positions_T):
            digest.update(tensor.cpu().numpy().astype("<i8").tobytes())
        digest.update(np.array(self.cu_seqlens, dtype="<i8").tobytes())
        return digest.hexdigest()


def make_batch(stream: TokenStream, pieces: Pieces) -> Batch:
    """Gathers the tokens of some pieces into one row."""
    cu_seqlens = np.concatenate([[0], np.cumsum(pieces.lengths)])
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], pieces.lengths)
    places = np.repeat(pieces.starts, pieces.lengths) + positions
    has_label = positions < np.repeat(pieces.num_targets, pieces.lengths)
    labels = np.full(len(places), IGNORED, dtype=np.int64)
    labels[has_label] = stream.take(places[has_label] + 1)
    return Batch(
        tokens_T=torch.from_numpy(stream.take(places)),
        labels_T=torch.from_numpy(labels),
        positions_T=torch.from_numpy(positions),
        cu_seqlens=tuple(cu_seqlens.tolist()),
        num_target_tokens=int(pieces.num_targets.sum()),
    )


@dataclass(frozen=True)
class UpdateData:
    """What one update is computed on."""

    pieces: Pieces
    parts: list[Pieces]
    """The pieces of each micro-batch."""
    micro_batches: list[Batch]
    sha256: str
    """The hash of the whole, however it is split and padded."""
    attended: np.ndarray
    """The lengths of the stretches within which tokens attend: pieces, or rows where pieces are joined."""

    @property
    def num_target_tokens(self) -> int:
        return int(self.pieces.num_targets.sum())


def make_update_data(
    stream: TokenStream, layout: Layout, update: int, micro_batches: int, max_pieces: int, is_isolated: bool = True
) -> UpdateData:
    """The micro-batches of update 1, 2, ..., all with `max_pieces` pieces: a pure function of the update's number.
    Without isolation the pieces of a row are one to the model."""
    pieces = layout.pieces_of_update(update)
    whole = make_batch(stream, pieces)
    parts, batches = [], []
    most_rows = -(-len(np.unique(pieces.rows)) // micro_batches)
    for first, last in split_rows(pieces, layout.row_tokens, micro_batches):
        part = pieces.part(first, last)
        num_tokens = most_rows * layout.row_tokens if layout.row_tokens else int(part.lengths.sum())
        parts.append(part)
        batch = cut_out(whole, first, last)
        batch = batch if is_isolated else join_rows(batch, part)
        batches.append(pad(batch, num_tokens, max_pieces, layout.row_tokens or num_tokens))
    if is_isolated:
        return UpdateData(pieces, parts, batches, whole.sha256(), pieces.lengths)
    joined = join_rows(whole, pieces)
    return UpdateData(pieces, parts, batches, joined.sha256(), np.diff(joined.cu_seqlens))


def join_rows(batch: Batch, pieces: Pieces) -> Batch:
    """The batch with each row as one piece: positions go on through it, and all of it is attended to. Labels stay."""
    lengths = np.bincount(pieces.rows - pieces.rows[0], weights=pieces.lengths).astype(np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    return dataclasses.replace(
        batch, positions_T=torch.from_numpy(positions), cu_seqlens=tuple(cu_seqlens.tolist())
    )  # fmt: skip


def cut_out(batch: Batch, first: int, last: int) -> Batch:
    """The pieces from number `first` up to, not including, `last` of a batch; its tensors are shared."""
    begin, end = batch.cu_seqlens[first], batch.cu_seqlens[last]
    labels_T = batch.labels_T[begin:end]
    return Batch(
        tokens_T=batch.tokens_T[begin:end],
        labels_T=labels_T,
        positions_T=batch.positions_T[begin:end],
        cu_seqlens=tuple(place - begin for place in batch.cu_seqlens[first : last + 1]),
        num_target_tokens=int((labels_T != IGNORED).sum()),
    )


def pad(batch: Batch, num_tokens: int, num_pieces: int, longest: int) -> Batch:
    """The batch with `num_tokens` tokens and `num_pieces` pieces, so that every micro-batch of a run has one shape.

    What is added has no label and is in pieces of its own, at most `longest` long; the rest of the pieces is empty.
    """
    end, missing = batch.cu_seqlens[-1], num_tokens - batch.cu_seqlens[-1]
    borders = [*batch.cu_seqlens, *range(end + longest, num_tokens, longest), *([num_tokens] if missing else [])]
    assert len(borders) <= num_pieces + 1, "the layout promised that no micro-batch has more pieces"
    borders += [num_tokens] * (num_pieces + 1 - len(borders))
    if not missing:
        return dataclasses.replace(batch, cu_seqlens=tuple(borders))
    zeros_T = torch.zeros(missing, dtype=torch.int64)
    return Batch(
        tokens_T=torch.cat([batch.tokens_T, zeros_T]),
        labels_T=torch.cat([batch.labels_T, zeros_T + IGNORED]),
        positions_T=torch.cat([batch.positions_T, torch.arange(missing) % longest]),
        cu_seqlens=tuple(borders),
        num_target_tokens=batch.num_target_tokens,
    )


def without_labels(batch: Batch) -> Batch:
    """A batch of the same shape with nothing to learn: for who takes part in a pass without a share of the text."""
    return dataclasses.replace(batch, labels_T=torch.full_like(batch.labels_T, IGNORED), num_target_tokens=0)


def split_rows(pieces: Pieces, row_tokens: int | None, num_parts: int) -> list[tuple[int, int]]:
    """At most `num_parts` runs of whole rows, of about equally many token slots, as (first piece, last piece + 1).

    None is empty.
    """
    row_ends = np.flatnonzero(np.diff(pieces.rows, append=-1)) + 1  # in pieces
    slots = np.cumsum(pieces.lengths)[row_ends - 1] if row_tokens is None else np.arange(1, len(row_ends) + 1)
    goals = slots[-1] * np.arange(1, num_parts + 1) / num_parts
    cuts = np.unique(row_ends[np.searchsorted(slots, goals - 0.5)])
    return list(zip([0, *cuts[:-1].tolist()], cuts.tolist(), strict=True))


def split_by_tokens(pieces: Pieces, max_tokens: int) -> Iterator[Pieces]:
    """The pieces in runs of at most `max_tokens` tokens; a piece that is longer is a run for itself."""
    first, tokens = 0, 0
    for number, length in enumerate(pieces.lengths.tolist()):
        if tokens + length > max_tokens and number > first:
            yield pieces.part(first, number)
            first, tokens = number, 0
        tokens += length
    yield pieces.part(first, len(pieces.lengths))
