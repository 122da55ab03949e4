"""Causal attention in which every piece of a row sees only itself.

Shapes: T tokens, H heads, D dimensions of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Group(NamedTuple):
    """Neighbouring pieces of one length, which are computed as one batch."""

    num_pieces: int
    length: int


def equal_length_groups(cu_seqlens: Sequence[int]) -> list[Group]:
    """The pieces of a row that are not empty, in order, as runs of equal length. Fixed windows are a single group."""
    lengths = (end - start for start, end in itertools.pairwise(cu_seqlens) if end > start)
    return [Group(len(list(run)), length) for length, run in itertools.groupby(lengths)]


def piecewise_attention(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, groups: Sequence[Group], dropout: float = 0.0
) -> torch.Tensor:
    """Scaled dot-product attention within each piece, exact, on any device and in any type. Returns [T, H, D]."""
    outputs = []
    sizes = [group.num_pieces * group.length for group in groups]
    for group, q, k, v in zip(groups, q_THD.split(sizes), k_THD.split(sizes), v_THD.split(sizes), strict=True):
        q_PHLD, k_PHLD, v_PHLD = (x.unflatten(0, group).transpose(1, 2) for x in (q, k, v))
        out_PHLD = F.scaled_dot_product_attention(q_PHLD, k_PHLD, v_PHLD, dropout_p=dropout, is_causal=True)
        outputs.append(out_PHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
