"""The command `plan`: what a config will train, with which kernels, how many operations, how much memory, how long and
for how much money, before anything runs. It reads no text, and allocates no weights."""

from __future__ import annotations

from typing import Any

import torch

from training_lab.config import Config
from training_lab.console import duration
from training_lab.data.tokenizers import make_tokenizer
from training_lab.errors import UserError
from training_lab.flops import flops_of_pieces, training_flops
from training_lab.kernels import Kernels, choose_kernels
from training_lab.model import Decoder, count_parameters, expected_initial_loss
from training_lab.optim import describe_groups
from training_lab.precision import Hardware, choose_hardware, plan_hardware
from training_lab.prediction import enough_micro_batches, memory_there, predict_memory
from training_lab.resolve import Resolved
from training_lab.utilisation import peak_of

REFERENCE_MFU = 0.1868
"""What the run of `corrected` reached on an H100 SXM on 4 October 2026, attention counted causally."""


def plan_run(
    resolved: Resolved, gpu: str | None = None, mfu: float | None = None, price: float | None = None
) -> dict[str, Any]:
    """The plan as it is printed with --json: for the device that is here, or for the named GPU.

    `mfu` is the share of the GPU's peak that is taken to be reached, `price` US dollars for an hour of it. Raises
    UserError for what cannot be known or run there.
    """
    config = resolved.config
    if config.data.tokenizer == "char":
        raise UserError(
            "data.tokenizer: the vocabulary of char is that of the text, which a plan does not read; "
            "`data prepare` prints it"
        )
    vocab_size = make_tokenizer(config.data.tokenizer).vocab_size
    hardware = plan_hardware(config, gpu) if gpu else choose_hardware(config)
    kernels = choose_kernels(config, hardware)
    with torch.device("meta"):
        model = Decoder(config.model, vocab_size)
    flops = flops_range(config, vocab_size)
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
        "optimizer_groups": describe_groups(model, config.optimizer),
        "updates": config.train.updates,
        "tokens_per_update": config.batch.update_tokens,
        "flops_per_update": flops,
        "memory": describe_memory(config, vocab_size, hardware, kernels),
        "time": time_and_cost(config, flops, hardware, mfu, price),
        "warnings": list(resolved.warnings()),
        **hardware.describe(),
        **kernels.describe(),
    }


def flops_range(config: Config, vocab_size: int) -> dict[str, int]:
    """The fewest and most operations of an update, attention counted causally: documents of one token, and of as many
    as a row takes. They are one number where every piece is a window."""
    tokens = config.batch.update_tokens
    longest = {"windows": config.batch.block_size, "packs": config.batch.pack_length}.get(
        config.batch.layout, min(config.model.max_positions, tokens)
    )
    rows, rest = divmod(tokens, longest)
    most = flops_of_pieces(config.model, vocab_size, [longest] * rows + [rest] * bool(rest)).causal
    is_exact = config.batch.layout == "windows"
    fewest = most if is_exact else training_flops(config.model, vocab_size, tokens, tokens).causal
    return {"fewest": fewest, "most": most}


def describe_memory(config: Config, vocab_size: int, hardware: Hardware, kernels: Kernels) -> dict[str, Any]:
    """The memory of an update by what it is for; what is there, whether it fits, and what to change if not: None where
    that is not known."""
    predicted, there = predict_memory(config, vocab_size, hardware, kernels), memory_there(hardware)
    fits = None if there is None else predicted.total_bytes <= there
    enough = enough_micro_batches(config, vocab_size, hardware, kernels, there) if there and not fits else None
    return {**predicted.describe(), "there_bytes": there, "fits": fits, "micro_batches_to_fit": enough}


def time_and_cost(
    config: Config, flops: dict[str, int], hardware: Hardware, mfu: float | None, price: float | None
) -> dict[str, Any] | None:
    """Seconds and dollars of the updates alone at a share of the peak; None on a device without a known peak."""
    peak = peak_of(str(hardware.device), hardware.compute, hardware.gpu, config.measure)
    if not peak.tflops:
        if mfu is not None or price is not None:
            raise UserError(f"--mfu, --price: no time can be told: {peak.reason}; name a GPU with --gpu")
        return None
    share = REFERENCE_MFU if mfu is None else mfu
    seconds = {name: number / (peak.tflops * 1e12 * share) for name, number in flops.items()}
    total = {name: number * config.train.updates for name, number in seconds.items()}
    return {
        "peak_tflops": peak.tflops,
        "peak_source": peak.source,
        "mfu": share,
        "mfu_source": "that of the reference run on an H100 SXM" if mfu is None else "given with --mfu",
        "seconds_per_update": seconds,
        "seconds": total,
        "usd_per_hour": price,
        "usd": {name: number / 3600 * price for name, number in total.items()} if price is not None else None,
    }


def describe_plan(plan: dict[str, Any]) -> list[str]:
    """The plan as lines for people."""
    parts = ", ".join(f"{number:,} {name}" for name, number in plan["parts"].items())
    lines = [f"Plan of {plan['config']}", *(f"warning: {message}" for message in plan["warnings"])]
    lines += [
        f"  model       {plan['parameters']:,} parameters: {parts}",
        f"  vocabulary  {plan['vocab_size']:,}; expected loss before training {plan['expected_initial_loss']:.4f}",
        f"  update      {plan['tokens_per_update']:,} token slots, {between(plan['flops_per_update'], 1e12)} TFLOP"
        f"{by_lengths(plan)}; {plan['updates']:,} of them",
        *memory_lines(plan["memory"]),
        *time_lines(plan),
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


def memory_lines(memory: dict[str, Any]) -> list[str]:
    """Memory by what it is for, and whether it is there."""
    parts = ", ".join(f"{number / 2**30:.2f} {name}" for name, number in memory["parts"].items())
    lines = [
        f"  memory      {memory['total_bytes'] / 2**30:.1f} GiB at the most ({memory['of'].partition(';')[0]}): {parts}"
    ]
    if memory["fits"] is None:
        return lines
    enough = memory["micro_batches_to_fit"]
    advice = f"; with batch.micro_batches={enough} it does (the update stays the same)" if enough else ""
    verdict = "fits into" if memory["fits"] else "does not fit into"
    return [*lines, f"              {verdict} the {memory['there_bytes'] / 2**30:.1f} GiB that are there{advice}"]


def time_lines(plan: dict[str, Any]) -> list[str]:
    """Time and cost, with what they rest on."""
    time = plan["time"]
    if time is None:
        return []
    total = " to ".join(dict.fromkeys(duration(time["seconds"][key]) for key in ("fewest", "most")))
    line = (
        f"  time        {between(time['seconds_per_update'], 1)} s an update, {total} for all of them, at MFU "
        f"{time['mfu']:.1%} ({time['mfu_source']}) of {time['peak_tflops']:g} TFLOP/s"
    )
    if time["usd"] is None:
        return [line, "  cost        give --price USD_PER_HOUR"]
    cost = " to ".join(dict.fromkeys(f"{time['usd'][key]:,.2f}" for key in ("fewest", "most")))
    return [line, f"  cost        {cost} USD for the updates, at {time['usd_per_hour']:g} USD an hour"]


def between(bounds: dict[str, float], unit: float) -> str:
    """The fewest and the most in a unit, as one number where they are the same."""
    fewest, most = (f"{bounds[key] / unit:,.3g}" for key in ("fewest", "most"))
    return most if fewest == most else f"{fewest} to {most}"


def by_lengths(plan: dict[str, Any]) -> str:
    """Why there are two numbers, where there are."""
    flops = plan["flops_per_update"]
    return "" if flops["fewest"] == flops["most"] else " (by the documents' lengths)"
