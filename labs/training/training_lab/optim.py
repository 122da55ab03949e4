"""The optimizers and their parameter groups: every parameter in exactly one, and decay on matrices only.

AdamW trains everything, or, with `optimizer.name` muon, what is no hidden matrix: embeddings (the tied head among them)
and vectors. Muon (torch's own) takes the momentum of a hidden matrix and steps along the nearest orthogonal matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from training_lab.config import OptimizerConfig
from training_lab.parallel import shared_like


class ParameterGroup(NamedTuple):
    """Parameters that are treated alike."""

    name: str
    optimizer: str
    """`adamw` or `muon`."""
    weight_decay: float
    lr_ratio: float
    """Their learning rate as a multiple of the schedule's."""
    parameters: list[str]


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[ParameterGroup]:
    """Matrices (embeddings among them) decay, vectors do not. Hidden matrices are those of the blocks.

    Raises ValueError if a parameter is in none of the groups, or in two of them.
    """
    names = {name: parameter.ndim for name, parameter in model.named_parameters()}
    hidden = [name for name, ndim in names.items() if ndim == 2 and name.startswith("blocks.")]
    others = [name for name, ndim in names.items() if ndim >= 2 and name not in hidden]
    vectors = [name for name, ndim in names.items() if ndim == 1]
    decay = config.weight_decay
    if config.name == "muon":
        groups = [
            ParameterGroup("hidden matrices", "muon", decay, config.muon_lr / config.max_lr, hidden),
            ParameterGroup("embeddings", "adamw", decay, 1.0, others),
        ]
    else:
        groups = [ParameterGroup("matrices", "adamw", decay, 1.0, [n for n, ndim in names.items() if ndim >= 2])]
    groups.append(ParameterGroup("vectors", "adamw", 0.0, 1.0, vectors))
    if sorted(name for group in groups for name in group.parameters) != sorted(names):
        raise ValueError("every parameter must be in exactly one optimizer group")
    return groups


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon before it where the config says so, each over its groups."""
    named = dict(model.named_parameters())
    groups: dict[str, list[dict[str, Any]]] = {}
    for group in parameter_groups(model, config):
        parameters = [named[name] for name in group.parameters]
        one = {"params": parameters, "weight_decay": group.weight_decay, "lr_ratio": group.lr_ratio}
        groups.setdefault(group.optimizer, []).append(one)
    made: list[torch.optim.Optimizer] = []
    if "muon" in groups:
        adjust = "original" if config.muon_scale == "spectral" else "match_rms_adamw"
        made.append(
            torch.optim.Muon(
                groups["muon"],
                lr=config.muon_lr,
                momentum=config.muon_momentum,
                nesterov=True,
                ns_steps=config.muon_steps,
                adjust_lr_fn=adjust,
            )
        )
    betas = (config.beta1, config.beta2)
    made.append(torch.optim.AdamW(groups["adamw"], lr=config.max_lr, betas=betas, eps=config.eps, fused=True))
    return made


def set_rates(optimizers: list[torch.optim.Optimizer], lr: float, muon_momentum: float) -> None:
    """Sets the learning rate of every group, and Muon's momentum, for the next step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_ratio"]
            if "momentum" in group:
                group["momentum"] = muon_momentum


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads moments and step counters, and keeps the kernel that this process chose.

    torch takes `fused` from the saved groups: a state of an unfused optimizer would silently change the kernel, and
    with it the last bits.
    """
    chosen = [group.get("fused") for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {name: shared_like(parameters[number], value) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": moments})
    for group, fused in zip(optimizer.param_groups, chosen, strict=True):
        if fused is not None:
            group["fused"] = fused


def describe_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The grouping as it is recorded, with how many values each group trains."""
    named = dict(model.named_parameters())
    return [
        {**group._asdict(), "values": sum(named[name].numel() for name in group.parameters)}
        for group in parameter_groups(model, config)
    ]
