"""States that lie in parts in several processes, as files: torch's distributed checkpoint.

The tensors are split from the rest of a state. Each process writes its parts of them, under the name that a tensor has
in the state, such as `optimizers/0/state/3/exp_avg`; read back they are whole, whatever number of processes wrote them.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from training_lab.errors import LabError

METADATA = ".metadata"
NEEDED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
                 "StorageMeta", "_MEM_FORMAT_ENCODING")
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.storage", "StorageMeta"),
    ("torch._utils", "_get_obj_from_str"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "uint8"),
    ("torch", "int64"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "Path"),
}  # fmt: skip
"""The classes that torch's description of a distributed checkpoint is made of. It is a pickle, and a pickle may name
anything: whatever else this one names is not called."""


def split_tensors(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The state with None in place of each tensor, and the tensors by their place in it."""
    tensors: dict[str, torch.Tensor] = {}

    def plain(value: Any, place: str) -> Any:
        if torch.is_tensor(value):
            tensors[place] = value
            return None
        if isinstance(value, dict):
            return {key: plain(one, f"{place}/{key}" if place else str(key)) for key, one in value.items()}
        if isinstance(value, list):
            return [plain(one, f"{place}/{number}") for number, one in enumerate(value)]
        return value

    return plain(state, ""), tensors


def join_tensors(state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The reverse. Raises LabError for a tensor that has no place there."""

    def whole(value: Any, place: str) -> Any:
        if place in tensors:
            return tensors[place]
        if isinstance(value, dict):
            return {key: whole(one, f"{place}/{key}" if place else str(key)) for key, one in value.items()}
        if isinstance(value, list):
            return [whole(one, f"{place}/{number}") for number, one in enumerate(value)]
        return value

    joined: dict[str, Any] = whole(state, "")
    strangers = tensors.keys() - split_tensors(joined)[1].keys()
    if strangers:
        raise LabError(f"the parts of the state have a tensor too many: {min(strangers)}")
    return joined


def write_parts(folder: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Writes this process's parts into `folder`, which all processes see. All of them call this. Raises LabError in all
    if it fails in one."""
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    try:
        save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # which is no Exception to Python
        rank, (cause, _) = next(iter(error.failures.items()))
        raise LabError(f"process {rank}: {type(cause).__name__}: {cause}") from error


def own_parts(folder: Path, rank: int) -> Iterator[Path]:
    """The files that a process has written."""
    yield from sorted(folder.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        yield folder / METADATA


def read_parts(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors, on the CPU, from the parts that any number of processes wrote."""
    reader = CarefulReader(folder)
    described = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in described.items()
        if isinstance(one, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be: one process reads all
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


class CarefulReader(FileSystemReader):
    """torch's reader, with the description read by an unpickler that calls only what it must."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / METADATA
        try:
            with open(path, "rb") as file:
                metadata = CarefulUnpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError) as error:
            raise LabError(f"{path}: cannot be read: {error}") from error
        assert isinstance(metadata, Metadata)
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class CarefulUnpickler(pickle.Unpickler):
    """Refuses every name but NEEDED."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NEEDED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)
