"""The processes that train one run together: which one this is, and what they tell each other.

torchrun starts them, and says by the environment which each one is; without it there is one. They have two roads. The
store, a table that torchrun's agent keeps, carries what the first process decides before training, and why one failed:
there a process may wait for hours, while another prepares the text. The process group, gloo between CPUs and NCCL
between GPUs, carries what belongs to an update.

Every call that waits for others is made by all of them, in the same order: what only one process does, such as writing
the run's folder, waits for nobody.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from training_lab.errors import LabError, UserError

T = TypeVar("T")

PREPARATION = datetime.timedelta(days=7)
"""The longest that a process waits for what another one prepares. Whoever dies meanwhile is noticed by torchrun."""
EXCHANGE = datetime.timedelta(minutes=30)
"""The longest that one waits for the others within an update."""
LAST_WORDS_S = 5.0
"""How long is waited for the account of a process that failed first."""
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, as seen by one of them."""

    rank: int = 0
    """Its number among all, from 0."""
    local_rank: int = 0
    """Its number on its machine, which is also that of its GPU."""
    world_size: int = 1
    """How many there are."""
    local_world_size: int = 1
    """How many there are on its machine."""
    store: Store | None = None
    """None for one process alone."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    @property
    def are_several(self) -> bool:
        return self.world_size > 1

    def from_first(self, name: str, make: Callable[[], T]) -> T:
        """What the first process makes of it, a value of JSON; the others wait, and get the same. `name` is used once.

        Whatever keeps the first from making it is raised there alone, and ends it; torchrun then ends the others.
        """
        if self.store is None:
            return make()
        if self.is_first:
            made = make()
            self.store.set(name, json.dumps(made))
            return made
        self.store.wait([name], PREPARATION)
        received: T = json.loads(self.store.get(name))
        return received

    def need_same(self, what: str, value: str) -> None:
        """Raises UserError, in every process, unless all of them have the same."""
        if self.store is None:
            return
        names = [f"{what}/{rank}" for rank in range(self.world_size)]
        self.store.set(names[self.rank], value)
        self.store.wait(names, PREPARATION)
        values = [self.store.get(name).decode() for name in names]
        if len({*values}) > 1:
            other = next(rank for rank, one in enumerate(values) if one != values[0])
            raise UserError(
                f"the processes have different {what}: process 0 has {values[0][:60]}, process {other} "
                f"{values[other][:60]}; each machine needs the same code, config and text"
            )

    def form_group(self, device: torch.device) -> None:
        """Connects the processes for training: gloo for what is on the CPU, NCCL for GPUs."""
        if self.store is None:
            return
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = PrefixStore("group", self.store)
        try:
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world_size, timeout=EXCHANGE,
                device_id=device if device.type == "cuda" else None,
            )  # fmt: skip
        except RuntimeError as error:
            raise LabError(
                f"process {self.rank} cannot reach the other {self.world_size - 1}: {first_line(error)}; between "
                "machines, open all ports, and name the network with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            ) from error

    def maximum(self, number: int) -> int:
        """The largest of the processes' numbers."""
        if self.store is None:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of each process, in the order of ranks; all give equally many."""
        if self.store is None:
            return [numbers]
        own = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own)
        return [one.tolist() for one in found]

    def share_state(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """The first process's state, of tensors on the CPU and plain types, in all of them; the others give None. So
        only the first needs the run's folder."""
        if self.store is None:
            assert state is not None
            return state
        written = io.BytesIO()
        if self.is_first:
            torch.save(state, written)
        size = torch.tensor(len(written.getbuffer()))
        dist.broadcast(size, 0)
        content = torch.empty(int(size), dtype=torch.uint8)
        if self.is_first:
            content.copy_(torch.frombuffer(written.getbuffer(), dtype=torch.uint8))
        dist.broadcast(content, 0)
        if state is None:
            state = torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
        return state

    def tell_failure(self, message: str) -> None:
        """Leaves word of why this process ends, for the one that keeps the record; only the first such word stays."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # the store has ended before
                self.store.compare_set("failure", "", json.dumps([self.rank, message]))

    def failure_elsewhere(self) -> str | None:
        """What another process said of its end. Waits some seconds for it; None if nothing is heard, which is how it
        is when a process was killed."""
        until = time.monotonic() + LAST_WORDS_S
        while self.store is not None and time.monotonic() < until:
            with contextlib.suppress(RuntimeError):
                if self.store.check(["failure"]):
                    rank, message = json.loads(self.store.get("failure"))
                    return None if rank == self.rank else f"process {rank}: {message}"
            time.sleep(0.1)
        return None

    def describe(self) -> dict[str, Any]:
        """What the record says of them."""
        return {"world_size": self.world_size, "machines": self.world_size // self.local_world_size}


ALONE = Processes()


@contextlib.contextmanager
def joined(environment: Mapping[str, str]) -> Iterator[Processes]:
    """The processes that torchrun started this one with, or one alone. Raises UserError where the environment
    contradicts itself."""
    numbers = read_environment(environment)
    if numbers is None:
        yield ALONE
        return
    try:
        store, _, _ = next(rendezvous("env://", timeout=PREPARATION))
    except (RuntimeError, ValueError) as error:
        address = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
        raise UserError(
            f"MASTER_ADDR, MASTER_PORT: nothing can be had from {address}: {first_line(error)}; another program may "
            "have the port: give torchrun --standalone on one machine, or another --master-port"
        ) from error
    try:
        yield Processes(*numbers, store=store)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def read_environment(environment: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """Rank, rank on the machine, and how many there are of both, as torchrun sets them; None without torchrun."""
    given = {name: environment[name] for name in VARIABLES if name in environment}
    if not {"RANK", "WORLD_SIZE"} & given.keys():
        return None
    for name, text in given.items():
        if not text.isdecimal():
            raise UserError(f"{name}: must be a number that torchrun sets, got {text!r}")
    missing = [name for name in (*VARIABLES[:3], "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise UserError(
            f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} set, but not {', '.join(missing)}: start the "
            "processes with torchrun, or unset all of them for one process"
        )
    rank, local_rank, world_size = (int(given[name]) for name in VARIABLES[:3])
    local_world_size = int(given.get("LOCAL_WORLD_SIZE", world_size))
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise UserError(
            f"RANK {rank}, WORLD_SIZE {world_size}, LOCAL_RANK {local_rank}, LOCAL_WORLD_SIZE {local_world_size}: do "
            "not fit together; start the processes with torchrun"
        )
    return rank, local_rank, world_size, local_world_size


def is_lost_connection(error: BaseException) -> bool:
    """Whether torch says that it cannot reach another process: gloo by these words, NCCL by its own class."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "gloo")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def first_line(error: BaseException) -> str:
    """The first line of an error's text: torch adds stacks of its own."""
    return next(iter(str(error).splitlines()), type(error).__name__)
