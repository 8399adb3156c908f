"""Parameters that this rank has in full between calls: reads of them ask no other rank."""

from __future__ import annotations

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


def held_full(shard: Any) -> Tensor | None:
    """The full values of a shard, in the memory of its parameter; None where this rank lacks some
    of them. Torch functions are off."""
    param = param_of(shard)
    state = None if param is None else param.state_ref()
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
