"""Rejects torch's collectives on shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from zerocore.common.patching import around
from zerocore.tensor.placed import Placed, leaves

# Before torch 2.13, these collectives do not dispatch to ``__torch_function__`` of their tensors.
UNASKED = (
    *("all_gather_coalesced", "all_reduce_coalesced", "all_to_all", "broadcast", "gather"),
    *("irecv", "isend", "recv", "reduce", "reduce_scatter", "scatter", "send"),
)


@around
def sends_no_shards(
    send: Any, group: Any, tensors: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Rejects a broadcast of a list that contains shards, before anything is sent.

    The shards' rules reject other collectives. Wrappers and trainers call this one to copy the
    module of rank 0 to all ranks; it bypasses the rules.
    """
    for tensor in tensors:
        if isinstance(tensor, Placed) and tensor.place.groups:
            raise TypeError(
                f"broadcast of the shard of '{tensor.place.fqn}': each rank holds other "
                "elements and would lose them. zerocore.shard has given all ranks the values "
                "of rank 0; leave the broadcast out. If a trainer calls it, use "
                "zerocore.integrations (transformers, accelerate, lightning)"
            )
    return send(group, tensors, *args, **kwargs)


@around
def asks_shards(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Dispatches a collective to the rules of the shards among its tensors."""
    tensors = tuple(value for value in leaves((args, kwargs)) if isinstance(value, Tensor))
    if has_torch_function(tensors):
        return handle_torch_function(function, tensors, *args, **kwargs)
    return function(*args, **kwargs)
