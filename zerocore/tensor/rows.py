"""A shard that is some rows of a parameter: a DTensor, and what the engine knows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zerocore.tensor.parameter import ShardedParameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(eq=False)
class RowShard:
    """Of a DTensor what a :class:`ShardedParameter` knows of itself, by the same names."""

    fqn: str
    state_ref: Callable[[], Any]
    unit: int
    position: int
    model_weight: Tensor | None = None
    on_host: bool = False
    on_disk: bool = False


_rows: Any = WeakTensorKeyDictionary()


def note_rows(param: Tensor, shard: RowShard) -> None:
    """``param``, a DTensor, is a shard of an engine."""
    _rows[param] = shard


def forget_rows(param: Tensor) -> None:
    """The engine of ``param`` is gone."""
    _rows.pop(param, None)


def shard_of(param: Any) -> ShardedParameter | RowShard | None:
    """The shard of an engine that a parameter is, of either kind; None for another parameter."""
    if isinstance(param, ShardedParameter):
        return param
    found: RowShard | None = _rows.get(param)
    return found


def local_part(tensor: Any) -> Tensor:
    """A DTensor's part of this rank, a plain tensor on the same memory; any other as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def at_origin(tensor: Tensor) -> Tensor:
    """The same memory as a storage of its own, from the begin on.

    ``torch.save`` and ``copy.deepcopy`` take a DTensor with a storage offset for one that has data.
    """
    begin = tensor.storage_offset() * tensor.element_size()
    memory: Any = tensor.untyped_storage()
    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return own.set_(memory[begin : begin + tensor.nbytes], 0, tensor.shape, tensor.stride())


def as_dtensor(local: Tensor, like: Any) -> DTensor:
    """A DTensor over ``local`` (this rank's part), which is not copied.

    Args:
        local: a dense tensor without a gradient.
        like: a DTensor whose shape, mesh and placements are taken.
    """
    from torch.distributed.tensor import DTensor  # late: takes a second

    return DTensor(local, like._spec, requires_grad=False)


def as_part(local: Tensor, like: Tensor) -> Tensor:
    """A DTensor over ``local``, if ``like`` is one."""
    return as_dtensor(at_origin(local), like) if hasattr(like, "_spec") else local


def groups_of(param: Any) -> Sequence[dist.ProcessGroup]:
    """The groups of ranks that have other parts of a DTensor, one for each dimension."""
    spec = getattr(param, "_spec", None)
    if spec is None:
        return ()
    cut = [dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate()]
    return tuple(spec.mesh.get_group(dim) for dim in cut if spec.mesh.size(dim) > 1)
