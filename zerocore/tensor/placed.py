"""Tensors that know their place, and the links from full parameters and views to their shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from zerocore.layout.place import Place
from zerocore.tensor import pending_host_updates

_LEAF = "_zerocore_leaf"  # on a view that modules see: the parameter that autograd knows
GRADIENT = "the gradient of"  # the kind of shards that are averaged already
IS_ROWS = "_zerocore_fsdp_rows"  # set on a parameter that fully_shard has made
OTHER = "_zerocore_other"  # on each of two objects that exchange their tensors: the other one


def other_of(param: Any) -> Any:
    """Returns the other object of a pair; None for a tensor without one."""
    other = getattr(param, "__dict__", {}).get(OTHER)
    return other() if isinstance(other, ref) else other


def shard_in(param: Any) -> PlacedParameter | None:
    """Returns the shard of a parameter: itself, or its other object while this one is full. None
    for a tensor that is not a parameter of a sharded model."""
    if isinstance(param, PlacedParameter):
        return param
    other = other_of(param)
    return other if isinstance(other, PlacedParameter) else None


def as_view(view: Tensor, leaf: Tensor) -> Tensor:
    """Marks ``view``, which modules see instead of ``leaf``, an engine's full parameter."""
    view.__dict__[_LEAF] = leaf
    return view


def leaf_of(tensor: Tensor) -> Tensor:
    """Returns the engine's full parameter that ``tensor`` is a view of, or ``tensor`` itself."""
    return tensor.__dict__.get(_LEAF, tensor)


class Placed:
    """The attributes and methods of all shards."""

    place: Place
    dtype: torch.dtype
    what = "the shard of"  # its kind in errors

    @property
    def fqn(self) -> str:
        return self.place.fqn

    @property
    def global_shape(self) -> torch.Size:
        """Shape of the full parameter."""
        return self.place.global_shape

    @property
    def shard_range(self) -> tuple[int, int]:
        """This rank's elements of the flattened parameter, ``(start, end)``."""
        return self.place.shard_range

    def check_readable(self) -> None:
        """Raises RuntimeError if the engine holds back the values."""

    def local(self) -> Tensor:
        """Returns the local elements as a plain 1-D tensor on the same memory."""
        return local_of(self)

    def own_part(self) -> Tensor:
        """Returns a copy that is pickled as this rank's part, for a file per rank. The same rank
        loads it, at the same stage and on the same number of ranks."""
        raise NotImplementedError

    def full_tensor(self) -> Tensor:
        """Gathers the full value, a new plain tensor of ``global_shape``; all ranks must call it.

        Raises:
            RuntimeError: the shard was loaded from a file and does not belong to a model.
        """
        return self.place.gather(local_of(self))

    def whole_tensor(self) -> Tensor:
        """Gathers the full value, or the larger tensor under a :class:`zerocore.ParameterMesh`."""
        return self.place.whole_of(self.full_tensor())


class PlacedParameter(Placed):
    """A shard that has a full parameter which layers compute with."""

    what = "parameter"
    unit: int
    state_ref: Any
    requires_grad: bool

    @property
    def full(self) -> Any:
        """The full parameter, which layers compute with."""
        return other_of(self)

    def shown(self) -> Tensor:
        """Returns the tensor that modules see while the unit is unsharded."""
        raise NotImplementedError


_as_subclass: Any = torch._C.TensorBase.as_subclass  # not the patched one of Tensor


def local_of(shard: Any) -> Tensor:
    """Returns a shard's elements as a plain tensor on the same memory, without a gradient."""
    pending_host_updates.finish()
    if isinstance(shard, Placed):
        shard.check_readable()
    with torch._C.DisableTorchFunctionSubclass():
        return _as_subclass(Tensor.detach(shard), Tensor)


def full_value_of(shard: Any) -> Tensor:
    """Returns the full value: a view of the shard if this rank has all elements, else a new tensor,
    which all ranks gather."""
    local = local_of(shard)
    whole: Tensor | None = shard.place.view_of_whole(local)
    gathered: Tensor = shard.place.gather(local) if whole is None else whole
    return gathered


def keep_place(result: Any, source: Any) -> Any:
    """Wraps a result of a shard's local elements as a shard, if it has their shape."""
    if type(result) is not Tensor or result.shape != local_of(source).shape:
        return result
    placed: Any = result.as_subclass(type(source).result_type)
    placed.place = source.place
    return placed


def outline_of(value: Any) -> Any:
    """Returns a meta tensor with a shard's full shape and strides; any other value unchanged."""
    return value.place.outline(value.dtype) if isinstance(value, Placed) else value


def leaves(value: Any) -> Iterator[Any]:
    """Yields the values in nested lists, tuples and dicts.

    Every torch function of a shard calls it; torch's ``tree_leaves`` takes seven times as long.
    """
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value
