"""Buffers that follow rank 0's, as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerocore.common.alarm import waiting
from zerocore.model.casting import as_bytes
from zerocore.model.ranks import Ranks
from zerocore.tensor.rows import local_part


def broadcast(tensors: Iterable[Tensor], ranks: Ranks, device: torch.device) -> None:
    """Gives ``tensors``, of any dtypes, strides and devices, the values of rank 0, by way of the
    ranks' ``device``; all ranks call."""
    for tensor, value in _values_of_first(tensors, ranks, device):
        _written(local_part(tensor).detach()).copy_(value)


def _values_of_first(
    tensors: Iterable[Tensor], ranks: Ranks, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """The tensors with rank 0's values; none on rank 0, where not even a version changes."""
    found = [tensor for tensor in tensors if tensor.numel()]
    if not found or not ranks.groups:
        return []
    # Backends know few dtypes and only dense memory in order, so the bytes travel, all at once.
    own = [_written(local_part(tensor).detach()) for tensor in found]
    data = torch.cat([as_bytes(tensor).to(device) for tensor in own])
    for group in reversed(ranks.groups):  # to the other replicas first
        with waiting(group, "a broadcast of buffers"):
            dist.broadcast(data, dist.get_global_rank(group, 0), group=group)
    if ranks.rank == 0:
        return []
    parts = data.split([tensor.nbytes for tensor in own])
    values = [p.clone().view(t.dtype).view(t.shape) for t, p in zip(own, parts, strict=True)]
    return list(zip(found, values, strict=True))


def _written(tensor: Tensor) -> Tensor:
    """Each element of an expanded tensor once; others as they are."""
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]


class BufferSync:
    """Broadcasts of rank 0's buffers before calls of a model; all ranks call."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._known: dict[int, tuple[ref[Tensor], int]] = {}  # by id, after the last broadcast

    def __call__(self, model: nn.Module, buffers: Sequence[Tensor]) -> None:
        now = {id(buffer): buffer for buffer in buffers}
        for buffer, value in _values_of_first(buffers, self._ranks, self._device):
            now[id(buffer)] = self._write(model, buffer, value)
        self._known = {id(each): (ref(each), each._version) for each in now.values()}

    def _write(self, model: nn.Module, buffer: Tensor, value: Tensor) -> Tensor:
        """Returns the buffer that modules hold afterwards.

        A forward before may have saved the buffer for a backward that is still to come.

        If the forward has replaced the buffer, so does the broadcast. A change by torch's functions
        is one that a backward must hear of. All else is a constant, or statistics that batch norm
        changes without a word to autograd.
        """
        known, version = self._known.get(id(buffer), (None, -1))
        if self._known and (known is None or known() is not buffer):
            value = torch.empty_like(buffer).copy_(value)
            for module in model.modules():
                for key, each in module._buffers.items():
                    if each is buffer:
                        module._buffers[key] = value
            return value
        own = local_part(buffer)
        _written(own.data if version == buffer._version else own.detach()).copy_(value)
        return buffer
