"""Copies modules of sharded models, for ``copy.deepcopy``: the copy is a sharded model, too."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerocore._C import exchange_impls
from zerocore.model.state import ShardState, state_of
from zerocore.model.unit_call import FORWARD_METHOD, refuse_copy
from zerocore.sharding.collect import shard_model
from zerocore.tensor.parameter import attributes_of
from zerocore.tensor.rows import held_shard

_PACKAGE = str(Path(__file__).parents[1])
_WITHIN = "zerocore: within a copy of a module"  # in the memo of an outer copy


def copy_module(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Makes a copy that is sharded as the module's model is: same ranks, options and units; all
    ranks call it. Parameters have no gradients, as in a copy of a plain module.

    Raises:
        TypeError: parameters have parts that only some ranks share, are views or gather themselves;
            or the same ``deepcopy`` has copied another module with some of the parameters.
    """
    if _WITHIN in memo:
        return _copy_plainly(module, memo)
    state = state_of(module)
    _check(module, state)
    params = {id(p): p for p in module.parameters() if held_shard(p) is not None}
    memo[_WITHIN] = True
    memo.update((key, _outline_of(param, memo.get(key))) for key, param in params.items())
    copied = _copy_plainly(module, memo)
    del memo[_WITHIN]
    near = state.config.communication.num_near
    communication = replace(state.config.communication, regather=near if near > 1 else None)
    config = replace(state.config, communication=communication, sync_params=False)
    units: Any = state.given_units
    if module is not state.model():
        below = {*module.modules()} - {module}
        chosen = dict.fromkeys(inner for unit in state.units for inner in unit.modules)
        units = [memo[id(inner)] for inner in chosen if inner in below]
    options: dict[str, Any] = {"device": state.device, "init_fn": lambda _: None}
    shard_model(copied, lambda: config, state.given_ranks, units=units, **options)
    with torch.no_grad():
        for key, param in params.items():
            memo[key].copy_(param)
    for source in module.modules():
        for name, value in vars(source).items():
            if hasattr(value, FORWARD_METHOD):
                state.kind.wrap_method(memo[id(source)], name)
    return copied


def _check(module: nn.Module, state: ShardState) -> None:
    has_parts = state.tensor_ranks is not None or len(state.meshes) > 1
    has_views = any(unit.views or unit.several for unit in state.units)
    if state.kind.by_rows or has_parts or has_views or state.extensions:
        refuse_copy(type(module).__name__, "copied")


def _outline_of(param: Any, copied: Any) -> nn.Parameter:
    """Returns a parameter without values, of the full shape. ``copied``: an earlier copy of the
    shard, as in an optimizer that is copied before its model; it becomes the outline."""
    place = held_shard(param).place
    full = torch.empty_like(place.outline(param.dtype), dtype=param.dtype)
    outline = nn.Parameter(full, requires_grad=param.requires_grad)
    if copied is not None:
        if held_shard(copied) is not None:
            raise TypeError(
                f"parameter '{place.fqn}' is in two of the copied modules, which are sharded one "
                "by one: copy a module that has both"
            )
        exchange_impls(copied, outline)
        vars(copied).clear()
        copied.__class__, outline = nn.Parameter, copied
    vars(outline).update(attributes_of(param))
    return outline


def _copy_plainly(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    cls: Any = type(module)
    if hasattr(cls, "__deepcopy__"):
        return cls.__deepcopy__(module, memo)
    copied: nn.Module = cls.__new__(cls)
    memo[id(module)] = copied
    state = cls.__getstate__(module)
    own = {key: _own_hooks(key, value) for key, value in state.items() if not _is_ours(key, value)}
    copied.__setstate__(deepcopy(own, memo))
    return copied


def _own_hooks(key: str, value: Any) -> Any:
    """Returns a registry of hooks without those of ``shard``; any other value unchanged."""
    if not key.endswith("_hooks") or not isinstance(value, dict):
        return value
    kept = type(value)()
    kept.update((key, item) for key, item in value.items() if not _is_ours("", item))
    return kept


def _is_ours(key: str, value: Any) -> bool:
    """Whether ``shard`` has set this attribute or hook of a module."""
    if key.startswith("_zerocore") or type(value).__module__.partition(".")[0] == "zerocore":
        return True
    function: Any = getattr(value, "hook", value)  # torch wraps hooks of loading
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_PACKAGE)
