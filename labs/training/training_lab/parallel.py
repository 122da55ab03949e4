"""How the processes of a run share the model: each has a whole copy (DDP), or each a part of every matrix (FSDP2).

Both are torch's own. What is left to say here is that gradients are added up, never averaged, because each loss is
divided by the target tokens of the whole update before; and when that is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from training_lab.data.batches import Batch, without_labels
from training_lab.distributed import Processes
from training_lab.loss import HeadLoss, Objective
from training_lab.model import Decoder


class SummedLoss(nn.Module):
    """The model with its head: from a batch to the sum of its losses. One module, so that whatever shares it among
    processes sees every use of its parameters."""

    def __init__(self, model: Decoder, head_loss: HeadLoss) -> None:
        super().__init__()
        self.model, self.head_loss = model, head_loss

    def forward(self, batch: Batch, objective: Objective) -> torch.Tensor:
        hidden_Td = self.model(batch.tokens_T, batch.positions_T, batch.cu_seqlens)
        return self.head_loss(hidden_Td, self.model.head_Vd, batch.labels_T, objective)


def share_model(whole: SummedLoss, processes: Processes, how: str, device: torch.device) -> nn.Module:
    """What is called instead of `whole`, so that its gradients are those of all processes: `whole` itself for one
    process. With `how` fsdp the parameters of `whole` are replaced by parts of them."""
    if not processes.are_several:
        return whole
    if how == "ddp":
        devices = [device] if device.type == "cuda" else None
        shared = DistributedDataParallel(whole, device_ids=devices, gradient_as_bucket_view=True)
        shared.register_comm_hook(None, lambda _, bucket: add_up(bucket))
        return shared
    mesh = init_device_mesh(device.type, (processes.world_size,))
    for module in (*whole.model.blocks, whole):
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return whole


def add_up(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Adds a part of the gradients over all processes. DDP by itself would divide by their number."""
    added = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return added.then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def is_sharded(module: nn.Module) -> bool:
    """Whether each process has only a part of it, so that every pass through it is made by all together."""
    return isinstance(module, FSDPModule)


def keep_parts_only(module: nn.Module) -> None:
    """Gives up whole parameters that a pass without a backward has left, where each process has a part of them."""
    if isinstance(module, FSDPModule):
        module.reshard()


def backward_alone(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Passes within it add to the process's own gradients; the first pass after it adds up those of all. With FSDP2 it
    changes nothing: there every pass adds up, since whole gradients are what has no room."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()


def own_share(batches: Sequence[Batch], processes: Processes) -> list[Batch]:
    """This process's part of a list, taken in turn. All get equally many: those that would have none left get one
    without labels."""
    own = list(batches[processes.rank :: processes.world_size])
    missing = -(-len(batches) // processes.world_size) - len(own)
    return own + [without_labels(batches[0])] * missing


def in_turn(parts: list[list[float]], count: int) -> list[float]:
    """The reverse: what each process has of its share, as one list of `count`."""
    return [number for turn in zip(*parts, strict=True) for number in turn][:count]


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or what its parts in all processes make up, if each has one; then all must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shared_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this process has of a whole tensor that is as large as a parameter, where it has a part of the parameter."""
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    there = whole.to(parameter.to_local().device)
    return distribute_tensor(there, parameter.device_mesh, parameter.placements, src_data_rank=None)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or this process's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
