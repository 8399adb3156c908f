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


def broadcast(tensors: Iterable[Tensor], ranks: Ranks, device: torch.device) -> None:
    """Gives ``tensors``, of any dtypes, strides and devices, the values of rank 0, by way of the
    ranks' ``device``; all ranks call."""
    if not ranks.groups:
        return
    found = [_written(local_part(tensor).detach()) for tensor in tensors if tensor.numel()]
    if not found:
        return
    # Backends know few dtypes and only dense memory in order, so the bytes travel, all at once.
    data = torch.cat([as_bytes(tensor).to(device) for tensor in found])
    for group in reversed(ranks.groups):  # to the other replicas first
        with waiting(group, "a broadcast of buffers"):
            dist.broadcast(data, dist.get_global_rank(group, 0), group=group)
    if ranks.rank == 0:
        return  # not even a version counter changes
    parts = data.split([tensor.nbytes for tensor in found])
    for tensor, part in zip(found, parts, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _written(tensor: Tensor) -> Tensor:
    """Each element of an expanded tensor once; others as they are."""
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]
