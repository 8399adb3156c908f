"""Values of tensors that are shards at some stages and plain at stage 0, and flat buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zerocore.tensor.placed import Placed


def full_of(value: Any) -> Tensor:
    """The full value of a shard, which all ranks gather, or of a plain tensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


def own_of(value: Any) -> Tensor:
    """This rank's elements of a shard, or all of a plain tensor: 1-D, on the same memory."""
    if isinstance(value, Placed):
        return value.local()
    return value.detach().as_strided((value.numel(),), (1,))


def range_of(parameter: Any) -> tuple[int, int]:
    """This rank's range in a flattened parameter; all of a plain one."""
    return getattr(parameter, "shard_range", (0, parameter.numel()))


def views_of(flat: Tensor, params: list[Any]) -> list[Tensor]:
    """Views of a 1-D tensor in the shapes of the parameters, one after the other."""
    parts = flat.split([p.numel() for p in params])
    return [part.view(p.shape) for part, p in zip(parts, params, strict=True)]
