"""The optimizer and its parameter groups: every parameter in exactly one, and decay on matrices only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from training_lab.config import OptimizerConfig


def parameter_groups(model: nn.Module) -> dict[str, list[str]]:
    """The names of the parameters by group: matrices (embeddings among them) decay, vectors do not."""
    groups: dict[str, list[str]] = {"decayed": [], "not_decayed": []}
    for name, parameter in model.named_parameters():
        groups["decayed" if parameter.ndim >= 2 else "not_decayed"].append(name)
    return groups


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the groups. Raises ValueError if a parameter is in none or in two of them."""
    named = dict(model.named_parameters())
    groups = parameter_groups(model)
    grouped = [name for names in groups.values() for name in names]
    if sorted(grouped) != sorted(named):
        raise ValueError("every parameter must be in exactly one optimizer group")
    decay = {"decayed": config.weight_decay, "not_decayed": 0.0}
    return torch.optim.AdamW(
        [{"params": [named[n] for n in names], "weight_decay": decay[group]} for group, names in groups.items()],
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

    torch takes `fused` from the saved groups, so a state from another device would silently change the kernel.
    """
    chosen = [group["fused"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, fused in zip(optimizer.param_groups, chosen, strict=True):
        group["fused"] = fused


def describe_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The grouping as it is recorded."""
    named = dict(model.named_parameters())
    decay = {"decayed": config.weight_decay, "not_decayed": 0.0}
    return [
        {"group": group, "optimizer": config.name, "weight_decay": decay[group], "parameters": names,
         "values": sum(named[name].numel() for name in names)}
        for group, names in parameter_groups(model).items()
    ]  # fmt: skip
