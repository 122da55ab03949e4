"""Checkpoints: whole or not there, verified before use, the right ones kept."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny

from training_lab import checkpoint as module
from training_lab.checkpoint import (
    Checkpoint,
    list_checkpoints,
    newest_good,
    remove_old,
    save_checkpoint,
    set_aside_damaged,
)
from training_lab.config import CheckpointConfig
from training_lab.data.dataset import prepare_dataset
from training_lab.engine import train_update
from training_lab.errors import LabError, UserError
from training_lab.optim import restore_optimizer
from training_lab.precision import choose_hardware
from training_lab.trainer import Trainer, make_trainer

FACTS = {"metrics_lines": 3}


def make_state(value: float) -> dict[str, Any]:
    return {"model": {"weights": torch.full((1000,), value)}, "progress": {"update": int(value), "best": float("inf")}}


def save(folder: Path, update: int) -> None:
    save_checkpoint(folder, update, make_state(update), FACTS)


def newest(folder: Path) -> Checkpoint:
    return list_checkpoints(folder)[0]


def updates_in(folder: Path) -> list[int]:
    return [checkpoint.update for checkpoint in list_checkpoints(folder)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def tiny_trainer(*overrides: str) -> Trainer:
    config = tiny(*overrides)
    return make_trainer(config, choose_hardware(config), prepare_dataset(config))


def test_what_was_saved_is_loaded_and_has_its_hash(folder: Path) -> None:
    save(folder, 7)
    found, damaged = newest_good(folder)
    assert found is not None
    assert damaged == []
    assert found.describe()["metrics_lines"] == 3
    assert torch.equal(found.load()["model"]["weights"], make_state(7)["model"]["weights"])
    assert (folder.parent / "checkpoint.pt").read_bytes() == (found.path / "state.pt").read_bytes()


def test_a_trainers_state_is_tensors_and_plain_types(folder: Path) -> None:
    trainer = tiny_trainer()
    train_update(trainer)
    save_checkpoint(folder, 1, trainer.state(), FACTS)
    state = list_checkpoints(folder)[0].load()  # weights_only=True refuses anything else
    assert set(state) == {"model", "optimizers", "scaler", "random", "sampler", "progress"}
    assert state["sampler"] == trainer.dataset.sampler_state(1)
    assert state["sampler"] == {"plan": trainer.dataset.plan, "next_token": trainer.config.batch.tokens}


def test_a_restored_trainer_goes_on_with_the_same_bits(folder: Path) -> None:
    trainer = tiny_trainer()
    for _ in range(3):
        train_update(trainer)
    save_checkpoint(folder, 3, trainer.state(), FACTS)
    expected = [train_update(trainer)["loss"] for _ in range(3)]
    other = tiny_trainer()
    torch.rand(5)
    other.restore(list_checkpoints(folder)[0].load())
    assert [train_update(other)["loss"] for _ in range(3)] == expected


def save_and_die(folder: Path, die_at: int, counted: Any) -> None:
    """Saves update 2, counts what it asks of the file system, and dies at number `die_at` without cleaning up."""

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            counted.value += 1
            if counted.value == die_at:
                os._exit(9)
            return function(*arguments, **named)

        return step

    module.os.fsync = dying(os.fsync)  # type: ignore[attr-defined]
    module.os.rename = dying(os.rename)  # type: ignore[attr-defined]
    module.os.link = dying(os.link)  # type: ignore[attr-defined]
    module.os.replace = dying(os.replace)  # type: ignore[attr-defined]
    module.shutil.rmtree = dying(module.shutil.rmtree)  # type: ignore[attr-defined]
    module.HashingFile.write = dying(module.HashingFile.write)  # type: ignore[method-assign]
    save_checkpoint(folder, 2, make_state(2), FACTS)
    remove_old(folder, CheckpointConfig(keep_last=1), None, newest(folder))
    os._exit(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the child computes nothing in parallel
def test_a_process_killed_at_any_step_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    seen: set[int] = set()
    for die_at in range(1, 1000):
        folder = tmp_path / str(die_at) / "checkpoints"
        save(folder, 1)
        counted = fork.Value("i", 0)
        child = fork.Process(target=save_and_die, args=(folder, die_at, counted))
        child.start()
        child.join(60)
        found, damaged = newest_good(folder)
        assert found is not None, die_at
        assert damaged == [], die_at
        assert torch.equal(found.load()["model"]["weights"], make_state(found.update)["model"]["weights"]), die_at
        seen.add(found.update)
        # The next process saves over whatever was left, and cleans up.
        save(folder, 3)
        remove_old(folder, CheckpointConfig(keep_last=1), None, newest(folder))
        assert sorted(path.name for path in folder.iterdir()) == ["update-000003"], die_at
        if child.exitcode == 0:
            break
    assert child.exitcode == 0
    assert seen == {1, 2}
    assert die_at > 8


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "lose", "description", "empty description", "other keys", "folder"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(folder: Path, damage: str) -> None:
    save(folder, 1)
    save(folder, 2)
    path = folder / "update-000002"
    state = bytearray((path / "state.pt").read_bytes())
    if damage == "flip":
        state[len(state) // 2] ^= 1
        (path / "state.pt").write_bytes(state)
    elif damage == "truncate":
        (path / "state.pt").write_bytes(state[:-10])
    elif damage == "lose":
        (path / "state.pt").unlink()
    elif damage == "description":
        (path / "checkpoint.json").write_text("{")
    elif damage == "folder":
        (path / "state.pt").unlink()
        (path / "state.pt").mkdir()
    else:
        (path / "checkpoint.json").write_text("{}" if damage == "empty description" else '{"format": 2}')
    found, damaged = newest_good(folder)
    assert found is not None
    assert found.update == 1
    assert len(damaged) == 1
    assert "update-000002: damaged" in damaged[0]


def test_when_all_are_damaged_it_is_an_error_and_when_there_are_none_it_is_not(folder: Path) -> None:
    assert newest_good(folder) == (None, [])
    save(folder, 1)
    (folder / "update-000001" / "state.pt").write_bytes(b"")
    with pytest.raises(LabError, match="no checkpoint verifies"):
        newest_good(folder)


def test_what_is_newer_than_the_good_one_is_set_aside_and_never_counted(folder: Path) -> None:
    for update in (1, 2, 3):
        save(folder, update)
    (folder / "update-000003" / "state.pt").write_bytes(b"")
    found, _ = newest_good(folder)
    set_aside_damaged(folder, found)
    assert updates_in(folder) == [2, 1]
    assert (folder / "damaged-update-000003").is_dir()


@pytest.mark.parametrize("pair", [(9, 10), (99, 100), (9_900, 10_000), (999_999, 1_000_000)])
def test_the_newest_are_kept_by_number_and_not_by_name(folder: Path, pair: tuple[int, int]) -> None:
    for update in (1, *pair):
        save(folder, update)
    remove_old(folder, CheckpointConfig(keep_last=2), None, newest(folder))
    assert updates_in(folder) == list(reversed(pair))


def test_the_best_is_kept_and_foreign_files_are_not_touched(folder: Path) -> None:
    for update in (1, 2, 3, 4):
        save(folder, update)
    (folder / "update-000001-mine").mkdir()
    (folder / "notes.txt").write_text("mine")
    remove_old(folder, CheckpointConfig(keep_last=1), 2, newest(folder))
    assert updates_in(folder) == [4, 2]
    assert (folder / "update-000001-mine").is_dir()
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("after_bytes", [0, 2000])
def test_a_full_disk_leaves_the_old_checkpoint_and_names_path_and_bytes(
    folder: Path, after_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1)
    real_write = module.HashingFile.write

    def write(self: module.HashingFile, data: bytes) -> int:
        if self.size >= after_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(self, data)

    monkeypatch.setattr(module.HashingFile, "write", write)
    with pytest.raises(LabError, match=r"update-000002: cannot be saved: No space left on device after [\d,]+ bytes, "):
        save(folder, 2)
    monkeypatch.undo()
    assert sorted(path.name for path in folder.iterdir()) == ["update-000001"]
    found, damaged = newest_good(folder)
    assert found is not None
    assert (found.update, damaged) == (1, [])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.max_positions=128",), "of another model: position_embedding.weight is (64, 64) there, (128, 64) here"),
        (("model.num_layers=1",), "of another model: blocks.1."),
        (("data.tokenizer=char",), "the checkpoint's vocabulary has 256 tokens, the config's tokenizer 13"),
    ],
)
def test_weights_of_another_model_are_refused(overrides: tuple[str, ...], message: str) -> None:
    other = tiny_trainer(*overrides)
    state = tiny_trainer().state()
    state["sampler"]["plan"] = other.dataset.plan
    with pytest.raises(UserError, match=re.escape(message)):
        other.restore(state)


def test_a_file_of_weights_alone_is_not_taken_for_a_state() -> None:
    trainer = tiny_trainer()
    with pytest.raises(UserError, match="lacks optimizers, progress, random, sampler, scaler"):
        trainer.restore({"model": trainer.model.state_dict()})


def test_a_state_of_other_data_is_refused() -> None:
    state, other = tiny_trainer().state(), tiny_trainer("data.order_seed=5")
    with pytest.raises(UserError, match="trained on other data"):
        other.restore(state)


def test_loading_keeps_moments_and_the_kernel_that_this_process_chose() -> None:
    trainer = tiny_trainer()
    train_update(trainer)
    state = trainer.optimizers[-1].state_dict()
    for group in state["param_groups"]:
        group["fused"] = False
    other = tiny_trainer()
    restore_optimizer(other.optimizers[-1], state)
    assert all(group["fused"] for group in other.optimizers[-1].param_groups)
    parameter = other.model.token_embedding.weight
    original = trainer.model.token_embedding.weight
    assert torch.equal(
        other.optimizers[-1].state[parameter]["exp_avg"], trainer.optimizers[-1].state[original]["exp_avg"]
    )
    assert other.optimizers[-1].state[parameter]["step"].item() == 1
