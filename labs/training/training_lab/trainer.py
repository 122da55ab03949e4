"""Everything that an update reads or changes: made the same for the same config, saved whole, and brought back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from training_lab.config import Config
from training_lab.data.dataset import Dataset
from training_lab.distributed import ALONE, Processes
from training_lab.errors import UserError
from training_lab.kernels import Kernels, choose_kernels
from training_lab.loss import Objective, head_buffers, make_head_loss
from training_lab.model import Decoder, initialise
from training_lab.observation import Held
from training_lab.optim import make_optimizers, restore_optimizer
from training_lab.parallel import SummedLoss, part_of, share_model, shared_like
from training_lab.phases import Phases
from training_lab.precision import Hardware
from training_lab.randomness import global_streams, restore_global_streams, seed_global_streams


@dataclass
class Progress:
    """How far a run is. Belongs to the last update that was trained."""

    update: int = 0
    target_tokens: int = 0
    evaluated_update: int = -1
    """The last update after which the validation loss was measured; −1 before the first time."""
    val_loss: float = math.inf
    """What was measured then."""
    best_update: int = -1
    best_val_loss: float = math.inf


@dataclass
class Trainer:
    """Everything that an update reads or changes."""

    config: Config
    hardware: Hardware
    kernels: Kernels
    dataset: Dataset
    model: Decoder
    objective: Objective
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    progress: Progress
    processes: Processes
    whole: SummedLoss
    """The model with its head and loss."""
    shared: nn.Module
    """The same as the processes share it: what training calls."""
    hashed: tuple[int, str] | None = None
    """Where each process has only a part of the weights: the last update after which they were hashed, and the hash."""
    phases: Phases = field(default_factory=Phases)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, as tensors and plain types."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "random": global_streams(self.hardware.device),
            "sampler": self.dataset.sampler_state(self.progress.update),
            "progress": asdict(self.progress),
        }

    def restore(self, state: dict[str, Any], *, with_optimizer: bool = True) -> None:
        """Goes on from a checkpoint's state. Raises UserError if it belongs to other data or another model."""
        missing = self.state().keys() - state.keys()
        if missing:
            raise UserError(f"the checkpoint lacks {', '.join(sorted(missing))}: it holds no state to go on from")
        if state["sampler"].get("plan") != self.dataset.plan:
            raise UserError("the checkpoint was trained on other data: its plan is not that of this config")
        if state["sampler"] != self.dataset.sampler_state(state["progress"]["update"]):
            raise UserError("the checkpoint goes on at another place in the data: its updates were of another size")
        self.start_from(state["model"])
        if with_optimizer:
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                restore_optimizer(optimizer, saved)
        self.scaler.load_state_dict(state["scaler"])
        restore_global_streams(state["random"], self.hardware.device)
        self.progress = Progress(**state["progress"])

    def start_from(self, weights: dict[str, torch.Tensor]) -> None:
        """Takes the first weights from elsewhere. Raises UserError if they are of another model."""
        check_shapes(self.model, weights)
        named = dict(self.model.named_parameters())
        self.model.load_state_dict({name: shared_like(named[name], one) for name, one in weights.items()})

    def held(self) -> Held:
        """Bytes in tensors between two updates."""
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [
            value for optimizer in self.optimizers for state in optimizer.state.values() for value in state.values()
        ]
        tensors = [*parameters, *gradients, *filter(torch.is_tensor, states), *head_buffers(self.whole.head_loss)]
        return Held(*(sum(part_of(one).nbytes for one in some) for some in (tensors, gradients)))


def make_trainer(config: Config, hardware: Hardware, dataset: Dataset, processes: Processes = ALONE) -> Trainer:
    """The state before the first update: the same for the same config, whatever the process did before."""
    kernels = choose_kernels(config, hardware)
    model = Decoder(config.model, dataset.tokenizer.vocab_size, kernels.attention)
    initialise(model, config.train.seed)
    model.to(hardware.device).train()
    seed_global_streams(config.train.seed)
    whole = SummedLoss(model, make_head_loss(kernels.loss))
    shared = share_model(whole, processes, config.train.parallel, hardware.device)
    return Trainer(
        config,
        hardware,
        kernels,
        dataset,
        model,
        Objective(config.loss.label_smoothing, config.loss.z_loss),
        make_optimizers(model, config.optimizer),
        hardware.make_scaler(),
        Progress(),
        processes,
        whole,
        shared,
    )


def check_shapes(model: Decoder, saved: dict[str, torch.Tensor]) -> None:
    """Raises UserError if saved weights are not of this model, naming the vocabulary if that is why."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if wanted == given:
        return
    name = next(n for n in [*wanted, *given] if wanted.get(n) != given.get(n))
    if name == "token_embedding.weight" and name in given:
        message = f"the checkpoint's vocabulary has {given[name][0]} tokens, the config's tokenizer {wanted[name][0]}"
    else:
        message = f"the checkpoint is of another model: {name} is {given.get(name)} there, {wanted.get(name)} here"
    raise UserError(message)
