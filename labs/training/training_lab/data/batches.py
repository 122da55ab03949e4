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

from training_lab.data.corpus import TokenStream
from training_lab.data.layout import Pieces

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
    """Where each piece begins in the row, and the end of the last: P + 1 numbers."""
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
    source = np.repeat(pieces.starts, pieces.lengths) + positions
    has_label = positions < np.repeat(pieces.num_targets, pieces.lengths)
    labels = np.full(len(source), IGNORED, dtype=np.int64)
    labels[has_label] = stream.tokens[source[has_label] + 1]
    return Batch(
        tokens_T=torch.from_numpy(stream.tokens[source].astype(np.int64)),
        labels_T=torch.from_numpy(labels),
        positions_T=torch.from_numpy(positions),
        cu_seqlens=tuple(cu_seqlens.tolist()),
        num_target_tokens=int(pieces.num_targets.sum()),
    )


def split_pieces(pieces: Pieces, num_parts: int) -> Iterator[Pieces]:
    """The pieces in at most `num_parts` runs of about equally many tokens; none is empty, and none is cut."""
    ends = np.cumsum(pieces.lengths)
    goals = ends[-1] * np.arange(1, num_parts + 1) / num_parts
    first = 0
    for last in np.searchsorted(ends, goals - 0.5) + 1:
        if last > first:
            yield pieces.part(first, last)
            first = last


def split_by_tokens(pieces: Pieces, max_tokens: int) -> Iterator[Pieces]:
    """The pieces in runs of at most `max_tokens` tokens; a piece that is longer is a run for itself."""
    first, tokens = 0, 0
    for number, length in enumerate(pieces.lengths.tolist()):
        if tokens + length > max_tokens and number > first:
            yield pieces.part(first, number)
            first, tokens = number, 0
        tokens += length
    yield pieces.part(first, len(pieces.lengths))
