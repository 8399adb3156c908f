"""Shows the collectives of the engines to torch's ``CommDebugMode``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from zerocore.common.patching import around
from zerocore.model.state import live_states

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
