"""States of optimizers as parts of full tensors: in their state dicts, and made without a step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy, deepcopy
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zerocore.layout.place import Place
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import Placed, local_of, shard_in
from zerocore.tensor.rows import as_part, own_elements
from zerocore.tensor.shard import as_shard

_is_filled = ContextVar("is_filled", default=False)


@contextmanager
def filled_later() -> Iterator[None]:
    """Inside, :func:`state_memory` leaves memory as it is; who asks for it fills or drops it."""
    token = _is_filled.set(True)
    try:
        yield
    finally:
        _is_filled.reset(token)


def state_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1-D memory of states that are zeros at first."""
    make = torch.empty if _is_filled.get() else torch.zeros
    return make(numel, dtype=dtype, device=device)


# Numbers, not elements: in the state of a parameter without dimensions they look alike.
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})

_ADDED = "_zerocore_added_options"
_P = TypeVar("_P", bound=Tensor)


def is_of_shards(optimizer: Optimizer) -> bool:
    return any(isinstance(param, ShardedParameter) for param in params_of(optimizer))


def params_of(optimizer: Optimizer) -> list[Any]:
    """The parameters in the order in which state dicts count them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def as_state(local: Tensor, param: Any) -> Tensor:
    """``local``, this rank's part of a parameter's state, as a shard or DTensor like that."""
    if isinstance(param, Placed):
        return as_shard(local, param.place)
    return as_part(local, param)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with ``change`` of each tensor, in containers and in objects of other classes."""

    def each(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, Tensor) else _mapped_object(leaf, change)

    return tree_map(each, value)


def _mapped_object(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of an object with other tensors among its attributes, or itself."""
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
    """Gives elements of shards in a state dict their place, on the same memory."""
    params = params_of(optimizer)
    for group, added in zip(
        state_dict["param_groups"], getattr(optimizer, _ADDED, ()), strict=False
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
    """Whether a plain tensor is this rank's elements of a state: 1-D, and neither a number nor a
    row, a column or all of the full state."""
    local = local_of(param).shape
    return (
        not isinstance(value, Placed)
        and value.shape == local
        and value.numel() not in (1, *param.place.global_shape)
    )


def place_states(optimizer: Optimizer) -> None:
    """Gives states that a step has made their place; torch functions are off, there and here."""
    for param, state in optimizer.state.items():
        if isinstance(param, ShardedParameter):
            for key, value in state.items():
                if type(value) is Tensor and value.shape == param.shape:
                    state[key] = as_shard(value, param.place)


def fit_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a state dict: its shards, or its parts of full tensors. An option that
    the saved groups lack keeps its value. ValueError with the parameter's name."""
    if len(state_dict["param_groups"]) != len(optimizer.param_groups):
        return state_dict  # torch says so
    groups = [
        {**options_of(own), **new}
        for own, new in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    saved = list(chain.from_iterable(group["params"] for group in groups))
    owners = dict(zip(saved, params_of(optimizer), strict=False))
    is_number = _numbers(optimizer)
    others = {
        key
        for index, values in state_dict["state"].items()
        if isinstance(owners.get(index), ShardedParameter) and isinstance(values, dict)
        for key, value in values.items()
        if isinstance(value, Tensor) and is_other(value, owners[index])
    }
    state = {
        index: {
            key: value
            if key in others or is_number(owners[index], key, value)
            else mapped(value, partial(fitted, owners[index], key))
            for key, value in values.items()
        }
        if isinstance(owners.get(index), ShardedParameter) and isinstance(values, dict)
        else values
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}


def is_other(value: Tensor, param: ShardedParameter) -> bool:
    """Whether a loaded state has several elements but not one for each element of the parameter
    (one for each row, say). No state of this name is then sharded, even if its shape fits."""
    place = param.place
    if isinstance(value, Placed) or value.numel() == 1 or value.shape == local_of(param).shape:
        return False
    if value.dim() == 1 and len(place.global_shape) == 1 and value.shape != place.whole_shape:
        raise ValueError(
            f"the loaded state of parameter '{param.fqn}' has shape {tuple(value.shape)}, expected "
            f"the full {tuple(place.global_shape)}, or this rank's elements of it. Save with "
            "torch.distributed.checkpoint or zerocore.Checkpoints to load with another stage or "
            "number of ranks"
        )
    return value.shape not in (place.global_shape, place.whole_shape)


def _numbers(optimizer: Optimizer) -> Callable[[ShardedParameter, str, Any], bool]:
    """Tells numbers from the states of parameters of one element, which have no other shape."""

    @cache
    def probed(number: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        try:
            return _probed(optimizer, optimizer.param_groups[number], dtype, device)
        except Exception:  # what it needs a probe may lack
            return {}

    def is_number(param: ShardedParameter, key: str, value: Any) -> bool:
        if not isinstance(value, Tensor) or isinstance(value, Placed) or value.numel() != 1:
            return False
        if param.place.whole_shape.numel() != 1 or (value.dim() == 0 and key in NUMBERS):
            return True
        own = optimizer.state.get(param, {}).get(key)
        if own is None and not makes_all(optimizer):
            groups = enumerate(optimizer.param_groups)
            number = next(n for n, group in groups if any(p is param for p in group["params"]))
            own = probed(number, local_of(param).dtype, param.device).get(key)
            return isinstance(own, Tensor) and own.shape != (2,)
        return isinstance(own, Tensor) and not isinstance(own, Placed)

    return is_number


def fitted(param: ShardedParameter, key: str, value: Any) -> Any:
    """A state's value as a shard; what holds no elements stays as it is."""
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
    own = param.place
    if (saved.fqn, saved.elements) != (own.fqn, own.elements):
        raise ValueError(
            f"the optimizer's state {key}{saved.origin} is that of '{saved.fqn}', elements "
            f"{saved.text}, but "
            f"this rank's parameter in its place is '{own.fqn}', elements {own.text}. Shards load "
            "on the rank, stage and number of ranks that saved them, in the same order of "
            "parameters; for others save with torch.distributed.checkpoint or zerocore.Checkpoints"
        )


def makes_all(optimizer: Optimizer) -> bool:
    """Whether the optimizer makes its states itself, all of them at once."""
    return hasattr(optimizer, "make_states")


def make_states(optimizer: Optimizer) -> None:
    """Makes the states that are not there yet, as a first step would find them; takes no step."""
    own: Any = optimizer
    if makes_all(optimizer):
        own.make_states()
        return
    for group in optimizer.param_groups:
        probed: dict[tuple[torch.dtype, torch.device], dict[str, Any]] = {}
        for param in without_state(group["params"], optimizer.state):
            local = own_elements(param)
            kind = (local.dtype, local.device)
            if kind not in probed:
                probed[kind] = _probed(optimizer, group, *kind)
            state = dict(_first_states(param, probed[kind]))
            if state:
                optimizer.state[param] = state


def first_keys(optimizer: Optimizer) -> Callable[[Any], set[str]]:
    """Keys of the states that each parameter's first step makes, of those that it has."""
    known: dict[int, set[str]] = {}
    for group in () if makes_all(optimizer) else optimizer.param_groups:
        some = group["params"][:1]
        keys = [_probed(optimizer, group, own_elements(p).dtype, p.device) for p in some]
        known.update({id(param): set(keys[0]) for param in group["params"]})

    def needed(param: Any) -> set[str]:
        own = set(optimizer.state.get(param, {}))
        return own & known.get(id(param), own)

    return needed


def _probed(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The state of a vector of two elements, other than a number's, after a step."""
    return stepped_state(optimizer, group, _probe(dtype, device))


def _probe(dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    probe = nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
    probe.grad = torch.zeros_like(probe)
    return probe


def note_added_options(optimizer: Optimizer) -> None:
    """State dicts have the options that steps add to groups, also before the first step: zeros."""
    added: list[dict[str, Any]] = []
    for group in () if makes_all(optimizer) else optimizer.param_groups:
        local = own_elements(group["params"][0]) if group["params"] else torch.empty(0)
        twin = _stepped(optimizer, group, _probe(local.dtype, local.device))
        new = {key: v for key, v in options_of(twin.param_groups[0]).items() if key not in group}
        added.append({key: _zero(value) for key, value in new.items()})
    setattr(optimizer, _ADDED, added)


def _zero(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return type(value)(0) if type(value) in (int, float) else value


def without_state(params: Iterable[_P], states: Mapping[Any, Any]) -> list[_P]:
    """The trained ones of the parameters whose states have not been made yet."""
    return [param for param in params if param.requires_grad and not states.get(param)]


def _first_states(param: Any, probed: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and first values of the states, from those of a parameter of two elements."""
    local = own_elements(param)
    for key, value in probed.items():
        if not isinstance(value, Tensor):
            yield key, 0 if key == "step" else deepcopy(value)
        elif value.shape != (2,):
            yield key, torch.zeros_like(value) if key == "step" else value.clone()
        elif isinstance(param, Placed) and not value.any():
            zeros = state_memory(local.numel(), value.dtype, local.device)
            yield key, as_shard(zeros, param.place)
        else:
            full = torch.full_like(local, value[0].item(), dtype=value.dtype)
            yield key, as_state(full, param)


def stepped_state(
    optimizer: Optimizer, group: dict[str, Any], probe: nn.Parameter
) -> dict[str, Any]:
    """The state of a parameter that is none of the optimizer's, after a step with its ``grad``."""
    return _stepped(optimizer, group, probe).state[probe]


def _stepped(optimizer: Optimizer, group: dict[str, Any], probe: nn.Parameter) -> Any:
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's, which counts the optimizer's steps
    twin.param_groups = [{**deepcopy(options_of(group)), "params": [probe]}]
    twin.state = defaultdict(dict)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.step()
    return twin
