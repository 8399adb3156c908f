"""Reads tensors of ``torch.distributed.checkpoint``: only the bytes that a rank needs.

``torch.load`` reads whole chunks, and torch's reader can run code from a file. This reader finds a
tensor by the chunk's list of parts, and rejects anything that is not plain.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from zerocore.checkpoint.byte_ranges import in_threads, read_into
from zerocore.checkpoint.dcp.contents import Contents, Part
from zerocore.checkpoint.safe_files import is_count, named, opened
from zerocore.checkpoint.safe_pickles import Maker, load_plain, read_pickle
from zerocore.layout.boxes import memory_order


class SafeReader(FileSystemReader):
    """A ``FileSystemReader`` with known metadata that reads parts of chunks."""

    def __init__(self, contents: Contents) -> None:
        super().__init__(contents.folder)
        self._metadata = contents.metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the plan's items; an OSError or ValueError names file and key."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            self._read_items(Path(self.path) / name, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_items(self, path: Path, items: list[ReadItem], planner: LoadPlanner) -> None:
        ordered = sorted(items, key=lambda item: self.storage_data[item.storage_index].offset)
        tensors = [item for item in ordered if item.type != LoadItemType.BYTE_IO]
        wanted = [(item, planner.resolve_tensor(item).detach()) for item in tensors]
        on_cpu = all(target.device.type == "cpu" for _, target in wanted)
        with opened(path) as file:

            def read(pair: tuple[ReadItem, Tensor]) -> None:
                with named(path, f"cannot be read at '{pair[0].storage_index.fqn}'"):
                    self._read_tensor(file, *pair)

            # Copies to a device must use this thread's current stream.
            done: Iterator[None] = in_threads(read, wanted) if on_cpu else map(read, wanted)
            for (item, target), _ in zip(wanted, done, strict=True):
                planner.commit_tensor(item, target)
            for item in ordered:
                if item.type == LoadItemType.BYTE_IO:
                    info = self.storage_data[item.storage_index]
                    data = Part(file, info.offset, info.length).read()
                    with named(path, f"cannot be read at '{item.storage_index.fqn}'"):
                        planner.load_bytes(item, io.BytesIO(data))

    def _read_tensor(self, file: Any, item: ReadItem, target: Tensor) -> None:
        info = self.storage_data[item.storage_index]
        facts: Any = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if info.transform_descriptors:
            raise ValueError("an extension of torch's writer has encoded it; this is not supported")
        offset = item.storage_index.offset
        form = next((tuple(chunk.sizes) for chunk in facts.chunks if chunk.offsets == offset), None)
        chunk = locate(file.fileno(), info.offset, info.length)
        if chunk is not None:
            if (chunk.dtype, chunk.sizes) != (facts.properties.dtype, form):
                raise ValueError(f"it is {chunk.dtype} {chunk.sizes}, unlike in .metadata")
            read_box(file.fileno(), chunk, item.storage_offsets, item.lengths, target)
            return
        loaded = load_plain(Part(file, info.offset, info.length), info.length)
        if not isinstance(loaded, Tensor) or tuple(loaded.shape) != form:
            raise ValueError("it is not a tensor of the shape in .metadata")
        for dim, (begin, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            loaded = loaded.narrow(dim, begin, size)
        target.copy_(loaded)


class SafePlanner(DefaultLoadPlanner):
    """A ``DefaultLoadPlanner`` that loads plain values with ``weights_only=True``."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Loads a plain value; raises UnpicklingError for an unknown type."""
        loaded = load_plain(value, value.getbuffer().nbytes)
        plain = type(value)()
        torch.save(loaded, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_tensors(state: dict[str, Any], contents: Contents) -> None:
    """Reads this rank's parts of the tensors, without other ranks. Errors name file and key."""
    with quiet():
        try:
            load(state, storage_reader=SafeReader(contents), planner=SafePlanner(), no_dist=True)
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                raise cause from None


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses torch's warning that a process loads or saves without the other ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


_TAIL_NBYTES = 1024  # the end of a chunk, with the list of its parts
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_WIDE = 0xFFFFFFFF  # marks a size above 4 GiB, which is in another field


@dataclass(frozen=True)
class Chunk:
    """A tensor in a file: strided, its first element at byte ``begin``."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int


def locate(file: int, offset: int, length: int) -> Chunk | None:
    """Finds the tensor in the chunk of ``length`` bytes at ``offset``.

    Returns None if the chunk is broken, or not what ``torch.save`` makes of a plain tensor below
    4 GiB.
    """
    count = min(length, _TAIL_NBYTES)
    parts = _listed_parts(os.pread(file, count, offset + length - count))
    names = {name.partition("/")[2]: name for name in parts}
    if not {"data.pkl", "data/0"} <= set(names):
        return None
    (header, size), (data_header, data_nbytes) = parts[names["data.pkl"]], parts[names["data/0"]]
    begin, data = _begin_of(file, offset + header), _begin_of(file, offset + data_header)
    if max(begin + size, data + data_nbytes) > offset + length:
        return None
    try:
        chunk = read_pickle(os.pread(file, size, begin), _find, _dtype_of)
    except ValueError:
        return None
    if not isinstance(chunk, Chunk):
        return None
    steps = zip(chunk.sizes, chunk.strides, strict=True)
    numel = 0 if 0 in chunk.sizes else chunk.begin + 1 + sum((n - 1) * step for n, step in steps)
    if numel * chunk.dtype.itemsize > data_nbytes:
        return None
    return replace(chunk, begin=data + chunk.begin * chunk.dtype.itemsize)


def _listed_parts(tail: bytes) -> dict[str, tuple[int, int]]:
    """Returns ``(offset of the header, size)`` of a zip file's parts, by name; {} if unclear."""
    parts: dict[str, tuple[int, int]] = {}
    end = tail.rfind(b"PK\5\6")
    if end < 0 or len(tail) < end + 20:
        return parts
    nbytes, _ = struct.unpack_from("<2I", tail, end + 12)
    at = tail.find(b"PK\1\2", max(0, end - nbytes - 100))  # a zip64 end may lie between
    while 0 <= at <= end - _CENTRAL.size and tail[at : at + 4] == b"PK\1\2":
        facts = _CENTRAL.unpack_from(tail, at)
        method, size, lengths, header = facts[4], facts[9], facts[10:13], facts[16]
        name = tail[at + _CENTRAL.size : at + _CENTRAL.size + lengths[0]].decode(errors="replace")
        if method != 0 or _WIDE in (size, header):
            return {}
        parts[name] = (header, size)
        at += _CENTRAL.size + sum(lengths)
    return parts


def _begin_of(file: int, header: int) -> int:
    """Returns the offset of a part's bytes, from the offset of its header."""
    return header + 30 + sum(struct.unpack("<2H", os.pread(file, 4, header + 26).ljust(4, b"\0")))


def _chunk(storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Chunk:
    """Makes a chunk from the arguments of torch's rebuild function. ``rest`` is ``(requires_grad,
    hooks)``, and the dtype of an untyped storage. ``begin`` counts elements, not yet bytes."""
    dtype = storage or rest[2]
    if not (isinstance(dtype, torch.dtype) and type(sizes) is type(strides) is tuple):
        raise ValueError("a tensor's dtype or shape is invalid")
    if len(sizes) != len(strides) or not all(map(is_count, [offset, *sizes, *strides])):
        raise ValueError("a tensor's offset, shape and strides must be non-negative integers")
    return Chunk(dtype, sizes, strides, offset)


_REBUILD, _DICT = Maker(call=_chunk), Maker(call=lambda: {})


def _find(module: str, name: str) -> Any:
    if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return _REBUILD
    if (module, name) == ("collections", "OrderedDict"):
        return _DICT
    if module == "torch" and name.endswith("Storage"):
        return name
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    raise ValueError(f"{module}.{name} is not part of a plain tensor")


_DTYPE_OF_STORAGE = {
    name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()
}


def _dtype_of(pid: Any) -> torch.dtype | None:
    """Returns the dtype in a storage's persistent id; None if unknown."""
    if type(pid) is not tuple or type(pid[1]) is not str:  # hashing another type may never end
        raise ValueError("a storage has no type")
    return _DTYPE_OF_STORAGE.get(pid[1])


def read_box(
    file: int, chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int], target: Tensor
) -> None:
    """Reads a box of a chunk into a plain tensor of the same sizes, of any dtype and device."""
    first = sum(n * step for n, step in zip(offsets, chunk.strides, strict=True))
    begin = chunk.begin + first * chunk.dtype.itemsize
    order = memory_order(sizes, chunk.strides)
    wanted = torch.empty_strided(tuple(sizes), chunk.strides, dtype=chunk.dtype, device="meta")
    turned = target.permute(order)
    if wanted.permute(order).is_contiguous() and turned.is_contiguous():  # also if both are empty
        read_into(file, begin, chunk.dtype, turned.view(-1))
        return
    span = 1 + sum((n - 1) * step for n, step in zip(sizes, chunk.strides, strict=True))
    values = torch.empty(span, dtype=chunk.dtype, device="cpu")
    read_into(file, begin, chunk.dtype, values)
    target.copy_(values.as_strided(tuple(sizes), chunk.strides))
