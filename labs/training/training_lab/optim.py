"""The optimizer and its parameter groups: every parameter in exactly one, and decay on matrices only."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from training_lab.config import OptimizerConfig


class ParameterGroup(NamedTuple):
    """Parameters that are treated alike."""

    name: str
    weight_decay: float
    parameters: list[str]


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[ParameterGroup]:
    """Matrices (embeddings among them) decay, vectors do not.

    Raises ValueError if a parameter is in none of the groups, or in two of them.
    """
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]
    vectors = [name for name, parameter in model.named_parameters() if parameter.ndim == 1]
    groups = [ParameterGroup("decayed", config.weight_decay, matrices), ParameterGroup("not decayed", 0.0, vectors)]
    if sorted(matrices + vectors) != sorted(name for name, _ in model.named_parameters()):
        raise ValueError("every parameter must be in exactly one optimizer group")
    return groups


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the groups."""
    named = dict(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [named[name] for name in group.parameters], "weight_decay": group.weight_decay}
            for group in parameter_groups(model, config)
        ],
        lr=config.max_lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads moments and step counters, and keeps the kernel that this process chose.

    torch takes `fused` from the saved groups: a state of an unfused optimizer would silently change the kernel, and
    with it the last bits.
    """
    chosen = [group["fused"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, fused in zip(optimizer.param_groups, chosen, strict=True):
        group["fused"] = fused


def describe_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The grouping as it is recorded: with the optimizer, and how many values each group trains."""
    named = dict(model.named_parameters())
    return [
        {"optimizer": config.name, **group._asdict(), "values": sum(named[name].numel() for name in group.parameters)}
        for group in parameter_groups(model, config)
    ]
