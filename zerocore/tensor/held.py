"""Parameters that this rank has in full between calls: reads of them ask no other rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zerocore.tensor import pending_host_updates
from zerocore.tensor.functions import Args, Function, Kwargs
from zerocore.tensor.implicit_unshard import check_unchanged, version_of, without
from zerocore.tensor.placed import Placed, PlacedParameter, leaves, local_of, shard_in


def param_of(shard: Any) -> Any:
    """The parameter that ``shard`` is, or whose values it has; None if there is none."""
    if isinstance(shard, PlacedParameter):
        return shard
    param = shard_in(getattr(shard, "owner", lambda: None)())
    return None if param is None or param.place != shard.place else param


def stays_whole(param: Any, state: Any) -> bool:
    """Whether each rank keeps the full parameter between steps, of the type of its shard."""
    is_plain = param.place.part is None and param.make_view is None
    is_same = param.full.dtype == local_of(param).dtype
    return is_plain and is_same and not state.config.placements.parameters


def is_old(shard: Any, param: Any, state: Any) -> bool:
    """Whether ``shard`` is a copy of values that the parameter does not have any more."""
    version = state.engine.param_version(param.unit, param.position)
    return bool(getattr(shard, "version", version) != version)


_DEEPEST = 8  # functions of functions; each keeps those before it in memory


@dataclass(frozen=True)
class Recipe:
    """How a shard was computed from nothing but parameters that this rank has in full."""

    func: Function
    values: tuple[Args, Kwargs]
    params: list[tuple[Any, int]]  # and the version that each had
    versions: list[int]  # of the result and of what is no parameter's
    depth: int = 1

    def is_current(self, result: Any) -> bool:
        return self.versions == _versions(self.values, result) and all(
            _param_version(param) == version for param, version in self.params
        )

    def full(self, result: Any) -> Tensor | None:
        """The full result; None if this rank lacks a value, or one has changed."""
        fulls: dict[int, Any] = {}
        for shard in _tensors_in(self.values, Placed) if self.is_current(result) else ():
            if id(shard) not in fulls:
                fulls[id(shard)] = held_full(shard)
        if not fulls or any(full is None for full in fulls.values()):
            return None
        args, kwargs = tree_map_only(Placed, lambda shard: fulls[id(shard)], self.values)
        with torch.no_grad():
            full: Tensor = self.func(*args, **kwargs)
        return full


def keep_recipe(func: Function, args: Args, kwargs: Kwargs, result: Any) -> None:
    """Notes how a shard was computed, if no other rank knows more of it."""
    values, params, depth = (args, kwargs), [], 1
    for tensor in _tensors_in(values, Tensor):
        param = param_of(tensor)
        state = None if param is None else param.state_ref()
        recipe: Recipe | None = getattr(tensor, "recipe", None)
        if state is not None and stays_whole(param, state) and not is_old(tensor, param, state):
            params.append((param, _param_version(param)))
        elif recipe is not None and recipe.depth < _DEEPEST and recipe.is_current(tensor):
            params += recipe.params
            depth = max(depth, recipe.depth + 1)
        elif isinstance(tensor, Placed) or tensor.dim() > 0:
            return
        if tensor is result:
            return  # of the same dtype, or shape
    result.recipe = Recipe(func, values, params, _versions(values, result), depth)


def _tensors_in(values: Any, kind: type) -> list[Any]:
    return [value for value in leaves(values) if isinstance(value, kind)]


def _versions(values: Any, result: Any) -> list[int]:
    others = [tensor for tensor in _tensors_in(values, Tensor) if param_of(tensor) is None]
    return [version_of(tensor) for tensor in (*others, result)]


def _param_version(param: Any) -> int:
    state = param.state_ref()
    return -1 if state is None else int(state.engine.param_version(param.unit, param.position))


def held_full(shard: Any) -> Tensor | None:
    """The full values of a shard, in the memory of its parameter or computed from these; None where
    this rank lacks some of them. Torch functions are off."""
    param = param_of(shard)
    state = None if param is None else param.state_ref()
    recipe: Recipe | None = getattr(shard, "recipe", None)
    if state is None and recipe is not None:
        return recipe.full(shard)
    if state is None or not stays_whole(param, state) or is_old(shard, param, state):
        return None
    pending_host_updates.finish()  # gathers behind a step
    if not state.engine.holds_values(param.unit, param.position):
        return None
    full: Tensor = param.full.detach().to(shard.dtype)
    return full


def call_held(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Calls a function that only reads with full values, asking no rank.

    NotImplemented if this rank lacks values of a shard, or a plain tensor stands beside it: that
    may be a shard of another rank's view.
    """
    found = [value for value in leaves((args, kwargs)) if isinstance(value, Tensor)]
    if not found or any(not isinstance(value, Placed) and value.dim() > 0 for value in found):
        return NotImplemented
    fulls: dict[int, tuple[tuple[str, str], Tensor, int]] = {}
    for shard in (value for value in found if isinstance(value, Placed)):
        full = held_full(shard)
        if full is None:
            return NotImplemented
        fulls[id(shard)] = ((shard.what, shard.fqn), full, version_of(full))
    values = tree_map_only(Placed, lambda shard: fulls[id(shard)][1], (args, kwargs))
    with torch.no_grad():
        output = func(*values[0], **values[1])
    check_unchanged(func, list(fulls.values()))
    return without(list(fulls.values()), output)
