"""Buffers that follow rank 0's, as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerocore._C import Engine
from zerocore.common.alarm import waiting
from zerocore.model.casting import as_bytes
from zerocore.model.ranks import Ranks
from zerocore.tensor.rows import local_part


def broadcast(tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Gives ``tensors``, of any dtypes and strides, the values of rank 0; all ranks call."""
    found = [local_part(tensor).detach() for tensor in tensors if tensor.numel()]
    if not found or not ranks.groups:
        return
    # Backends know few dtypes and only dense memory in order, so the bytes travel, all at once.
    data = torch.cat([as_bytes(tensor) for tensor in found])
    for group in reversed(ranks.groups):  # to the other replicas first
        with waiting(group, "a broadcast of buffers"):
            dist.broadcast(data, dist.get_global_rank(group, 0), group=group)
    if ranks.rank == 0:
        return  # not even a version counter changes
    parts = data.split([tensor.nbytes for tensor in found])
    for tensor, part in zip(found, parts, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


class BufferSync:
    """Broadcasts a model's buffers before the calls that could see other ones than rank 0's.

    These are the first call, and those behind one that recorded gradients outside of ``no_sync``:
    DistributedDataParallel broadcasts before the same ones.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, engine: Engine) -> None:
        self._model = ref(model)
        self._ranks, self._engine = ranks, engine
        self._is_due = True

    def before_call(self) -> None:
        """Called on all ranks before each call of the model."""
        model = self._model()
        if self._is_due and model is not None:
            broadcast(model.buffers(), self._ranks)
        self._is_due = torch.is_grad_enabled() and self._engine.sync
