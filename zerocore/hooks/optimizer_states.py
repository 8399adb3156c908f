"""Converts optimizer states to and from shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zerocore.common import late
from zerocore.layout.place import Place
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import Placed, local_of, shard_in
from zerocore.tensor.rows import as_part, held_shard
from zerocore.tensor.shard import as_shard

_is_filled = ContextVar("is_filled", default=False)


@contextmanager
def filled_later() -> Iterator[None]:
    """Makes :func:`state_memory` return uninitialised memory, which its caller fills or drops."""
    token = _is_filled.set(True)
    try:
        yield
    finally:
        _is_filled.reset(token)


def state_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates 1-D memory for a state that begins as zeros."""
    make = torch.empty if _is_filled.get() else torch.zeros
    return make(numel, dtype=dtype, device=device)


# States that are one number: for a 0-dim parameter, states of elements have the same shape.
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
AVERAGE = "weights_average"  # the state of an EMA, beside an optimizer's states

# Attributes of an optimizer that ``first_states`` sets.
ADDED = "_zerocore_added_options"  # options that steps add to groups, by group
MADE = "_zerocore_made_states"  # a function of the optimizer, for :func:`drop_unloaded`
_P = TypeVar("_P", bound=Tensor)


def is_of_shards(optimizer: Optimizer) -> bool:
    return any(held_shard(param) is not None for param in params_of(optimizer))


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that owns the groups; a wrapper, such as accelerate's, only shows them.

    Raises TypeError if the wrapper's ``state_dict`` differs from that optimizer's.
    """
    ids = [*map(id, params_of(optimizer))]
    held = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    inner = next((candidate for candidate in held if [*map(id, params_of(candidate))] == ids), None)
    if inner is None:
        return optimizer
    inner = unwrapped(inner)
    if _keys_of(optimizer.state_dict()) != _keys_of(inner.state_dict()):
        raise TypeError(
            f"optimizer: {type(optimizer).__name__} wraps a {type(inner).__name__}, but its "
            f"state_dict differs: it has {list(optimizer.state_dict())}. Pass the inner "
            "optimizer, and save the wrapper's own state yourself"
        )
    return inner


def _keys_of(value: Any) -> Any:
    """Returns the keys of dicts in dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _keys_of(item) for key, item in value.items()}
    return [_keys_of(item) for item in value] if isinstance(value, list) else None


def params_of(optimizer: Optimizer) -> list[Any]:
    """Returns the parameters in the order in which state dicts number them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def as_state(local: Tensor, param: Any) -> Tensor:
    """Wraps this rank's part of a parameter's state as a shard or DTensor, like the parameter."""
    if isinstance(param, Placed):
        return as_shard(local, param.place)
    return as_part(local, param)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Applies ``change`` to each tensor in ``value``, also in containers and in attributes."""

    def mapped_leaf(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, Tensor) else _mapped_object(leaf, change)

    return tree_map(mapped_leaf, value)


def _mapped_object(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns a copy of an object with changed attributes, or the object if none changes."""
    attributes = getattr(value, "__dict__", None)
    if not attributes or isinstance(value, type | nn.Module | Optimizer) or callable(value):
        return value
    new = {key: mapped(item, change) for key, item in attributes.items()}
    if all(new[key] is item for key, item in attributes.items()):
        return value
    copied = copy(value)
    copied.__dict__.update(new)
    return copied


def wrap_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Wraps the states of shards in a state dict as shards, on the same memory."""
    params = params_of(optimizer)
    for group, added in zip(
        state_dict["param_groups"], getattr(optimizer, ADDED, ()), strict=False
    ):
        group.update({key: value for key, value in added.items() if key not in group})
    state_dict["state"] = {
        index: _wrapped(params[index], state) if isinstance(index, int) else state
        for index, state in state_dict["state"].items()
    }


def _wrapped(param: Any, state: Any) -> Any:
    shard: Any = shard_in(param)
    if shard is None or not isinstance(state, dict):
        return state
    return {
        key: as_shard(value, shard.place)
        if isinstance(value, Tensor) and is_part(value, shard)
        else value
        for key, value in state.items()
    }


def is_part(value: Tensor, param: ShardedParameter) -> bool:
    """Whether a plain tensor holds this rank's elements of a state. One number does not, nor does
    a tensor as long as a dimension of the full state: it may be a row or a column."""
    start, end = param.place.shard_range
    return (
        not isinstance(value, Placed)
        and value.shape == (end - start,)
        and end - start not in (1, *param.place.global_shape)
    )


def place_states(optimizer: Optimizer) -> None:
    """Wraps states that a step has made as shards; the caller has disabled torch functions."""
    for param, state in optimizer.state.items():
        if isinstance(param, ShardedParameter):
            for key, value in state.items():
                if type(value) is Tensor and value.shape == param.shape:
                    state[key] = as_shard(value, param.place)


def fit_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns this rank's part of a state dict of shards or full tensors. An option that the saved
    groups lack keeps its value. Raises ValueError with the name of a parameter that cannot fit."""
    if len(state_dict["param_groups"]) != len(optimizer.param_groups):
        return state_dict  # torch raises
    groups = [
        {**options_of(current), **saved}
        for current, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    indices = chain.from_iterable(group["params"] for group in groups)
    owners = dict(zip(indices, params_of(optimizer), strict=False))
    is_number = _numbers(optimizer)
    unsharded = {
        key
        for index, values in state_dict["state"].items()
        if isinstance(owners.get(index), ShardedParameter) and isinstance(values, dict)
        for key, value in values.items()
        if isinstance(value, Tensor) and is_other(optimizer, key, value, owners[index])
    }
    state = {
        index: {
            key: value
            if key in unsharded or is_number(owners[index], key, value)
            else mapped(value, partial(fitted, owners[index], key))
            for key, value in values.items()
        }
        if isinstance(owners.get(index), ShardedParameter) and isinstance(values, dict)
        else values
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}


def is_other(optimizer: Optimizer, key: str, value: Tensor, param: ShardedParameter) -> bool:
    """Whether a loaded state has several elements but not one for each element of the parameter
    (one for each row or block, say). No state of this name is then sharded, even if its shape fits.
    """
    place = param.place
    if isinstance(value, Placed) or value.numel() == 1 or value.shape == local_of(param).shape:
        return False
    if value.shape in (place.global_shape, place.whole_shape):
        return False
    if value.dim() != 1 or len(place.global_shape) != 1:
        return True
    if late.call("makes_shape", optimizer, param, key, value.shape):
        return True
    raise ValueError(
        f"the loaded state of parameter '{param.fqn}' has shape {tuple(value.shape)}, expected "
        f"the full {tuple(place.global_shape)}, or this rank's elements of it. To load with "
        "another stage or number of ranks, save with torch.distributed.checkpoint or "
        "zerocore.Checkpoints"
    )


def _numbers(optimizer: Optimizer) -> Callable[[ShardedParameter, str, Any], bool]:
    """Returns a test that tells numbers from the states of one-element parameters."""
    probed = cache(partial(late.call, "probed_number", optimizer))  # late: few have one element

    def is_number(param: ShardedParameter, key: str, value: Any) -> bool:
        if not isinstance(value, Tensor) or isinstance(value, Placed) or value.numel() != 1:
            return False
        if param.place.whole_shape.numel() != 1 or (value.dim() == 0 and key in NUMBERS):
            return True
        current = optimizer.state.get(param, {}).get(key)
        if current is None and not makes_all(optimizer):
            groups = enumerate(optimizer.param_groups)
            number = next(n for n, group in groups if any(p is param for p in group["params"]))
            return bool(probed(number, key, local_of(param).dtype, param.device))
        return isinstance(current, Tensor) and not isinstance(current, Placed)

    return is_number


def fitted(param: ShardedParameter, key: str, value: Any) -> Any:
    """Returns a state's value as a shard; returns a number or another object unchanged."""
    place = param.place
    if isinstance(value, Placed):
        _check_place(param, key, value.place)
        return as_shard(local_of(value), place)
    if not isinstance(value, Tensor) or (value.dim() == 0 and key in NUMBERS):
        return value
    if place.part is not None and value.shape == place.whole_shape:
        value = place.part_of_whole(value)
    if value.shape == place.global_shape:
        part = place.part_of(value)
        return as_shard(part if place.group is None else part.clone(), place)
    return value


def _check_place(param: ShardedParameter, key: str, saved: Place) -> None:
    place = param.place
    if (saved.fqn, saved.elements) != (place.fqn, place.elements):
        raise ValueError(
            f"the optimizer's state {key}{saved.origin} belongs to '{saved.fqn}', elements "
            f"{saved.text}, but this rank's parameter at its index is '{place.fqn}', elements "
            f"{place.text}. Shards load on the rank, stage and number of ranks that saved them, in "
            "the same order of parameters; to load elsewhere, save with "
            "torch.distributed.checkpoint or zerocore.Checkpoints"
        )


def drop_unloaded(optimizer: Optimizer) -> None:
    """Drops states that were made for a state dict, if none has changed; before a step."""
    drop = vars(optimizer).pop(MADE, None)
    if drop is not None:
        drop(optimizer)


def makes_all(optimizer: Optimizer) -> bool:
    """Whether the optimizer makes its states itself, all of them at once."""
    return hasattr(optimizer, "make_states")


def without_state(params: Iterable[_P], states: Mapping[Any, Any]) -> list[_P]:
    """Returns the parameters that require gradients and have no state yet."""
    return [param for param in params if param.requires_grad and not states.get(param)]
