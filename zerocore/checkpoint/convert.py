"""Converts weights from one kind of file to another, one tensor at a time."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from zerocore.checkpoint.byte_ranges import write_from
from zerocore.checkpoint.checksums import Checksums, FileSums
from zerocore.checkpoint.commit import files
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.checkpoint.dcp.safe_reader import load_tensors, quiet
from zerocore.checkpoint.safe_files import named, size_of
from zerocore.checkpoint.safetensors.files import plan_files, read_folder, write_lists

TORCH_SUFFIXES = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Weights:
    """Tensors that can be read one by one."""

    kind: str  # "dcp", "safetensors" or "torch"
    facts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of tensors
    read: Callable[[str], Tensor]  # returns a tensor by name, on the CPU

    @property
    def nbytes(self) -> int:
        return sum(dtype.itemsize * prod(shape) for dtype, shape in self.facts.values())


def open_weights(path: Path) -> Weights:
    """Opens the tensors of a checkpoint, safetensors or a torch file; raises if one is broken."""
    if (path / ".metadata").exists():
        return _of_checkpoint(path)
    if path.suffix in TORCH_SUFFIXES and path.is_file():
        return _of_torch_file(path)
    entries = read_folder(path)
    facts = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    return Weights("safetensors", facts, lambda name: entries[name].read(entries[name].dtype))


def _of_checkpoint(path: Path) -> Weights:
    contents = Contents(path)
    contents.check_sizes()
    tensors = {
        key: facts
        for key, facts in contents.metadata.state_dict_metadata.items()
        if isinstance(facts, TensorStorageMetadata)
    }
    prefix = "model." if any(key.startswith("model.") for key in tensors) else ""
    facts = {
        key.removeprefix(prefix): (tensor.properties.dtype, tuple(tensor.size))
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }

    def read(name: str) -> Tensor:
        dtype, shape = facts[name]
        state = {prefix + name: torch.empty(shape, dtype=dtype, device="cpu")}
        load_tensors(state, contents)
        return state[prefix + name]

    return Weights("dcp", facts, read)


def _of_torch_file(path: Path) -> Weights:
    size_of(path)  # raises for a pipe or a device
    with named(path):
        state: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} is not a dict of tensors by name")
    facts = {name: (value.dtype, tuple(value.shape)) for name, value in state.items()}
    return Weights("torch", facts, lambda name: state[name])


def convert(source: Weights, target: Path, kind: str, advance: Callable[[int], None]) -> None:
    """Writes weights as ``"dcp"``, ``"safetensors"`` or ``"torch"``, which holds all tensors in
    memory at once. The target must not exist; it gets its name when all is on disk. Calls
    ``advance`` with the bytes of each tensor."""
    writers = {"dcp": _write_checkpoint, "safetensors": _write_safetensors, "torch": _write_torch}
    if target.exists():
        raise FileExistsError(f"{target} exists and is not overwritten; delete it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{uuid.uuid4().hex[:8]}")

    def read(name: str) -> Tensor:
        value = source.read(name)
        advance(value.nbytes)
        return value

    try:
        writers[kind](source, temporary, read)
        for path in [*temporary.glob("*"), temporary]:
            files.flush_path(path)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)
        raise
    files.flush_path(target.parent)


class _Streaming(DefaultSavePlanner):
    """A planner that reads a tensor when torch writes it."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: Any) -> Any:
        """Reads the tensor of an index, whose name begins with ``model.``."""
        return self._read(index.fqn.removeprefix("model."))


def _write_checkpoint(source: Weights, target: Path, read: Callable[[str], Tensor]) -> None:
    meta = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (dtype, shape) in source.facts.items()
    }
    writer = FileSystemWriter(target, single_file_per_rank=True, sync_files=True)
    with quiet():
        save({"model": meta}, storage_writer=writer, planner=_Streaming(read), no_dist=True)
    Contents(target).check_sizes()


def _write_safetensors(source: Weights, target: Path, read: Callable[[str], Tensor]) -> None:
    plans = plan_files(target, source.facts, 5_000_000_000, {"format": "pt"})
    target.mkdir()
    sums = Checksums()
    for plan in plans:
        with open(target / plan.name, "wb", buffering=0) as file:
            writer = files.writer(file.fileno(), plan.nbytes)
            files.write(writer, 0, plan.header)
            for name, entry in plan.entries.items():
                values = read(name).contiguous().view(-1)
                write_from(writer, entry.begin, entry.dtype, values)
            files.finish(writer)
            sums[plan.name] = FileSums(plan.nbytes, writer.sums())
    write_lists(target, plans, sums)


def _write_torch(source: Weights, target: Path, read: Callable[[str], Tensor]) -> None:
    torch.save({name: read(name) for name in source.facts}, target)
