"""Rejects torch's collectives on shards, and shows the engines' own to ``CommDebugMode``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from zerocore.common.patching import around
from zerocore.model.state import live_states
from zerocore.tensor.placed import Placed, leaves

# Before 2.13 these collectives do not dispatch to ``__torch_function__`` of their tensors.
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


_OPERATORS = {
    "all_gather": "_allgather_base_",
    "gather_near": "_allgather_base_",
    "gather_sums": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
    "all_reduce": "allreduce_",
    "all_to_all": "alltoall_base_",
}
_BEFORE = "_zerocore_before"


def _collectives() -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for state in live_states():
        for op, name in _OPERATORS.items():
            counts[getattr(torch.ops.c10d, name)] += state.engine.counters[op].count
    return counts


@around
def begins_to_count(enter: Any, mode: Any) -> Any:
    """Wraps ``CommDebugMode.__enter__``: notes how many collectives engines have issued so far."""
    result = enter(mode)
    vars(mode)[_BEFORE] = _collectives()
    return result


@around
def counts_issued(leave: Any, mode: Any, *args: Any) -> Any:
    """Wraps ``CommDebugMode.__exit__``: adds the collectives that engines have issued since."""
    for op, count in (_collectives() - vars(mode).pop(_BEFORE, Counter())).items():
        mode.comm_counts[op] += count
    return leave(mode, *args)
