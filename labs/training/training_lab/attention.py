"""Causal attention in which every piece of a row sees only itself: three backends of one mathematics.

`flash` is torch's variable-length FlashAttention (CUDA, BF16 or FP16), `flex` is FlexAttention with a mask of pieces,
`sdpa` computes piece by piece, on any device and in any type. A backend first looks at where the pieces of a row are
(`prepare`, once for all layers, outside what is compiled), then attends in each layer.

Shapes: T tokens, H heads, D dimensions of a head; N blocks of BLOCK tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 128
"""Tokens on the side of a block of FlexAttention's mask; its kernels' own default."""


class AttentionBackend(Protocol):
    """One way to compute it."""

    name: str

    def prepare(self, cu_seqlens: Sequence[int], device: torch.device) -> Any:
        """What `attend` has to know of the pieces of a row, whose borders `cu_seqlens` are."""

    def attend(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, pieces: Any, dropout: float
    ) -> torch.Tensor:
        """Scaled dot-product attention within each piece, [T, H, D]."""


class Backends(NamedTuple):
    """The backend in training, and that in evaluation and sampling."""

    training: AttentionBackend
    evaluation: AttentionBackend


def make_backends(name: str, max_positions: int) -> Backends:
    """Both for a model. What is evaluated has rows of many lengths, for each of which flex would be compiled."""
    training = make_attention(name, max_positions)
    return Backends(training, SdpaAttention() if name == "flex" else training)


def make_attention(name: str, max_positions: int) -> AttentionBackend:
    """The backend named `sdpa`, `flex` or `flash`; no piece is longer than `max_positions`."""
    if name == "flash":
        return FlashAttention(max_positions)
    return FlexAttention() if name == "flex" else SdpaAttention()


class Group(NamedTuple):
    """Neighbouring pieces of one length, which are computed as one batch."""

    num_pieces: int
    length: int


class Groups:
    """All groups of a row. A class of its own, so that compiled code does not look into it: the pieces of each row are
    others, and would have to be compiled for."""

    def __init__(self, cu_seqlens: Sequence[int]) -> None:
        self.groups = equal_length_groups(cu_seqlens)


def equal_length_groups(cu_seqlens: Sequence[int]) -> list[Group]:
    """The pieces of a row that are not empty, in order, as runs of equal length. Fixed windows are a single group."""
    lengths = (end - start for start, end in itertools.pairwise(cu_seqlens) if end > start)
    return [Group(len(list(run)), length) for length, run in itertools.groupby(lengths)]


class SdpaAttention:
    """torch's own attention on one group of equally long pieces after the other: exact wherever torch runs."""

    name = "sdpa"

    def prepare(self, cu_seqlens: Sequence[int], device: torch.device) -> Groups:
        return Groups(cu_seqlens)

    def leave_compiled_code(self) -> None:
        """Has attention run as it is within compiled code: the pieces of each row would have to be compiled for.

        Not a decorator, because asking for it loads torch's compiler, which takes a second.
        """
        self.attend = torch.compiler.disable(self.attend)  # type: ignore[method-assign]

    def attend(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, pieces: Groups, dropout: float
    ) -> torch.Tensor:
        outputs = []
        sizes = [group.num_pieces * group.length for group in pieces.groups]
        for group, q, k, v in zip(
            pieces.groups, q_THD.split(sizes), k_THD.split(sizes), v_THD.split(sizes), strict=True
        ):
            q_PHLD, k_PHLD, v_PHLD = (x.unflatten(0, group).transpose(1, 2) for x in (q, k, v))
            out_PHLD = F.scaled_dot_product_attention(q_PHLD, k_PHLD, v_PHLD, dropout_p=dropout, is_causal=True)
            outputs.append(out_PHLD.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class VarlenPieces(NamedTuple):
    """Borders of pieces on the device, int32, as many for each row of a run: empty pieces fill them up."""

    cu_seqlens: torch.Tensor
    max_seqlen: int


class FlashAttention:
    """torch's variable-length FlashAttention. The longest piece is given as what the model allows, so that the same
    kernel serves a whole run."""

    name = "flash"

    def __init__(self, max_positions: int) -> None:
        self.max_positions = max_positions

    def prepare(self, cu_seqlens: Sequence[int], device: torch.device) -> VarlenPieces:
        borders = torch.tensor(cu_seqlens, dtype=torch.int32)
        if device.type == "cuda":  # pinned, so that the copy does not wait for the work before it
            borders = borders.pin_memory()
        return VarlenPieces(borders.to(device, non_blocking=True), self.max_positions)

    def attend(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, pieces: VarlenPieces, dropout: float
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        assert not dropout, "the choice of the backend promised a model without dropout"
        cu, longest = pieces.cu_seqlens, pieces.max_seqlen
        out_THD = varlen_attn(q_THD, k_THD, v_THD, cu, cu, longest, longest, window_size=(-1, 0))
        assert isinstance(out_THD, torch.Tensor)
        return out_THD


class FlexAttention:
    """FlexAttention with a mask that is made from the borders of the pieces, block by block: never T × T."""

    name = "flex"

    def prepare(self, cu_seqlens: Sequence[int], device: torch.device) -> Any:
        return piece_mask(cu_seqlens, device)

    def attend(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, pieces: Any, dropout: float
    ) -> torch.Tensor:
        assert not dropout, "the choice of the backend promised a model without dropout"
        q_1HTD, k_1HTD, v_1HTD = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_THD, v_THD))
        out_1HTD: torch.Tensor = flex_kernel(q_THD.device.type)(q_1HTD, k_1HTD, v_1HTD, block_mask=pieces)
        return out_1HTD.squeeze(0).transpose(0, 1)


@functools.cache
def flex_kernel(device_type: str) -> Any:
    """FlexAttention compiled, without which it would form all T × T scores; on a CPU, which has no backward pass of it
    and serves tests only, as it is."""
    from torch.nn.attention.flex_attention import flex_attention

    if device_type == "cpu":
        return flex_attention
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # or it would go on as it is, without a word
    return torch.compile(flex_attention, dynamic=False)


def piece_mask(cu_seqlens: Sequence[int], device: torch.device) -> Any:
    """FlexAttention's BlockMask of a row: a token sees those of its piece up to itself.

    A block of queries needs the blocks of keys from the beginning of its first token's piece to itself. Those that lie
    before it, wholly in the one piece that it is itself wholly in, need no look at single tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    borders = np.array(cu_seqlens)
    num_tokens = int(borders[-1])
    numbers_T = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
    firsts_N = np.arange(0, num_tokens, BLOCK)
    lasts_N = np.minimum(firsts_N + BLOCK, num_tokens) - 1
    is_whole_N = lasts_N - firsts_N == BLOCK - 1
    begins_N = borders[numbers_T[firsts_N]]  # of the piece of each block's first token
    keys_NN, queries_NN = np.meshgrid(np.arange(len(firsts_N)), np.arange(len(firsts_N)))
    needed_NN = (keys_NN >= (begins_N // BLOCK)[queries_NN]) & (keys_NN <= queries_NN)
    is_one_piece = numbers_T[firsts_N][keys_NN] == numbers_T[lasts_N][queries_NN]
    full_NN = needed_NN & (keys_NN < queries_NN) & is_one_piece & is_whole_N[queries_NN]
    pieces_T = torch.from_numpy(numbers_T).to(device)

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (pieces_T[query] == pieces_T[key]) & (query >= key)

    def listed(chosen_NN: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """How many blocks of keys each block of queries has, and which, those first: [1, 1, N] and [1, 1, N, N]."""
        counts_N = chosen_NN.sum(1, dtype=np.int32)
        order_NN = np.argsort(~chosen_NN, axis=1, kind="stable").astype(np.int32)
        return torch.from_numpy(counts_N)[None, None].to(device), torch.from_numpy(order_NN)[None, None].to(device)

    return BlockMask.from_kv_blocks(
        *listed(needed_NN & ~full_NN),
        *listed(full_NN),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(num_tokens, num_tokens),
    )
