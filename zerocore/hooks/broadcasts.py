"""Refuses the broadcast of a module's states where they are shards, which ranks would lose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch.distributed
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from zerocore.tensor.place import Placed

_WRAPPED = "_zerocore_wrapped"
# Before 2.13 torch does not ask the tensors of these, as it does those of the other collectives.
_UNASKED = (
    *("all_gather_coalesced", "all_reduce_coalesced", "all_to_all", "broadcast", "gather"),
    *("irecv", "isend", "recv", "reduce", "reduce_scatter", "scatter", "send"),
)


def refuse_broadcasts() -> None:
    """From now on torch refuses to broadcast lists that hold shards, before anything is sent; once.

    Other collectives of shards are refused by their rules. This one, with which wrappers and
    trainers give all ranks the module of rank 0, goes past them.
    """
    dist: Any = torch.distributed
    send = dist._broadcast_coalesced
    if hasattr(send, _WRAPPED):
        return
    for name in _UNASKED:
        function = getattr(dist, name)
        if "has_torch_function" not in inspect.unwrap(function).__code__.co_names:
            asking = _asking(function)
            setattr(dist, name, asking)
            setattr(dist.distributed_c10d, name, asking)

    @wraps(send)
    def check_first(group: Any, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for tensor in tensors:
            if isinstance(tensor, Placed) and tensor.place.group is not None:
                raise TypeError(
                    f"broadcast of the shard of '{tensor.place.fqn}': each rank holds other "
                    "elements and would lose them. zerocore.shard has given all ranks the values "
                    "of rank 0; leave the broadcast out, or where a trainer does it use "
                    "zerocore.integrations (transformers, accelerate, lightning)"
                )
        return send(group, tensors, *args, **kwargs)

    setattr(check_first, _WRAPPED, True)
    dist._broadcast_coalesced = check_first


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that lets shards among its tensors decide, by their rules."""

    @wraps(function)
    def ask_first(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(_tensors((*args, *kwargs.values())))
        if has_torch_function(tensors):
            return handle_torch_function(ask_first, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    return ask_first


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
