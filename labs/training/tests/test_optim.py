"""AdamW and Muon: who trains what, that decay is where it should be, and Muon against a plain reference."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny, train_tiny

from training_lab.config import Config, ModelConfig
from training_lab.data.dataset import prepare_dataset
from training_lab.engine import train_update
from training_lab.model import Decoder, initialise
from training_lab.optim import describe_groups, make_optimizers, parameter_groups, set_rates
from training_lab.precision import choose_hardware
from training_lab.schedule import learning_rate, muon_momentum
from training_lab.trainer import Trainer, make_trainer

OPTIMIZERS = ("adamw", "muon")
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def make_model() -> Decoder:
    model = Decoder(ModelConfig(num_layers=2, d_model=32, num_heads=4, max_positions=16), 101)
    initialise(model, 5)
    return model


def settings(name: str, *more: str) -> Config:
    return tiny(f"optimizer.name={name}", *more)


def trainer_of(config: Config) -> Trainer:
    return make_trainer(config, choose_hardware(config), prepare_dataset(config))


# --- groups ---


@every_optimizer
def test_every_parameter_is_in_exactly_one_group_of_exactly_one_optimizer(name: str) -> None:
    model = make_model()
    config = settings(name).optimizer
    names = [parameter for group in parameter_groups(model, config) for parameter in group.parameters]
    assert sorted(names) == sorted(parameter for parameter, _ in model.named_parameters())
    optimizers = make_optimizers(model, config)
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(trained) == len({id(p) for p in trained}) == len(names)


def test_muon_trains_the_matrices_of_the_blocks_and_adamw_embeddings_head_and_vectors() -> None:
    model = make_model()
    groups = {group.name: group for group in parameter_groups(model, settings("muon").optimizer)}
    hidden = {f"blocks.{n}.{part}.weight" for n in (0, 1) for part in
              ("attention.qkv", "attention.project", "mlp.expand", "mlp.project")}  # fmt: skip
    assert set(groups["hidden matrices"].parameters) == hidden
    assert groups["embeddings"].parameters == ["token_embedding.weight", "position_embedding.weight"]
    assert all(model.get_parameter(name).ndim == 1 for name in groups["vectors"].parameters)
    assert [group.optimizer for group in groups.values()] == ["muon", "adamw", "adamw"]
    values = sum(group["values"] for group in describe_groups(model, settings("muon").optimizer))
    assert values == sum(parameter.numel() for parameter in model.parameters())


@every_optimizer
def test_weight_decay_shrinks_matrices_and_nothing_else(name: str) -> None:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    config = settings(name, "optimizer.weight_decay=0.5", "optimizer.max_lr=0.1", "optimizer.muon_lr=0.2")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers = make_optimizers(model, config.optimizer)
    set_rates(optimizers, 0.1, 0.95)
    for optimizer in optimizers:
        optimizer.step()
    for parameter_name, parameter in model.named_parameters():
        is_hidden = name == "muon" and parameter_name.startswith("blocks.")
        expected = 1 - (0.2 if is_hidden else 0.1) * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter, torch.full_like(parameter, expected), msg=parameter_name)


# --- Muon ---

SHAPES = [(32, 32), (96, 32), (32, 128), (8, 64), (1, 16), (16, 1)]
every_shape = pytest.mark.parametrize("shape", SHAPES)


def muon(parameter: torch.nn.Parameter, scale: str = "spectral", momentum: float = 0.95) -> torch.optim.Optimizer:
    """Muon on one matrix, with learning rate 1 and no decay, as the lab makes it."""
    holder = torch.nn.Module()
    holder.blocks = torch.nn.Module()
    holder.blocks.weight = parameter
    holder.vector = torch.nn.Parameter(torch.zeros(2))
    holder.other = torch.nn.Parameter(torch.zeros(2, 2))
    config = settings(
        "muon", "optimizer.muon_lr=1.0", "optimizer.max_lr=1.0", "optimizer.weight_decay=0",
        f"optimizer.muon_scale={scale}", f"optimizer.muon_momentum={momentum}",
    ).optimizer  # fmt: skip
    return make_optimizers(holder, config)[0]


def stepped(shape: tuple[int, int], gradients: list[torch.Tensor], scale: str = "spectral") -> torch.Tensor:
    """What one step after these gradients takes from a matrix of zeros, the last step alone."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = muon(parameter, scale)
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient
        optimizer.step()
    return before - parameter.detach()


def reference_step(gradients: list[torch.Tensor], momentum: float = 0.95) -> torch.Tensor:
    """Muon by its paper: Nesterov momentum, then the polar factor by five quintic Newton–Schulz iterations in BF16."""
    average = torch.zeros_like(gradients[0])
    for gradient in gradients:
        average = momentum * average + (1 - momentum) * gradient
    update = (1 - momentum) * gradients[-1] + momentum * average
    x = update.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # rounded once each
    step: torch.Tensor = (x.T if is_tall else x).float()
    return step


def gradients_of(shape: tuple[int, int], number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator) for _ in range(number)]


@every_shape
@pytest.mark.parametrize("number", [1, 4])
def test_muon_equals_a_plain_reference(shape: tuple[int, int], number: int) -> None:
    gradients = gradients_of(shape, number)
    expected = math.sqrt(max(1.0, shape[0] / shape[1])) * reference_step(gradients)
    error = (stepped(shape, gradients) - expected).norm() / expected.norm()
    assert error.item() < 0.005


@every_shape
def test_muon_steps_along_a_nearly_orthogonal_matrix(shape: tuple[int, int]) -> None:
    step = stepped(shape, gradients_of(shape, 2)) / math.sqrt(max(1.0, shape[0] / shape[1]))
    singular_values = torch.linalg.svdvals(step)
    assert singular_values.min() > 0.4
    assert singular_values.max() < 1.4


@every_shape
def test_the_rms_scale_makes_a_step_as_large_as_one_of_adamw(shape: tuple[int, int]) -> None:
    gradients = gradients_of(shape, 2)
    ratio = 0.2 * math.sqrt(max(shape)) / math.sqrt(max(1.0, shape[0] / shape[1]))
    torch.testing.assert_close(
        stepped(shape, gradients, "rms"), ratio * stepped(shape, gradients), rtol=1e-5, atol=1e-6
    )


@every_shape
def test_zero_and_huge_and_tiny_gradients_give_finite_steps(shape: tuple[int, int]) -> None:
    assert (stepped(shape, [torch.zeros(shape)]) == 0).all()
    for size in (1e-30, 1e30):
        assert stepped(shape, [torch.full(shape, size)]).isfinite().all()


def test_the_learning_rates_of_muon_and_adamw_keep_their_ratio_and_momentum_warms_up() -> None:
    config = settings("muon", "train.updates=20", "schedule.warmup_updates=4", "optimizer.muon_momentum_warmup=10",
                      "optimizer.max_lr=1e-3", "optimizer.muon_lr=0.02")  # fmt: skip
    optimizers = make_optimizers(make_model(), config.optimizer)
    for update in range(1, 21):
        set_rates(optimizers, learning_rate(config, update), muon_momentum(config, update))
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        assert rates == pytest.approx([20 * learning_rate(config, update), *[learning_rate(config, update)] * 2])
        momentum = optimizers[0].param_groups[0]["momentum"]
        assert momentum == pytest.approx(min(0.95, 0.85 + 0.01 * (update - 1)))


def test_without_a_warm_up_the_momentum_is_the_configured_one_from_the_first_update() -> None:
    assert muon_momentum(settings("muon", "optimizer.muon_momentum=0.9"), 1) == 0.9
    low = settings("muon", "optimizer.muon_momentum=0.5", "optimizer.muon_momentum_warmup=10")
    assert {muon_momentum(low, update) for update in (1, 5, 11, 100)} == {0.5}


# --- in a run ---


def test_muon_learns_faster_than_adamw_on_the_tiny_config() -> None:
    def last_loss(name: str) -> float:
        trainer = trainer_of(settings(name, "train.updates=30", "model.dropout=0"))
        losses = [float(train_update(trainer)["loss"]) for _ in range(30)]
        assert losses[-1] < losses[0] - 0.2
        return losses[-1]

    assert last_loss("muon") < last_loss("adamw")


def test_a_run_with_muon_that_is_stopped_and_continued_equals_one_that_never_stopped() -> None:
    chosen = ["--set", "optimizer.name=muon", "--set", "optimizer.muon_momentum_warmup=5"]
    whole = train_tiny(*chosen, "--runs", "whole")
    train_tiny(*chosen, "--runs", "parts", "--stop-after", "3")
    parts = train_tiny(*chosen, "--runs", "parts")
    assert parts[-1]["weights_sha256"] == whole[-1]["weights_sha256"]


def test_an_overflow_in_the_gradients_of_one_optimizer_skips_the_step_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(settings("muon", "model.dropout=0"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monkeypatch.setattr(trainer, "scaler", scaler)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    hidden = trainer.model.get_parameter("blocks.0.mlp.expand.weight")

    def overflow(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.fill_(math.inf)

    handle = hidden.register_post_accumulate_grad_hook(overflow)
    row = train_update(trainer)
    handle.remove()
    assert row["grad_norm"] is None
    assert scaler.get_scale() == 512.0
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
