"""The decoder: GPT-2's shape, with linear layers without bias.

Pre-norm blocks, learned positions, LayerNorm with bias, a GELU MLP of four times the width, and a head that is the
token embedding itself. It reads flat rows of pieces and returns hidden states; the loss applies the head, so that
nothing here ever holds the logits of a whole row.

Shapes: T tokens in a row, d the width (`d_model`), V the vocabulary, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from training_lab.attention import Backends, make_backends
from training_lab.config import ModelConfig
from training_lab.randomness import generator

INIT_STD = 0.02


class Attention(nn.Module):
    """Multi-head causal self-attention within pieces."""

    def __init__(self, config: ModelConfig, backends: Backends) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.backends = config.num_heads, config.dropout, backends
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.project = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_Td: torch.Tensor, pieces: Any) -> torch.Tensor:
        qkv = self.qkv(x_Td).unflatten(-1, (3, self.num_heads, -1))
        q_THD, k_THD, v_THD = qkv.unbind(dim=1)
        dropout = self.dropout if self.training else 0.0
        backend = self.backends.training if self.training else self.backends.evaluation
        mixed: torch.Tensor = self.project(backend.attend(q_THD, k_THD, v_THD, pieces, dropout).flatten(1))
        return mixed


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.d_model, 4 * config.d_model, bias=False)
        self.project = nn.Linear(4 * config.d_model, config.d_model, bias=False)

    def forward(self, x_Td: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.project(F.gelu(self.expand(x_Td)))
        return projected


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, backends: Backends) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config, backends)
        self.mlp_norm = nn.LayerNorm(config.d_model)
        self.mlp = Mlp(config)
        self.dropout = config.dropout

    def forward(self, x_Td: torch.Tensor, pieces: Any) -> torch.Tensor:
        x_Td = x_Td + F.dropout(self.attention(self.attention_norm(x_Td), pieces), self.dropout, self.training)
        return x_Td + F.dropout(self.mlp(self.mlp_norm(x_Td)), self.dropout, self.training)


class Decoder(nn.Module):
    """The language model, from token ids to the hidden states that its head turns into logits."""

    def __init__(self, config: ModelConfig, vocab_size: int, attention: str = "sdpa") -> None:
        super().__init__()
        self.backends = make_backends(attention, config.max_positions)
        self.token_embedding = nn.Embedding(vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.max_positions, config.d_model)
        self.blocks = nn.ModuleList(Block(config, self.backends) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.d_model)
        self.dropout = config.dropout
        self.compiled_body: Callable[..., torch.Tensor] | None = None

    @property
    def head_Vd(self) -> torch.Tensor:
        """The matrix from hidden states to logits: the token embedding."""
        return self.token_embedding.weight

    def forward(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, cu_seqlens: Sequence[int]) -> torch.Tensor:
        """Hidden states after the final norm, [T, d]. `cu_seqlens` says where each piece begins, and the end."""
        body: Callable[..., torch.Tensor] = self.body
        backend = self.backends.training if self.training else self.backends.evaluation
        if self.training and self.compiled_body is not None:  # not in evaluation, whose passes have many shapes
            body = self.compiled_body
        return body(tokens_T, positions_T, backend.prepare(cu_seqlens, tokens_T.device))

    def body(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, pieces: Any) -> torch.Tensor:
        """The same, with the pieces as the attention backend wants them: what is compiled."""
        x_Td = self.token_embedding(tokens_T) + self.position_embedding(positions_T)
        x_Td = F.dropout(x_Td, self.dropout, self.training)
        for block in self.blocks:
            x_Td = block(x_Td, pieces)
        normed: torch.Tensor = self.final_norm(x_Td)
        return normed


def initialise(model: Decoder, seed: int) -> None:
    """Draws the initial weights: normal(0, 0.02), the projections into the residual stream divided by √(2·layers)
    (GPT-2's rule), norms one and zero. Raises ValueError for a parameter that no rule covers.

    Each parameter has a random stream of its own, named after it: changing one part of the model leaves the initial
    weights of the others as they were. Drawn on the CPU, so that every device starts from the same.
    """
    residual_std = INIT_STD / math.sqrt(2 * len(model.blocks))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("norm.bias"):
                parameter.zero_()
            elif parameter.ndim == 2:
                std = residual_std if name.endswith("project.weight") else INIT_STD
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(drawn.normal_(0.0, std, generator=generator(seed, "init", name)))
            else:
                raise ValueError(f"no initialisation rule for parameter {name} of shape {tuple(parameter.shape)}")


def count_parameters(model: nn.Module) -> int:
    """The number of trained values; the tied head is the embedding, and counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


PLAUSIBLE_DIFFERENCE = 0.5


def is_plausible(measured: float, expected: float) -> bool:
    """Whether a loss before training is what it should be. If not, the model, its initialisation or the labels are
    likely wrong: labels that are not shifted, for one, give a loss far below."""
    return abs(measured - expected) <= PLAUSIBLE_DIFFERENCE


def expected_initial_loss(vocab_size: int, d_model: int) -> float:
    """The mean cross-entropy before training, in nats: ln V + d·σ²/2.

    After the final norm a hidden state has squared length d; its logits under a head of normal(0, σ) are then
    normal with variance d·σ², and the mean of log Σ exp is ln V plus half of that.
    """
    return math.log(vocab_size) + d_model * INIT_STD**2 / 2
