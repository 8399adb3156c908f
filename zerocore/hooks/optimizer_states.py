"""Converts optimizer states to and from shards, and makes them without a step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy, deepcopy
from functools import cache, partial
from itertools import chain
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zerocore._C import show_grad
from zerocore.layout.place import Place
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import Placed, leaves, local_of, shard_in
from zerocore.tensor.rows import as_part, own_elements
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


# States that are one number: for a 0-dim parameter their shape does not tell them from elements.
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
AVERAGE = "weights_average"  # the state of an EMA, beside those of an optimizer

_BEFORE = {"step": 0, "mu_product": 1}  # before a first step, which a probe has taken
_ADDED = "_zerocore_added_options"
_MADE = "_zerocore_made_states"
_P = TypeVar("_P", bound=Tensor)


def is_of_shards(optimizer: Optimizer) -> bool:
    return any(isinstance(param, ShardedParameter) for param in params_of(optimizer))


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that owns the groups; a wrapper, such as accelerate's, only shows them.

    Raises TypeError if the wrapper's ``state_dict`` differs from that optimizer's.
    """
    ids = [*map(id, params_of(optimizer))]
    held = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    inner = next((each for each in held if [*map(id, params_of(each))] == ids), None)
    if inner is None:
        return optimizer
    inner = unwrapped(inner)
    if _keys_of(optimizer.state_dict()) != _keys_of(inner.state_dict()):
        raise TypeError(
            f"optimizer: {type(optimizer).__name__} wraps a {type(inner).__name__}, and its "
            f"state_dict is another one, with {list(optimizer.state_dict())}. Pass the inner "
            "optimizer, and save the wrapper's own state yourself"
        )
    return inner


def _keys_of(value: Any) -> Any:
    """Returns the keys of dicts in dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _keys_of(each) for key, each in value.items()}
    return [_keys_of(each) for each in value] if isinstance(value, list) else None


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
        if isinstance(value, Tensor) and is_other(value, owners[index])
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


def is_other(value: Tensor, param: ShardedParameter) -> bool:
    """Whether a loaded state has several elements but not one for each element of the parameter
    (one for each row, say). No state of this name is then sharded, even if its shape fits."""
    place = param.place
    if isinstance(value, Placed) or value.numel() == 1 or value.shape == local_of(param).shape:
        return False
    if value.dim() == 1 and len(place.global_shape) == 1 and value.shape != place.whole_shape:
        raise ValueError(
            f"the loaded state of parameter '{param.fqn}' has shape {tuple(value.shape)}, expected "
            f"the full {tuple(place.global_shape)}, or this rank's elements of it. To load with "
            "another stage or number of ranks, save with torch.distributed.checkpoint or "
            "zerocore.Checkpoints"
        )
    return value.shape not in (place.global_shape, place.whole_shape)


def _numbers(optimizer: Optimizer) -> Callable[[ShardedParameter, str, Any], bool]:
    """Returns a test that tells numbers from the states of one-element parameters."""

    @cache
    def probed(number: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        like = torch.empty(0, dtype=dtype, device=device)
        return tried(_probed, optimizer, optimizer.param_groups[number], like) or {}

    def is_number(param: ShardedParameter, key: str, value: Any) -> bool:
        if not isinstance(value, Tensor) or isinstance(value, Placed) or value.numel() != 1:
            return False
        if param.place.whole_shape.numel() != 1 or (value.dim() == 0 and key in NUMBERS):
            return True
        current = optimizer.state.get(param, {}).get(key)
        if current is None and not makes_all(optimizer):
            groups = enumerate(optimizer.param_groups)
            number = next(n for n, group in groups if any(p is param for p in group["params"]))
            example = probed(number, local_of(param).dtype, param.device).get(key)
            return isinstance(example, Tensor) and example.shape != (2,)
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


def makes_all(optimizer: Optimizer) -> bool:
    """Whether the optimizer makes its states itself, all of them at once."""
    return hasattr(optimizer, "make_states")


def make_states(optimizer: Optimizer) -> None:
    """Makes the missing states with the values that a first step begins from; takes no step."""
    maker: Any = optimizer
    if makes_all(optimizer):
        maker.make_states()
        return
    for param, _, probed in _missing(optimizer):
        if state := dict(_first_states(param, probed)):
            optimizer.state[param] = state


def _missing(optimizer: Optimizer) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Yields each parameter without state, its group, and the probed state of its kind."""
    for group in optimizer.param_groups:
        probed: dict[tuple[torch.dtype, torch.device], dict[str, Any]] = {}
        for param in without_state(group["params"], optimizer.state):
            local = own_elements(param)
            kind = (local.dtype, local.device)
            if kind not in probed:
                probed[kind] = _probed(optimizer, group, local)
            yield param, group, probed[kind]


def make_until_step(optimizer: Optimizer) -> None:
    """Makes the missing states for a state dict.

    First states may depend on the values of parameters or of a first gradient. Such ones are not
    made behind a step, and the first step drops them, unless somebody has loaded something.
    """
    if makes_all(optimizer):
        make_states(optimizer)
        return
    begun = any(optimizer.state.values())
    neutral: dict[Any, Any] = {}
    made: dict[Any, Any] = {}
    for param, group, probed in _missing(optimizer):
        kind = (id(group), param.dtype, param.device)
        if kind not in neutral:
            neutral[kind] = tried(_changes_nothing, optimizer, group, param, probed)
        if neutral[kind] or not begun:
            made[param] = dict(_first_states(param, probed))
        if not (neutral[kind] or begun):
            made[param].update(tried(_own_states, optimizer, group, param, probed) or {})
    made = {param: state for param, state in made.items() if state}
    optimizer.state.update(made)
    if not all(neutral.values()) and not begun:
        setattr(optimizer, _MADE, _noted(made))


def drop_unloaded(optimizer: Optimizer) -> None:
    """Drops the states of :func:`make_until_step` if none has changed; before a step."""
    made = vars(optimizer).pop(_MADE, None)
    if made is None or len(made) != len(_noted(optimizer.state)):
        return
    for (key, value, version, old), now in zip(made, _noted(optimizer.state), strict=True):
        if (key, value is now[1], version) != (now[0], True, now[2]) or not _is_same(old, now[3]):
            return
    optimizer.state.clear()


def _noted(states: Mapping[Any, Any]) -> list[tuple[Any, ...]]:
    """Returns key, object, version and a copy of each value."""
    noted = []
    for param, state in states.items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            for leaf in leaves(value):
                is_tensor = isinstance(leaf, Tensor)
                version = 0 if not is_tensor or leaf.is_inference() else leaf._version
                copied = own_elements(leaf).clone() if is_tensor else deepcopy(leaf)
                noted.append(((id(param), key), leaf, version, copied))
    return noted


def _changes_nothing(
    optimizer: Optimizer, group: dict[str, Any], param: Any, probed: dict[str, Any]
) -> bool:
    """Whether a step from the first states is a step from no states."""
    ends = []
    for state in ({}, probed):
        probe = _probe(own_elements(param))
        probe.data += probe.new_tensor([1.5, -2.0])
        probe.grad = torch.full_like(probe, 0.5)
        twin = stepped(optimizer, group, probe, dict(_first_states(probe, state)))
        ends.append([probe, *leaves(twin.state[probe])])
    return len(ends[0]) == len(ends[1]) and all(map(_is_same, *ends))


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return bool(value == other)


def _own_states(
    optimizer: Optimizer, group: dict[str, Any], param: Any, probed: dict[str, Any]
) -> dict[str, Any]:
    """Returns the states of a parameter's elements after a step of them without a gradient."""
    local = own_elements(param)
    probe = nn.Parameter(local.clone())
    probe.grad = torch.zeros_like(probe)
    rate = {"lr": group["lr"] * 0} if "lr" in group else {}
    states = stepped(optimizer, {**group, **rate}, probe).state[probe]
    return {
        key: as_state(states[key], param)
        for key, value in probed.items()
        if isinstance(value, Tensor) and value.shape == (2,)
    }


def first_keys(optimizer: Optimizer) -> Callable[[Any], set[str]]:
    """Returns a function of a parameter: the keys of its states that its first step makes."""
    known: dict[int, set[str]] = {}
    for group in () if makes_all(optimizer) else optimizer.param_groups:
        for first in map(own_elements, group["params"][:1]):
            keys = set(tried(_probed, optimizer, group, first) or ())
            known.update({id(param): keys for param in group["params"]})

    def needed(param: Any) -> set[str]:
        present = set(optimizer.state.get(param, {}))
        return present & known.get(id(param), present)

    return needed


def tried(probe: Callable[..., Any], *args: Any) -> Any:
    """Calls ``probe``. Returns None if the optimizer needs more for a step than a probe has, such
    as a closure, other groups, or a gradient that is not zero."""
    try:
        return probe(*args)
    except Exception:
        return None


def _probed(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """Returns the state of a two-element parameter after a step: a number has another shape."""
    probe = _probe(like)
    return stepped(optimizer, group, probe).state[probe]


def _probe(like: Tensor) -> nn.Parameter:
    probe = nn.Parameter(like.new_zeros(2))
    probe.grad = torch.zeros_like(probe)
    return probe


def note_added_options(optimizer: Optimizer) -> None:
    """Notes the options that steps add to groups: state dicts have them, as zeros, before one."""
    added: list[dict[str, Any]] = []
    for group in () if makes_all(optimizer) else optimizer.param_groups:
        local = own_elements(group["params"][0]) if group["params"] else torch.empty(0)
        twin = stepped(optimizer, group, _probe(local))
        new = {key: v for key, v in options_of(twin.param_groups[0]).items() if key not in group}
        added.append({key: _zero(value) for key, value in new.items()})
    setattr(optimizer, _ADDED, added)


def _zero(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return type(value)(0) if type(value) in (int, float) else value


def without_state(params: Iterable[_P], states: Mapping[Any, Any]) -> list[_P]:
    """Returns the parameters that require gradients and have no state yet."""
    return [param for param in params if param.requires_grad and not states.get(param)]


def _first_states(param: Any, probed: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields names and first values of a parameter's states, from a probe of two elements."""
    local = own_elements(param)
    for key, value in probed.items():
        if not isinstance(value, Tensor):
            yield key, _BEFORE.get(key, deepcopy(value))
        elif value.shape != (2,):
            yield key, torch.full_like(value, _BEFORE[key]) if key in _BEFORE else value.clone()
        elif isinstance(param, Placed) and not value.any():
            zeros = state_memory(local.numel(), value.dtype, local.device)
            yield key, as_shard(zeros, param.place)
        else:
            full = torch.full_like(local, value[0].item(), dtype=value.dtype)
            yield key, as_state(full, param)


def stepped(
    optimizer: Optimizer,
    group: dict[str, Any],
    probe: nn.Parameter,
    state: dict[str, Any] | None = None,
) -> Any:
    """Returns a twin after a step of ``probe`` with its ``grad``, from ``state``; leaves the
    optimizer, its parameters and torch's random streams as they are. Raises TypeError if its
    groups are those of another object."""
    kind = type(optimizer)
    if any(hasattr(getattr(kind, name, None), "__set__") for name in ("param_groups", "state")):
        raise TypeError(f"{kind.__name__} shows the groups of another optimizer: pass that one")
    twin: Any = object.__new__(kind)
    twin.__dict__.update(_attributes_for(twin, optimizer))
    twin.param_groups = [{**deepcopy(options_of(group)), "params": [probe]}]
    twin.state = defaultdict(dict, {probe: state} if state else {})
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    try:
        with _without_gradients(optimizer), torch.random.fork_rng(_devices_of(probe)):
            twin.step()
    finally:
        optimizer.state.pop(probe, None)  # of a function that knows only the optimizer
    return twin


def _devices_of(probe: Tensor) -> list[torch.device]:
    return [probe.device] if probe.is_cuda else []


def _attributes_for(twin: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's attributes, whose containers and methods are the twin's own."""
    own = {**vars(optimizer)}
    own.pop(_MADE, None)
    own.pop("step", None)  # a scheduler's wrapper, which counts the optimizer's steps
    params = {id(param): param for param in params_of(optimizer)}
    for name, value in own.items():
        if name.startswith("_optimizer_") or name in ("state", "param_groups"):
            continue
        if isinstance(value, dict | list | deque | MethodType | partial):
            kept = (leaf for leaf in leaves(value) if isinstance(leaf, nn.Module | Optimizer))
            memo = {**params, **{id(leaf): leaf for leaf in kept}, id(optimizer): twin}
            try:
                own[name] = deepcopy(value, memo)
            except Exception:  # it holds a thing that cannot be copied
                own[name] = copy(value)
    return own


@contextmanager
def _without_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Hides the gradients of the optimizer's parameters, which the program may hold elsewhere."""
    raw: Any = torch._C.TensorBase.grad
    with torch._C.DisableTorchFunctionSubclass():
        grads = [(p, grad) for p in params_of(optimizer) if (grad := raw.__get__(p)) is not None]
    try:
        with torch._C.DisableTorchFunctionSubclass():
            for param, _ in grads:
                raw.__set__(param, None)
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            for param, grad in grads:
                show_grad(param, grad)
