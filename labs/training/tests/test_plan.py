"""The plan of a config: what it says is what a run then does."""

from __future__ import annotations

import json

import pytest
from tiny import TINY, resolve_tiny, run, tiny

from training_lab.data.dataset import prepare_dataset
from training_lab.errors import UserError
from training_lab.flops import flops_of_pieces
from training_lab.model import count_parameters
from training_lab.optim import describe_groups
from training_lab.plan import describe_plan, plan_run
from training_lab.precision import choose_hardware
from training_lab.resolve import resolve_config
from training_lab.trainer import make_trainer


def test_corrected_is_the_model_of_the_seed_documents() -> None:
    plan = plan_run(resolve_config("corrected"))
    assert plan["parameters"] == sum(plan["parts"].values()) == 126_716_160
    assert plan["expected_initial_loss"] == pytest.approx(10.9785, abs=1e-4)
    states = ("weights", "gradients", "optimizer states")
    assert sum(plan["memory"]["parts"][name] for name in states) == 16 * 126_716_160


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_parameters_groups_and_kernels_are_those_of_a_trainer(optimizer: str) -> None:
    resolved = resolve_tiny(f"optimizer.name={optimizer}")
    plan = plan_run(resolved)
    trainer = make_trainer(resolved.config, choose_hardware(resolved.config), prepare_dataset(resolved.config))
    assert plan["parameters"] == count_parameters(trainer.model)
    assert plan["optimizer_groups"] == describe_groups(trainer.model, resolved.config.optimizer)
    assert plan.items() >= trainer.kernels.describe().items()
    moments = {"adamw": 2, "muon": 1}
    expected = sum(4 * moments[group["optimizer"]] * group["values"] for group in plan["optimizer_groups"])
    assert plan["memory"]["parts"]["optimizer states"] == expected
    assert sum(group["values"] for group in plan["optimizer_groups"]) == plan["parameters"]


@pytest.mark.parametrize(
    "overrides",
    [(), ("batch.layout=packs",), ("batch.layout=windows", "batch.block_size=64", "batch.batch_size=3")],
    ids=["token_budget", "packs", "windows"],
)
def test_an_update_costs_between_the_fewest_and_the_most_operations(overrides: tuple[str, ...]) -> None:
    config = tiny(*overrides)
    flops = plan_run(resolve_tiny(*overrides))["flops_per_update"]
    dataset = prepare_dataset(config)
    for update in (1, 2, 3):
        data = dataset.update_data(update)
        padding = config.batch.update_tokens - int(data.pieces.lengths.sum())
        real = flops_of_pieces(config.model, dataset.tokenizer.vocab_size, data.pieces.lengths).causal
        assert real <= flops["most"]
        if not padding:
            assert flops["fewest"] <= real
        if config.batch.layout == "windows":
            assert flops["fewest"] == real == flops["most"]


H100 = "NVIDIA H100 80GB HBM3"


def test_corrected_on_an_h100_takes_the_memory_that_the_reference_run_took() -> None:
    """47.88 GiB were allocated at the most, with 35 packs in one pass, flash attention and Liger's loss."""
    plan = plan_run(resolve_config("corrected"), H100)
    assert plan["memory"]["total_bytes"] / 2**30 == pytest.approx(47.9, rel=0.03)
    assert plan["memory"]["fits"] is True
    assert (plan["attention"], plan["loss"], plan["compute"], plan["gpu"]) == ("flash", "liger", "bf16", H100)


def test_time_and_cost_are_operations_over_a_share_of_the_peak() -> None:
    plan = plan_run(resolve_config("corrected"), H100, mfu=0.5, price=3.6)
    time, flops = plan["time"], plan["flops_per_update"]
    for bound in ("fewest", "most"):
        assert time["seconds_per_update"][bound] == pytest.approx(flops[bound] / (0.5 * 989e12))
        assert time["usd"][bound] == pytest.approx(100 * time["seconds_per_update"][bound] / 1000)
    lines = "\n".join(describe_plan(plan))
    for shown in ("126,716,160 parameters", "TFLOP", "GiB", "at MFU 50.0%", "at 3.6 USD an hour", "989 TFLOP/s"):
        assert shown in lines


def test_what_does_not_fit_is_said_with_the_micro_batches_that_do() -> None:
    plan = plan_run(resolve_config("corrected"), "NVIDIA GeForce RTX 4090")
    enough = plan["memory"]["micro_batches_to_fit"]
    assert plan["memory"]["fits"] is False
    assert f"with batch.micro_batches={enough} it does" in "\n".join(describe_plan(plan))
    smaller = plan_run(resolve_config("corrected", [f"batch.micro_batches={enough}"]), "NVIDIA GeForce RTX 4090")
    assert smaller["memory"]["fits"] is True
    one_fewer = max(number for number in (1, 5, 7, 35) if number < enough)
    fewer = plan_run(resolve_config("corrected", [f"batch.micro_batches={one_fewer}"]), "NVIDIA GeForce RTX 4090")
    assert fewer["memory"]["fits"] is False


def test_a_gpu_that_is_not_known_is_refused_with_the_nearest_and_a_price_needs_a_gpu() -> None:
    for words, message in (
        (
            ["--gpu", "H100"],
            "error: --gpu H100: not among those that the lab knows; did you mean NVIDIA H100 80GB HBM3",
        ),
        (["--gpu", H100, "--mfu", "1.5"], "error: --mfu 1.5: must be above 0 and at most 1"),
        (["--gpu", H100, "--price", "-1"], "error: --price -1.0: must be 0 or more"),
    ):
        done = run("plan", "--config", str(TINY), *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(message)
    with pytest.raises(UserError, match="no time can be told: no peak rate is known of the device cpu"):
        plan_run(resolve_config(str(TINY), ["train.device=cpu"]), price=2.0)


def test_the_vocabulary_of_a_text_that_is_not_read_is_not_guessed() -> None:
    with pytest.raises(UserError, match=r"data\.tokenizer: the vocabulary of char is that of the text"):
        plan_run(resolve_tiny("data.tokenizer=char"))


def test_every_group_and_choice_is_shown() -> None:
    lines = "\n".join(describe_plan(plan_run(resolve_config("baseline", ["optimizer.name=muon"]))))
    for shown in ("hidden matrices", "embeddings", "vectors", "sdpa (", "chunked (", "compile", "4,856,320"):
        assert shown in lines


def test_the_command_prints_lines_or_json_and_refuses_what_cannot_run_here() -> None:
    shown = run("plan", "--config", str(TINY))
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (0, "Plan of tiny")
    assert json.loads(run("plan", "--config", str(TINY), "--json").stdout)["config"] == "tiny"
    refused = run("plan", "--config", str(TINY), "--set", "kernels.attention=flash")
    if refused.returncode:  # not on a CUDA machine
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: kernels.attention: flash cannot be used on cpu")
        assert refused.stderr.count("\n") == 1
