"""Reads parameters that this rank has in full between calls, without other ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zerocore.tensor import pending_host_updates
from zerocore.tensor.functions import Args, Function, Kwargs
from zerocore.tensor.implicit_unshard import (
    Gathered,
    check_unchanged,
    run_full,
    version_of,
    without,
)
from zerocore.tensor.placed import Placed, PlacedParameter, leaves, local_of, shard_in


def param_of(shard: Any) -> Any:
    """Returns the parameter that ``shard`` is, or whose values it has; None without one."""
    if isinstance(shard, PlacedParameter):
        return shard
    param = shard_in(getattr(shard, "owner", lambda: None)())
    return None if param is None or param.place != shard.place else param


def stays_whole(param: Any, state: Any) -> bool:
    """Whether each rank keeps the full parameter between steps, in the dtype of its shard."""
    is_plain = param.place.part is None and param.make_view is None
    is_same = param.full.dtype == local_of(param).dtype
    return is_plain and is_same and not state.config.placements.parameters


def is_old(shard: Any, param: Any, state: Any) -> bool:
    """Whether ``shard`` is a copy of old values: the parameter has changed since."""
    version = state.engine.param_version(param.unit, param.position)
    return bool(getattr(shard, "version", version) != version)


_DEEPEST = 8  # nested functions; each recipe keeps the ones before it in memory


class Recipe(NamedTuple):
    """The way a shard was computed, only from parameters that this rank has in full."""

    func: Function
    values: tuple[Args, Kwargs]
    params: list[Any]
    versions: list[int]  # versions of ``params``, other arguments and result
    depth: int

    def is_current(self, result: Any) -> bool:
        return self.versions == _versions(self.params, (self.values, result))

    def full(self, result: Any) -> Any:
        """Computes the full result; None if this rank lacks a value, or one has changed."""
        shards = {id(v): v for v in leaves(self.values) if isinstance(v, Placed)}
        fulls = {k: held_full(v) if self.is_current(result) else None for k, v in shards.items()}
        if None in fulls.values():
            return None
        args, kwargs = tree_map_only(Placed, lambda shard: fulls[id(shard)], self.values)
        with torch.no_grad():
            return self.func(*args, **kwargs)


def keep_recipe(func: Function, args: Args, kwargs: Kwargs, result: Any) -> None:
    """Notes how a shard was computed, if this rank has the full values of all arguments."""
    params, depth = [], 1
    for value in (leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)):
        param, recipe = param_of(value), getattr(value, "recipe", None)
        state = None if param is None else param.state_ref()
        if state is not None and stays_whole(param, state) and not is_old(value, param, state):
            params.append(param)
        elif recipe is not None and recipe.depth < _DEEPEST and recipe.is_current(value):
            params += recipe.params
            depth = max(depth, recipe.depth + 1)
        elif isinstance(value, Placed) or value.dim() > 0:
            return
        if value is result:
            return  # the function has changed nothing: the dtype or shape was right already
    versions = _versions(params, ((args, kwargs), result))
    result.recipe = Recipe(func, (args, kwargs), params, versions, depth)


def _versions(params: list[Any], values: Any) -> list[int]:
    tensors = [v for v in leaves(values) if isinstance(v, Tensor) and param_of(v) is None]
    states = [(param, param.state_ref()) for param in params]
    known = [-1 if s is None else s.engine.param_version(p.unit, p.position) for p, s in states]
    return known + [version_of(tensor) for tensor in tensors]


def held_full(shard: Any) -> Tensor | None:
    """Returns the full values of a shard, in its parameter's memory or computed from it; None if
    this rank lacks some. The caller has disabled torch functions."""
    param = param_of(shard)
    state = None if param is None else param.state_ref()
    if state is None and hasattr(shard, "recipe"):
        return shard.recipe.full(shard)
    if state is None or not stays_whole(param, state) or is_old(shard, param, state):
        return None
    pending_host_updates.finish()  # gathers after a step
    if not state.engine.holds_values(param.unit, param.position):
        return None
    full: Tensor = param.full.detach().to(shard.dtype)
    return full


def call_held(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Calls a function with full values, without other ranks, and copies its changes to the shards.

    Returns NotImplemented if this rank lacks values of a shard. It also does if another argument
    is a plain tensor, which may hold only local elements.
    """
    tensors = [value for value in leaves((args, kwargs)) if isinstance(value, Tensor)]
    if not tensors or any(not isinstance(t, Placed) and t.dim() > 0 for t in tensors):
        return NotImplemented
    fulls: dict[int, Gathered] = {}
    for shard in (tensor for tensor in tensors if isinstance(tensor, Placed)):
        full = held_full(shard)
        if full is None:
            return NotImplemented
        fulls[id(shard)] = Gathered(shard, shard.what, shard.fqn, full, version_of(full))
    values = tree_map_only(Placed, lambda shard: fulls[id(shard)].full, (args, kwargs))
    with torch.no_grad():
        output = run_full(func, *values)
    for each in fulls.values():
        if isinstance(each.shard, PlacedParameter):
            check_unchanged(func, [each])
        elif version_of(each.full) != each.version:
            local_of(each.shard).copy_(each.shard.place.part_of(each.full))
    return without(list(fulls.values()), output)
