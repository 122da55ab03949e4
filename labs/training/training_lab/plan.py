"""The command `plan`: what a config will train, in which groups, with which kernels and how many operations, before
anything runs. It reads no text, and allocates no weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from training_lab.config import Config
from training_lab.data.tokenizers import make_tokenizer
from training_lab.errors import UserError
from training_lab.flops import training_flops
from training_lab.kernels import choose_kernels
from training_lab.model import Decoder, count_parameters, expected_initial_loss
from training_lab.optim import describe_groups
from training_lab.precision import choose_hardware
from training_lab.resolve import Resolved

STATE_BYTES = {"adamw": 16, "muon": 12}
"""Of each trained value, in FP32: itself, its gradient, and the optimizer's one or two moments."""


def plan_run(resolved: Resolved) -> dict[str, Any]:
    """The plan as it is printed with --json. Raises UserError for what cannot be known or run here."""
    config = resolved.config
    if config.data.tokenizer == "char":
        raise UserError(
            "data.tokenizer: the vocabulary of char is that of the text, which a plan does not read; "
            "`data prepare` prints it"
        )
    vocab_size = make_tokenizer(config.data.tokenizer).vocab_size
    hardware = choose_hardware(config)
    with torch.device("meta"):
        model = Decoder(config.model, vocab_size)
    groups = describe_groups(model, config.optimizer)
    return {
        "config": resolved.name,
        "parameters": count_parameters(model),
        "parts": {
            "token embedding, which is the head": model.token_embedding.weight.numel(),
            "positions": model.position_embedding.weight.numel(),
            "blocks": count_parameters(model.blocks),
            "final norm": count_parameters(model.final_norm),
        },
        "vocab_size": vocab_size,
        "expected_initial_loss": expected_initial_loss(vocab_size, config.model.d_model),
        "optimizer_groups": groups,
        "state_bytes": sum(STATE_BYTES[group["optimizer"]] * group["values"] for group in groups),
        "updates": config.train.updates,
        "tokens_per_update": config.batch.update_tokens,
        "flops_per_update": flops_range(config, vocab_size),
        "warnings": list(resolved.warnings()),
        **hardware.describe(),
        **choose_kernels(config, hardware).describe(),
    }


def flops_range(config: Config, vocab_size: int) -> dict[str, int]:
    """The fewest and most operations of an update, attention counted causally: documents of one token, and of as many
    as a row takes. They are one number where every piece is a window."""
    tokens = config.batch.update_tokens
    longest = {"windows": config.batch.block_size, "packs": config.batch.pack_length}.get(
        config.batch.layout, min(config.model.max_positions, tokens)
    )
    rows, rest = divmod(tokens, longest)
    whole = np.array([longest] * rows + [rest] * bool(rest))
    most = training_flops(config.model, vocab_size, whole).causal
    is_exact = config.batch.layout == "windows"
    fewest = most if is_exact else training_flops(config.model, vocab_size, np.ones(tokens, dtype=np.int64)).causal
    return {"fewest": fewest, "most": most}


def describe_plan(plan: dict[str, Any]) -> list[str]:
    """The plan as lines for people."""
    fewest, most = (plan["flops_per_update"][key] / 1e12 for key in ("fewest", "most"))
    between = f"{most:,.3g}" if fewest == most else f"{fewest:,.3g} to {most:,.3g} (by the documents' lengths)"
    parts = ", ".join(f"{number:,} {name}" for name, number in plan["parts"].items())
    lines = [f"Plan of {plan['config']}", *(f"warning: {message}" for message in plan["warnings"])]
    lines += [
        f"  model       {plan['parameters']:,} parameters: {parts}",
        f"  vocabulary  {plan['vocab_size']:,}; expected loss before training {plan['expected_initial_loss']:.4f}",
        f"  states      {plan['state_bytes'] / 2**30:,.2f} GiB of weights, gradients and moments in FP32",
        f"  update      {plan['tokens_per_update']:,} token slots, {between} TFLOP; {plan['updates']:,} of them",
        f"  device      {plan.get('gpu', plan['device'])} ({plan['device_reason']})",
        f"  precision   {plan['compute']} ({plan['compute_reason']})",
        f"  attention   {plan['attention']} ({plan['attention_reason']})",
        f"  head, loss  {plan['loss']} ({plan['loss_reason']})",
        f"  compile     {'on' if plan['compile'] else 'off'} ({plan['compile_reason']})",
        "",
        f"  {'optimizer group':<16}  {'by':<5}  {'decay':>5}  {'lr ×':>6}  {'values':>13}  parameters",
    ]
    for group in plan["optimizer_groups"]:
        names = group["parameters"]
        shown = ", ".join(names[:2]) + (f", … {len(names)} in all" if len(names) > 2 else "")
        lines.append(
            f"  {group['name']:<16}  {group['optimizer']:<5}  {group['weight_decay']:>5g}  {group['lr_ratio']:>6.3g}  "
            f"{group['values']:>13,}  {shown}"
        )
    return lines
