"""Where the memory of a tensor lies in a chunk of torch's checkpoint files, and ranges of it read.

So a rank reads those bytes that it needs, whatever the chunks are. ``torch.load`` reads them whole.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerocore.checkpoint.byte_ranges import read_into
from zerocore.checkpoint.safe_files import is_count
from zerocore.checkpoint.safe_pickles import Maker, read_pickle
from zerocore.checkpoint.slices.boxes import memory_order

_TAIL_NBYTES = 1024  # of a chunk, which hold the list of its parts
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_WIDE = 0xFFFFFFFF  # stands for a size in another place: above 4 GiB


@dataclass(frozen=True)
class Chunk:
    """A tensor in a file: strided, its first element at byte ``begin``."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int


def locate(file: int, offset: int, length: int) -> Chunk | None:
    """Finds the tensor in the chunk of ``length`` bytes at ``offset``.

    None if it is of another form than ``torch.save`` gives to a plain tensor below 4 GiB; so is
    a broken chunk.
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
        found = read_pickle(
            os.pread(file, size, begin), _find, lambda pid: _DTYPE_OF_STORAGE.get(pid[1])
        )
    except ValueError:
        return None
    if not isinstance(found, Chunk):
        return None
    steps = zip(found.sizes, found.strides, strict=True)
    numel = 0 if 0 in found.sizes else found.begin + 1 + sum((n - 1) * step for n, step in steps)
    if numel * found.dtype.itemsize > data_nbytes:
        return None
    return replace(found, begin=data + found.begin * found.dtype.itemsize)


def _listed_parts(tail: bytes) -> dict[str, tuple[int, int]]:
    """``(offset of the header, size)`` of each part of a zip file, by name; none if unclear."""
    parts: dict[str, tuple[int, int]] = {}
    end = tail.rfind(b"PK\5\6")
    if end < 0 or len(tail) < end + 20:
        return parts
    nbytes, _ = struct.unpack_from("<2I", tail, end + 12)
    at = tail.find(b"PK\1\2", max(0, end - nbytes - 100))  # a longer end may stand between
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
    """Where the bytes of a part begin, by the place of its header."""
    return header + 30 + sum(struct.unpack("<2H", os.pread(file, 4, header + 26).ljust(4, b"\0")))


def _chunk(storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Chunk:
    """Of ``(requires_grad, hooks)``, and of the dtype where the storage does not say it.

    It begins at an element, not yet at a byte.
    """
    dtype = storage or rest[2]
    if not (isinstance(dtype, torch.dtype) and type(sizes) is type(strides) is tuple):
        raise ValueError("a tensor's dtype or shape is none")
    if len(sizes) != len(strides) or not all(map(is_count, [offset, *sizes, *strides])):
        raise ValueError("a tensor's place is no whole numbers")
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
    raise ValueError(f"{module}.{name} is no part of a plain tensor")


_DTYPE_OF_STORAGE = {
    name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()
}


def read_box(
    file: int, chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int], target: Tensor
) -> None:
    """Reads a box of a chunk into a plain tensor of the same sizes, of any dtype and device."""
    first = sum(n * step for n, step in zip(offsets, chunk.strides, strict=True))
    begin = chunk.begin + first * chunk.dtype.itemsize
    order = memory_order(sizes, chunk.strides)
    wanted = torch.empty_strided(tuple(sizes), chunk.strides, dtype=chunk.dtype, device="meta")
    if wanted.permute(order).is_contiguous():
        turned = target.permute(order)
        if turned.is_contiguous():
            read_into(file, begin, chunk.dtype, turned.view(-1))
            return
        values = torch.empty(turned.shape, dtype=chunk.dtype)
        read_into(file, begin, chunk.dtype, values.view(-1))
        turned.copy_(values)
        return
    span = 1 + sum((n - 1) * step for n, step in zip(sizes, chunk.strides, strict=True))
    values = torch.empty(span, dtype=chunk.dtype)
    read_into(file, begin, chunk.dtype, values)
    target.copy_(values.as_strided(tuple(sizes), chunk.strides))
