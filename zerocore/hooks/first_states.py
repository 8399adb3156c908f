"""Makes optimizer states before a first step: a twin of the optimizer steps a small parameter."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore._C import show_grad
from zerocore.hooks.optimizer_states import (
    ADDED,
    MADE,
    as_state,
    makes_all,
    options_of,
    params_of,
    state_memory,
    without_state,
)
from zerocore.tensor.placed import Placed, leaves
from zerocore.tensor.rows import own_elements
from zerocore.tensor.shard import as_shard

_BEFORE = {"step": 0, "mu_product": 1}  # values before a first step; a probe's are from after it


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

    Some optimizers derive first states from the parameters' values or from a first gradient. Such
    states are made only if the optimizer has not stepped yet; its first step drops them, unless the
    program has changed or loaded some.
    """
    if makes_all(optimizer):
        make_states(optimizer)
        return
    begun = any(optimizer.state.values())
    neutral: dict[Any, Any] = {}
    new_states: dict[Any, Any] = {}
    for param, group, probed in _missing(optimizer):
        kind = (id(group), param.dtype, param.device)
        if kind not in neutral:
            neutral[kind] = tried(_changes_nothing, optimizer, group, param, probed)
        if neutral[kind] or not begun:
            new_states[param] = dict(_first_states(param, probed))
        if not (neutral[kind] or begun):
            new_states[param].update(tried(_own_states, optimizer, group, param, probed) or {})
    new_states = {param: state for param, state in new_states.items() if state}
    optimizer.state.update(new_states)
    if not all(neutral.values()) and not begun:
        setattr(optimizer, MADE, partial(_drop_unloaded, _noted(new_states)))


def _drop_unloaded(noted: list[tuple[Any, ...]], optimizer: Optimizer) -> None:
    """Drops the ``noted`` states if none has changed; before a step."""
    present = _noted(optimizer.state)
    if len(noted) != len(present):
        return
    for (key, value, version, old), now in zip(noted, present, strict=True):
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
    """Whether a step from the states that would be made equals a step without states."""
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
    """Returns the states of a parameter's elements after a step with zero gradients."""
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
    """Calls ``probe``. Returns None if the optimizer's step needs more than a probe has: a
    closure, other groups, or a gradient that is not zero."""
    try:
        return probe(*args)
    except Exception:
        return None


def probed_number(
    optimizer: Optimizer, number: int, key: str, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the state ``key`` of the parameters in group ``number`` is one number."""
    like = torch.empty(0, dtype=dtype, device=device)
    states = tried(_probed, optimizer, optimizer.param_groups[number], like) or {}
    value = states.get(key)
    return isinstance(value, Tensor) and value.shape != (2,)


def makes_shape(optimizer: Optimizer, param: Any, key: str, shape: torch.Size) -> bool:
    """Whether a first step of the full parameter makes a state ``key`` of this shape."""
    group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    probe = nn.Parameter(own_elements(param).new_ones(param.place.global_shape))
    probe.grad = torch.ones_like(probe)
    twin = tried(stepped, optimizer, group, probe)
    value = None if twin is None else twin.state[probe].get(key)
    return isinstance(value, Tensor) and value.shape == shape


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
    setattr(optimizer, ADDED, added)


def _zero(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return type(value)(0) if type(value) in (int, float) else value


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
    optimizer, its parameters and torch's random streams as they are. Raises TypeError if the
    groups belong to another object."""
    kind = type(optimizer)
    if any(hasattr(getattr(kind, name, None), "__set__") for name in ("param_groups", "state")):
        raise TypeError(f"{kind.__name__} wraps another optimizer: pass the inner optimizer")
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
        optimizer.state.pop(probe, None)  # made if ``step`` is bound to the optimizer itself
    return twin


def _devices_of(probe: Tensor) -> list[torch.device]:
    return [probe.device] if probe.is_cuda else []


def _attributes_for(twin: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's attributes, whose containers and methods are the twin's own."""
    attributes = {**vars(optimizer)}
    attributes.pop(MADE, None)
    attributes.pop("step", None)  # a scheduler's wrapper, which counts the optimizer's steps
    params = {id(param): param for param in params_of(optimizer)}
    for name, value in attributes.items():
        if name.startswith("_optimizer_") or name in ("state", "param_groups"):
            continue
        if isinstance(value, dict | list | deque | MethodType | partial):
            kept = (leaf for leaf in leaves(value) if isinstance(leaf, nn.Module | Optimizer))
            memo = {**params, **{id(leaf): leaf for leaf in kept}, id(optimizer): twin}
            try:
                attributes[name] = deepcopy(value, memo)
            except Exception:  # some part of the value cannot be copied
                attributes[name] = copy(value)
    return attributes


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
