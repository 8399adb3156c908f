"""Broadcasts rank 0's buffers, as DistributedDataParallel does."""

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
    """Copies rank 0's values to ``tensors``, of any dtypes, strides and devices; collective. The
    values travel over ``device``."""
    for tensor, value in _values_of_first(tensors, ranks, device):
        _written(local_part(tensor).detach()).copy_(value)


def _values_of_first(
    tensors: Iterable[Tensor], ranks: Ranks, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Returns the tensors with rank 0's values; an empty list on rank 0, so no version changes."""
    sent = [tensor for tensor in tensors if tensor.numel()]
    if not sent or not ranks.groups:
        return []
    # Backends support few dtypes and only contiguous memory, so all bytes travel in one tensor.
    local = [_written(local_part(tensor).detach()) for tensor in sent]
    data = torch.cat([as_bytes(tensor).to(device) for tensor in local])
    for group in reversed(ranks.groups):  # to the other replicas first
        with waiting(group, "a broadcast of buffers"):
            dist.broadcast(data, dist.get_global_rank(group, 0), group=group)
    if ranks.rank == 0:
        return []
    parts = data.split([tensor.nbytes for tensor in local])
    values = [p.clone().view(t.dtype).view(t.shape) for t, p in zip(local, parts, strict=True)]
    return list(zip(sent, values, strict=True))


def _written(tensor: Tensor) -> Tensor:
    """Returns a view with each element once: an expanded dimension has length 1."""
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]


class BufferSync:
    """The broadcast of rank 0's buffers before a model's forward; all ranks call it."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._known: dict[int, tuple[ref[Tensor], int]] = {}  # by id, after the last broadcast

    def __call__(self, model: nn.Module, buffers: Sequence[Tensor]) -> None:
        now = {id(buffer): buffer for buffer in buffers}
        for buffer, value in _values_of_first(buffers, self._ranks, self._device):
            now[id(buffer)] = self._write(model, buffer, value)
        self._known = {id(buffer): (ref(buffer), buffer._version) for buffer in now.values()}

    def _write(self, model: nn.Module, buffer: Tensor, value: Tensor) -> Tensor:
        """Writes a buffer, and returns the one that modules hold afterwards.

        An earlier forward may have saved the buffer for a backward that has not run yet. If a
        forward has replaced the buffer, the broadcast replaces it too. If a torch function has
        changed it in place, the broadcast raises its version, so that such a backward raises. Any
        other buffer is a constant, or batch-norm statistics, which change without a new version.
        """
        known, version = self._known.get(id(buffer), (None, -1))
        if self._known and (known is None or known() is not buffer):
            value = torch.empty_like(buffer).copy_(value)
            for module in model.modules():
                for key, held in module._buffers.items():
                    if held is buffer:
                        module._buffers[key] = value
            return value
        local = local_part(buffer)
        _written(local.data if version == buffer._version else local.detach()).copy_(value)
        return buffer
