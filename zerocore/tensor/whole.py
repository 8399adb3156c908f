"""Parameters of stage 0, which each rank holds in full.

They are the user's own objects, plain to torch, as under DistributedDataParallel; their values lie
in the engine's memory. The engine's shard is a hidden object on the same memory.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from zerocore._C import exchange_impls, take_node_hooks
from zerocore.tensor.parameter import ShardedParameter, as_parameter
from zerocore.tensor.placed import OTHER
from zerocore.tensor.rows import note_whole


def grad_view(engine: Any, unit: int, position: int, param: Tensor) -> Tensor:
    """Returns a tensor like ``param`` over the engine's memory of its gradient."""
    view: Tensor = engine.make_grad(unit, position).as_strided(param.shape, param.stride())
    return view


def become_whole(param: Any, memory: Tensor, elements: Tensor, facts: dict[str, Any]) -> Any:
    """Puts ``param`` on the engine's ``memory``, and returns its hidden shard over ``elements``. It
    keeps its class, attributes and hooks."""
    hooks, later = param._backward_hooks, param._post_accumulate_grad_hooks
    memory.requires_grad_(param.requires_grad)
    shard = as_parameter(elements, ShardedParameter, param.requires_grad)
    node = take_node_hooks(param, memory)
    exchange_impls(param, memory)
    vars(shard).update(facts, is_whole=True, _zerocore_node=node, **{OTHER: ref(param)})
    if hooks:
        param._backward_hooks = hooks
    if later:
        param._post_accumulate_grad_hooks = later
    note_whole(param, shard)
    return shard
