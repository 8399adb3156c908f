"""Pickles shards as full tensors if this rank has all values, else raises.

A file with one rank's part would look like a checkpoint until a program loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from zerocore.layout.place import Place
from zerocore.tensor.held import held_full, is_old, param_of, stays_whole
from zerocore.tensor.placed import local_of, shard_in

_as_parts = ContextVar("as_parts", default=False)
_MEMORY = "_zerocore_pickled"  # on a parameter: its full values in the current pickle


@contextmanager
def pickled_as_parts() -> Iterator[None]:
    """Pickles shards as this rank's parts within the block: every rank saves its own file."""
    token = _as_parts.set(True)
    try:
        yield
    finally:
        _as_parts.reset(token)


def goes_as_part(place: Place) -> bool:
    """Whether a shard at ``place`` is pickled as this rank's part."""
    return place.is_own or _as_parts.get()


def keep_owner(copy: Any, source: Any) -> Any:
    """Notes that ``copy`` has the current values of its source's parameter, until that changes;
    returns the copy."""
    param: Any = shard_in(getattr(source, "owner", lambda: None)())
    state = None if param is None else param.state_ref()
    is_rounded = param is not None and source.dtype not in (param.dtype, copy.dtype)
    if state is not None and not is_rounded and type(copy) is type(source) and copy is not source:
        copy.owner = source.owner
        copy.version = getattr(source, "version", None)
        if copy.version is None:
            copy.version = state.engine.param_version(param.unit, param.position)
    return copy


def forget_owners(changed: Iterable[Any]) -> None:
    """Forgets the parameters of changed copies, which have other values now."""
    for copy in changed:
        if hasattr(copy, "version"):
            vars(copy).pop("owner", None)


def whole_of(shard: Any) -> Tensor:
    """Returns a shard's full tensor, new and plain, without other ranks. TypeError if this rank
    lacks a part of it, RuntimeError if its values are old."""
    place, param = shard.place, param_of(shard)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if place.part is None and place.group is None:
            return _tied(shard, param, local_of(shard))
        return _tied(shard, param, place.flat(_held(shard, param)))


def _held(shard: Any, param: Any) -> Tensor:
    place = shard.place
    start, end = place.shard_range
    held = f"{end - start} of {place.whole_shape.numel()} elements ({start}:{end})"
    lines = (
        "call zerocore.full_state_dict(model) on all ranks (zerocore.full_optimizer_state_dict("
        "optimizer) for states), and save the result on one; or use zerocore.Checkpoints"
    )
    state = None if param is None else param.state_ref()
    if state is None or not stays_whole(param, state):
        raise TypeError(
            f"{shard.what} '{place.fqn}' cannot be pickled: it has only this rank's part, {held}, "
            f"and the file would lack the rest. To save the full value, {lines}. To save this "
            "rank's part alone, pickle .own_part()"
        )
    if (full := held_full(shard)) is None:
        when = "the copy was made" if is_old(shard, param, state) else "the last all-gather"
        raise RuntimeError(
            f"{shard.what} '{place.fqn}' cannot be pickled now: the parameter has changed since "
            f"{when}, and this rank has only {held} of the values to save. Save after the next "
            f"forward, which gathers the parameter; or {lines}"
        )
    return full


def _tied(shard: Any, param: Any, flat: Tensor) -> Tensor:
    """Returns the full tensor of all elements; names of one parameter share memory in a file."""
    outline = shard.place.outline(shard.dtype)
    is_shared = param is not None and not hasattr(shard, "version")
    memory = getattr(param, _MEMORY, lambda: None)() if is_shared else None
    if memory is None:
        memory = flat.to(shard.dtype, copy=True).untyped_storage()
        if is_shared:
            setattr(param, _MEMORY, ref(memory))  # the pickler keeps the memory alive
    full = torch.empty(0, dtype=shard.dtype, device=memory.device)
    return full.set_(memory, 0, outline.shape, outline.stride())
