"""Finds parameters and buffers that share memory.

Sharding gives each parameter memory of its own. Parameters with the same elements in the same
layout become one with several names; any other overlap is an error, because it would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zerocore.tensor.rows import local_part


class Extent(NamedTuple):
    """The memory range of a tensor's elements; it keeps no memory alive."""

    storage: StorageWeakRef  # while it lives, no other storage gets its number
    begin: int  # in bytes
    end: int
    layout: tuple[Any, ...]  # shape, strides, dtype

    @property
    def key(self) -> object:
        """A key that is equal for the same elements in the same layout."""
        return self.storage.cdata, self.begin, self.layout

    def overlaps(self, other: Extent) -> bool:
        """Whether both, on one storage, have a byte in common."""
        begin = min(self.begin, other.begin)
        taken = torch.zeros(max(self.end, other.end) - begin, dtype=torch.bool, device="cpu")
        self._bytes_in(taken, begin).fill_(True)
        return bool(other._bytes_in(taken, begin).any())

    def _bytes_in(self, memory: Tensor, begin: int) -> Tensor:
        shape, strides, dtype = self.layout
        size = dtype.itemsize
        strides = (*(stride * size for stride in strides), 1)
        return memory.as_strided((*shape, size), strides, self.begin - begin)


def extent_of(tensor: Tensor) -> Extent | None:
    """Returns a tensor's extent; None if it has no elements or no strides."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    try:
        storage = StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError, TypeError):  # a wrapper, or without a storage
        return None
    shape, strides, size = tuple(tensor.shape), tensor.stride(), tensor.element_size()
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    begin = int(tensor.storage_offset()) * size
    return Extent(storage, begin, begin + (last + 1) * size, (shape, strides, tensor.dtype))


def tie_key(param: nn.Parameter) -> object:
    """Returns a key that is equal for parameters to tie."""
    extent = extent_of(local_part(param))
    if extent is None:
        return id(param)
    return extent.key, type(param), getattr(param, "_spec", None), param.requires_grad


def check_apart(params: Iterable[tuple[str, Extent | None]], modules: Iterable[nn.Module]) -> None:
    """Rejects a parameter that shares memory with another one, or with a buffer of ``modules`` or
    their submodules; names both."""
    by_storage: dict[int, list[tuple[Extent, bool, str]]] = {}

    def add(fqn: str, extent: Extent | None, is_param: bool) -> None:
        if extent is not None and (is_param or extent.storage.cdata in by_storage):
            by_storage.setdefault(extent.storage.cdata, []).append((extent, is_param, fqn))

    for fqn, extent in params:
        add(fqn, extent, True)
    for module in modules:
        for fqn, buffer in module.named_buffers():
            add(fqn, extent_of(local_part(buffer)), False)
    for extents in by_storage.values():
        extents.sort(key=lambda entry: entry[0].begin)
        for index, (extent, is_param, fqn) in enumerate(extents):
            for other, is_other_param, name in extents[index + 1 :]:
                if other.begin >= extent.end:
                    break
                if (is_param or is_other_param) and extent.overlaps(other):
                    raise _overlap((fqn, is_param), (name, is_other_param))


def _overlap(*pair: tuple[str, bool]) -> ValueError:
    pair = tuple(sorted(pair, key=lambda named: not named[1]))  # a parameter first
    names = [f"{'parameter' if is_param else 'buffer'} '{fqn}'" for fqn, is_param in pair]
    return ValueError(
        f"{' and '.join(names)} share memory, which sharding would separate: only parameters of "
        "the same shape, strides, dtype and requires_grad can be tied. Register "
        "one nn.Parameter in both places, or compute the other one in forward "
        "(`self.weight.t()`, `self.weight.detach()`)"
    )
