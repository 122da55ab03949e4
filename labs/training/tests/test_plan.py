"""The plan of a config: what it says is what a run then does."""

from __future__ import annotations

import json

import pytest
from tiny import TINY, resolve_tiny, run, tiny

from training_lab.data.dataset import prepare_dataset
from training_lab.engine import make_trainer
from training_lab.errors import UserError
from training_lab.flops import training_flops
from training_lab.model import count_parameters
from training_lab.optim import describe_groups
from training_lab.plan import describe_plan, plan_run
from training_lab.precision import choose_hardware
from training_lab.resolve import resolve_config


def test_corrected_is_the_model_of_the_seed_documents() -> None:
    plan = plan_run(resolve_config("corrected"))
    assert plan["parameters"] == sum(plan["parts"].values()) == 126_716_160
    assert plan["expected_initial_loss"] == pytest.approx(10.9785, abs=1e-4)
    assert plan["state_bytes"] == 16 * 126_716_160


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_parameters_groups_and_kernels_are_those_of_a_trainer(optimizer: str) -> None:
    resolved = resolve_tiny(f"optimizer.name={optimizer}")
    plan = plan_run(resolved)
    trainer = make_trainer(resolved.config, choose_hardware(resolved.config), prepare_dataset(resolved.config))
    assert plan["parameters"] == count_parameters(trainer.model)
    assert plan["optimizer_groups"] == describe_groups(trainer.model, resolved.config.optimizer)
    assert plan.items() >= trainer.kernels.describe().items()
    moments = {"adamw": 2, "muon": 1}
    expected = sum(4 * (2 + moments[group["optimizer"]]) * group["values"] for group in plan["optimizer_groups"])
    assert plan["state_bytes"] == expected
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
        real = training_flops(config.model, dataset.tokenizer.vocab_size, data.pieces.lengths).causal
        assert real <= flops["most"]
        if not padding:
            assert flops["fewest"] <= real
        if config.batch.layout == "windows":
            assert flops["fewest"] == real == flops["most"]


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
