"""Buffers that follow rank 0's, as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

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
