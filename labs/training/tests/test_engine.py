"""One update, and many: exact, independent of what observes it and of how it is split, and right by a reference."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny

from training_lab import engine
from training_lab.checkpoint import weights_sha256
from training_lab.config import Config
from training_lab.data import batches
from training_lab.data.batches import IGNORED, Batch, UpdateData, make_batch
from training_lab.data.dataset import prepare_dataset
from training_lab.data.layout import Pieces
from training_lab.engine import NonFiniteError, train_update
from training_lab.errors import LabError
from training_lab.evaluate import evaluate
from training_lab.loss import ChunkedLoss
from training_lab.memory_peaks import PeakMemory
from training_lab.precision import choose_hardware
from training_lab.randomness import global_streams, restore_global_streams
from training_lab.record import RunFolder
from training_lab.sample import draw, sample_tokens
from training_lab.stopping import StopRequest
from training_lab.tracking import MetricsWriter, Recorder, Row
from training_lab.trainer import Trainer, make_trainer
from training_lab.wall_clock import WallClock


def trainer_of(config: Config) -> Trainer:
    return make_trainer(config, choose_hardware(config), prepare_dataset(config))


def without_time(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "seconds"}


def gradients(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]).double()


def test_two_runs_of_one_config_are_the_same_bits_whatever_the_process_did_before() -> None:
    first = trainer_of(tiny())
    rows = [without_time(train_update(first)) for _ in range(5)]
    torch.rand(1000), np.random.rand(7)  # noqa: NPY002
    second = trainer_of(tiny())
    assert [without_time(train_update(second)) for _ in range(5)] == rows
    assert weights_sha256(first.model) == weights_sha256(second.model)


def test_dropout_is_on_so_that_the_tests_of_exactness_test_it_too() -> None:
    with_dropout, without = trainer_of(tiny()), trainer_of(tiny("model.dropout=0"))
    assert train_update(with_dropout)["loss"] != train_update(without)["loss"]


def test_evaluating_and_sampling_change_nothing() -> None:
    watched, alone = trainer_of(tiny()), trainer_of(tiny())
    alone_rows = []
    streams = global_streams(alone.hardware.device)
    for _ in range(4):
        alone_rows.append(without_time(train_update(alone)))
    restore_global_streams(streams, watched.hardware.device)
    for expected in alone_rows:
        before = torch.get_rng_state()
        evaluate(watched.whole, watched.dataset.validation, watched.hardware, 128)
        list(sample_tokens(watched.model, watched.hardware, [65], num_tokens=3, temperature=1.0, top_k=5, seed=0))
        watched.model.train()
        assert torch.equal(torch.get_rng_state(), before)
        assert without_time(train_update(watched)) == expected


@pytest.mark.parametrize("layout", ["token_budget", "windows"])
def test_splitting_an_update_into_micro_batches_changes_neither_loss_nor_gradient(layout: str) -> None:
    common = ("model.dropout=0", "optimizer.grad_clip=0", f"batch.layout={layout}", "batch.tokens=2048")
    windows = ("batch.block_size=64", "batch.batch_size=32")
    whole = trainer_of(tiny(*common, *windows))
    expected, expected_gradient = train_update(whole), gradients(whole)
    for parts in (2, 4, 8):
        split = trainer_of(tiny(*common, *windows, f"batch.micro_batches={parts}"))
        row = train_update(split)
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
        assert row["batch_sha256"] == expected["batch_sha256"]
        assert row["target_tokens"] == expected["target_tokens"]
        error = (gradients(split) - expected_gradient).norm() / expected_gradient.norm()
        assert error.item() < 1e-6


def test_micro_batches_with_very_unequal_targets_and_with_none_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(pieces: Pieces, row_tokens: int | None, num_parts: int) -> list[tuple[int, int]]:
        edges = [0, 1, 3, len(pieces.lengths)] if num_parts > 1 else [0, len(pieces.lengths)]
        return list(itertools.pairwise(edges))

    pieces = Pieces(np.array([5, 90, 200, 300]), np.array([1, 2, 1, 64]), np.array([0, 1, 0, 63]), np.arange(4))
    monkeypatch.setattr(batches, "split_rows", uneven)
    results = []
    for parts in (1, 3):
        trainer = trainer_of(tiny("model.dropout=0", "optimizer.grad_clip=0", f"batch.micro_batches={parts}"))
        monkeypatch.setattr(trainer.dataset.layout, "pieces_of_update", lambda update: pieces)
        results.append((train_update(trainer), gradients(trainer)))
    (whole, whole_gradient), (split, split_gradient) = results
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert ((split_gradient - whole_gradient).norm() / whole_gradient.norm()).item() < 1e-6
    assert whole["target_tokens"] == 64


def reference_loss_of(trainer: Trainer, batch: Batch) -> torch.Tensor:
    """The mean loss of a batch by a decoder written out in FP64, piece by piece, without the lab's modules."""
    p = {name: parameter.detach().double() for name, parameter in trainer.model.named_parameters()}
    heads, layers = trainer.config.model.num_heads, trainer.config.model.num_layers

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]
        )

    total, count = torch.zeros((), dtype=torch.float64), 0
    for start, end in itertools.pairwise(batch.cu_seqlens):
        length = end - start
        x = p["token_embedding.weight"][batch.tokens_T[start:end]] + p["position_embedding.weight"][:length]
        future = torch.ones(length, length).triu(1).bool()
        for layer in range(layers):
            block = f"blocks.{layer}"
            qkv = norm(x, f"{block}.attention_norm") @ p[f"{block}.attention.qkv.weight"].T
            q, k, v = (part.reshape(length, heads, -1).transpose(0, 1) for part in qkv.chunk(3, dim=-1))
            scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
            mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
            x = x + mixed.transpose(0, 1).reshape(length, -1) @ p[f"{block}.attention.project.weight"].T
            inner = norm(x, f"{block}.mlp_norm") @ p[f"{block}.mlp.expand.weight"].T
            x = x + 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2))) @ p[f"{block}.mlp.project.weight"].T
        logits = norm(x, "final_norm") @ p["token_embedding.weight"].T
        log_p = logits - logits.logsumexp(-1, keepdim=True)
        for position, label in enumerate(batch.labels_T[start:end].tolist()):
            if label != IGNORED:
                total, count = total - log_p[position, label], count + 1
    return total / count


def test_the_reported_loss_is_the_reference_loss_of_the_whole_update() -> None:
    for parts in (1, 3):
        trainer = trainer_of(tiny("model.dropout=0", f"batch.micro_batches={parts}"))
        whole = make_batch(trainer.dataset.train, trainer.dataset.layout.pieces_of_update(1))
        expected = reference_loss_of(trainer, whole).item()
        assert train_update(trainer)["loss"] == pytest.approx(expected, rel=1e-6)


def test_the_step_is_adamw_after_clipping_with_the_learning_rate_of_its_row() -> None:
    trainer = trainer_of(tiny("model.dropout=0", "optimizer.grad_clip=0.01"))
    config = trainer.config.optimizer
    before = {name: parameter.detach().double() for name, parameter in trainer.model.named_parameters()}
    row = train_update(trainer)
    assert row["grad_norm"] > 0.01  # the norm before clipping
    assert gradients(trainer).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert {group["lr"] for group in trainer.optimizers[-1].param_groups} == {row["lr"]}
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.double()
        decayed = before[name] * (1 - row["lr"] * config.weight_decay) if parameter.ndim == 2 else before[name]
        # In the first step both bias-corrected moments are the gradient and its square.
        expected = decayed - row["lr"] * gradient / (gradient.abs() + config.eps)
        assert (parameter - expected).abs().max().item() < 1e-6, name


def test_the_model_learns_the_next_token_and_not_the_one_after(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("\n\n".join("abcdefg" * (10 + i) for i in range(60)))
    config = tiny(
        "data.source=files",
        'data.paths=["letters.txt"]',
        "data.documents=paragraph",
        "model.dropout=0",
        "train.updates=40",
    )
    trainer = trainer_of(config)
    rows = [train_update(trainer) for _ in range(40)]
    assert rows[-1]["loss"] < 0.3
    prompt = list(b"abcdefgab")
    tokens = sample_tokens(trainer.model, trainer.hardware, prompt, num_tokens=9, temperature=0, top_k=0, seed=0)
    assert bytes(tokens) == b"cdefgabcd"


def test_fp16_clips_the_unscaled_gradient_and_learns() -> None:
    exact = trainer_of(tiny("model.dropout=0"))
    scaled = trainer_of(tiny("model.dropout=0", "precision.compute=fp16"))
    assert scaled.scaler.is_enabled()
    first, expected = train_update(scaled), train_update(exact)
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    assert gradients(scaled).norm().item() <= 1.0 + 1e-4
    assert all(parameter.dtype == torch.float32 for parameter in scaled.model.parameters())
    later = [train_update(scaled)["loss"] for _ in range(8)]
    assert later[-1] < first["loss"] - 0.5


def test_an_fp16_overflow_skips_the_step_lowers_the_scale_and_is_no_failure() -> None:
    trainer = trainer_of(tiny("precision.compute=fp16"))
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = weights_sha256(trainer.model)
    row = train_update(trainer)
    assert row["grad_norm"] is None
    assert weights_sha256(trainer.model) == before
    assert trainer.scaler.get_scale() < 2.0**40
    assert trainer.progress.update == 1


def test_bf16_keeps_parameters_and_states_in_fp32() -> None:
    trainer = trainer_of(tiny("precision.compute=bf16"))
    losses = [train_update(trainer)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    states = [value for state in trainer.optimizers[-1].state.values() for value in state.values()]
    assert {tensor.dtype for tensor in [*trainer.model.parameters(), *states]} == {torch.float32}


def test_a_loss_that_is_not_finite_stops_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tiny("batch.micro_batches=4"))
    train_update(trainer)
    before = weights_sha256(trainer.model)
    calls: list[int] = []

    def break_third(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return ChunkedLoss()(*arguments) * (math.nan if len(calls) == 3 else 1.0)

    monkeypatch.setattr(trainer.whole, "head_loss", break_third)
    with pytest.raises(NonFiniteError, match="update 2: not finite in micro-batch 3 of 4") as caught:
        train_update(trainer)
    facts = caught.value.facts
    assert (facts["update"], facts["micro_batch"], facts["loss"]) == (2, 3, "nan")
    assert facts["documents"].startswith("synthetic-")
    assert weights_sha256(trainer.model) == before
    assert trainer.progress.update == 1


def test_a_gradient_that_is_not_finite_stops_before_the_step() -> None:
    trainer = trainer_of(tiny())
    before = weights_sha256(trainer.model)
    trainer.model.blocks[0].register_full_backward_hook(lambda *_: (torch.full((512, 64), torch.inf), None))
    with pytest.raises(NonFiniteError, match="not finite in its gradient"):
        train_update(trainer)
    assert weights_sha256(trainer.model) == before


def test_an_implausible_loss_before_training_is_said_and_a_plausible_one_is_not(tmp_path: Path) -> None:
    for scale, is_said in ((1.0, False), (20.0, True)):
        trainer = trainer_of(tiny())
        with torch.no_grad():
            trainer.model.token_embedding.weight.mul_(scale)
        shown: list[Row] = []
        with MetricsWriter(tmp_path / f"{scale}.jsonl") as writer:
            engine.measure(trainer, Recorder(writer, shown.append))
        assert [row.get("event") for row in shown[1:]] == ["implausible initial loss"] * is_said


def test_an_update_without_any_target_is_refused_and_names_its_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tiny())
    alone = Pieces(np.array([5, 90]), np.array([1, 1]), np.array([0, 0]), np.arange(2))
    monkeypatch.setattr(trainer.dataset.layout, "pieces_of_update", lambda update: alone)
    with pytest.raises(LabError, match=r"update 1: has no token to predict: .* synthetic-\d+"):
        train_update(trainer)


def test_a_norm_that_overflows_while_its_gradients_do_not_is_a_failure_under_fp16() -> None:
    trainer = trainer_of(tiny("precision.compute=fp16"))
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    assert not engine.has_overflow(trainer)
    trainer.model.token_embedding.weight.grad = torch.full_like(trainer.model.token_embedding.weight, math.inf)
    assert engine.has_overflow(trainer)


def test_sampling_is_sane_at_the_edges_of_temperature_and_top_k() -> None:
    logits, draws = torch.tensor([0.0, 3.0, 3.0, 1.0]), torch.Generator().manual_seed(0)
    assert draw(logits, temperature=0, top_k=0, draws=draws) == 1
    assert {draw(logits, temperature=1e-40, top_k=0, draws=draws) for _ in range(50)} == {1, 2}
    assert {draw(logits, temperature=9.0, top_k=1, draws=draws) for _ in range(50)} <= {1, 2}
    assert {draw(logits, temperature=1e30, top_k=99, draws=draws) for _ in range(200)} == {0, 1, 2, 3}
    counts = torch.bincount(torch.tensor([draw(logits, 1.0, 0, draws) for _ in range(4000)]), minlength=4) / 4000
    assert (counts - logits.softmax(-1)).abs().max().item() < 0.03


def test_a_signal_in_the_last_update_loses_no_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, stop, shown = trainer_of(tiny("train.updates=4")), StopRequest(), list[Row]()
    real_update = train_update

    def interrupted(trainer: Trainer, read: Callable[[int], UpdateData]) -> Row:
        stop.signal = signal.SIGINT if trainer.progress.update == 3 else None
        return real_update(trainer, read)

    monkeypatch.setattr(engine, "train_update", interrupted)
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        recorder, folder = Recorder(writer, shown.append), RunFolder(tmp_path)
        peaks, observation = PeakMemory(trainer.hardware.device), engine.observe(trainer, folder, recorder)
        process = engine.Process(1, None, recorder, stop, WallClock(), peaks, observation)
        state = engine.train(trainer, folder, process)
    assert state == "finished"
    assert [row["update"] for row in shown if row["kind"] == "evaluation"] == [0, 4]
