"""Saves and loads full state dicts of sharded models, one unit at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerocore.common.agreement import from_rank, together
from zerocore.common.alarm import operation
from zerocore.hooks.loading import EXTRA_STATE, as_loaded, has_extra_state
from zerocore.hooks.optimizer_states import mapped, params_of, unwrapped
from zerocore.model.buffers import broadcast as broadcast_tensors
from zerocore.model.extensions import check_engine_gathers
from zerocore.model.parameter_meshes import check_has_places
from zerocore.model.state import ShardState, ready_state_of
from zerocore.model.units import Param, Unit
from zerocore.tensor.placed import Placed
from zerocore.tensor.rows import local_part, shard_of
from zerocore.tensor.wrapped import is_wrapped

Keys = Mapping[Param, Sequence[str]]


@operation("full_state_dict")
def full_state_dict(model: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
    """Returns full parameters and buffers on the CPU, with keys and order as before sharding.

    Under mixed precision they are the main weights. All ranks must call it. The device never holds
    more than one full unit. Tied parameters share one tensor.

    Args:
        rank0_only: ranks other than 0 get an empty dict.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: this process was forked from the one that sharded it.
    """
    state = ready_state_of(model)
    check_has_places(state)
    check_engine_gathers(state.units, "full_state_dict")
    keys = param_keys(model, state)
    keep = not rank0_only or state.rank == 0
    known = {key for names in keys.values() for key in names} | set(state.several())
    full: dict[str, Tensor] = {}
    for unit in state.units:
        values, encoded = state.kind.full_values(state, unit)
        if keep:
            for param, value in zip(unit.params, values, strict=True):
                full.update(dict.fromkeys(keys[param], value.to("cpu", copy=True)))
            full.update(_several(unit, encoded))
        del values, encoded
    result: dict[str, Any] = OrderedDict()
    state_dict = model.state_dict()
    for key, value in state_dict.items():
        if key in full:
            result[key] = full[key]
        elif key not in known:  # a state-dict hook has made it
            result[key] = _full_value(value, keep) if isinstance(value, Tensor) else value
    if not keep:
        return {}
    if hasattr(state_dict, "_metadata"):  # versions of modules
        result._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return result


def param_keys(model: nn.Module, state: ShardState, by_name: bool = False) -> Keys:
    """Returns each parameter's names in ``model.state_dict()``, which wrappers may change. With
    ``by_name``, finds a parameter by its FQN if a hook has replaced its tensor there."""
    objects = {id(param.object): param for param in state.params()}
    keys: dict[Param, list[str]] = {param: [] for param in state.params()}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) in objects:
            keys[objects[id(value)]].append(key)
    saved = model.state_dict().keys() if by_name else ()
    for param, names in keys.items():
        names.extend(() if names else (fqn for fqn in param.fqns if fqn in saved))
    return keys


def _several(unit: Unit, encoded: list[Tensor]) -> dict[str, Tensor]:
    """Returns full values of parameters that consist of several tensors, from encoded ones."""
    full: dict[str, Tensor] = {}
    for extension in unit.extensions:
        count = len(extension.kinds)
        inputs, encoded = encoded[:count], encoded[count:]
        if not extension.is_param:
            encoded = encoded[1:]  # skips the entry of the full parameter
            full[extension.fqn] = extension.make(inputs, extension.rows.dtype).cpu()
    return full


@operation("full_optimizer_state_dict")
def full_optimizer_state_dict(optimizer: Optimizer, rank0_only: bool = True) -> dict[str, Any]:
    """Returns ``optimizer.state_dict()`` with full states on the CPU, as before sharding; also for
    models of :mod:`zerocore.fsdp`.

    The optimizer's ``load_state_dict`` takes it at any stage, on any number of ranks; so does an
    optimizer of a plain model. All ranks must call it. The device holds one full tensor at a time.

    Args:
        rank0_only: ranks other than 0 get an empty dict.
    """
    optimizer = unwrapped(optimizer)
    packed = optimizer.state_dict()
    shards = [shard for param in params_of(optimizer) if (shard := shard_of(param)) is not None]
    states = dict.fromkeys(state for p in shards if (state := p.state_ref()) is not None)
    keep = not rank0_only or {state.rank for state in states} <= {0}
    for state in states:
        _check_alike(packed, state)
    full = mapped(packed, partial(_full_value, keep=keep))
    return {**packed, **full} if keep else {}


def _check_alike(states: Mapping[Any, Any], state: ShardState) -> None:
    """Raises ValueError if the ranks' states differ in the tensors to gather."""
    facts: list[str] = []

    def note(value: Tensor) -> Tensor:
        if isinstance(value, Placed):
            facts.append(f"a state of '{value.fqn}' of shape {list(value.place.whole_shape)}")
        return value

    mapped(dict(states), note)
    with together(state.ranks.groups, state.device) as compared:
        compared.extend(facts)


def _full_value(value: Tensor, keep: bool) -> Any:
    if isinstance(value, Placed):
        full = value.whole_tensor()  # collective
        return full.cpu() if keep else None
    if isinstance(value, DTensor):
        full = value.full_tensor()
        return full.detach().cpu() if keep else None
    return value.detach().cpu().clone()


@operation("load_full_state_dict")
def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, broadcast: bool = True
) -> None:
    """Loads full parameters and buffers into a sharded model.

    All ranks must call it.

    Args:
        state_dict: as from :func:`full_state_dict`. With ``broadcast``, only rank 0's is read;
            without it, every rank passes its own.

    Raises:
        ValueError: missing or unexpected keys, a wrong shape, or complex values for real ones; on
            every rank, before anything is changed.
    """
    state = ready_state_of(model)
    check_engine_gathers(state.units, "load_full_state_dict")
    source = not broadcast or state.rank == 0
    keys = param_keys(model, state, by_name=True)
    buffers = buffers_of(model, keys)
    for name in state.several():
        buffers.pop(name, None)
    values, extra = state_dict or {}, has_extra_state(model)
    with together(state.ranks.groups, state.device) as facts:
        if source:
            _check_several(state, values)
            values = as_loaded(model, values)
            _check_values(model, keys, buffers, values)
        if broadcast:
            for key, buffer in buffers.items():
                facts.append(f"buffer '{key}' of shape {list(buffer.shape)}, {buffer.dtype}")
    for unit in state.units:
        numbered = enumerate(keys[param] for param in unit.params)
        full = {i: values[names[0]] if source else None for i, names in numbered if names}
        state.kind.load(state, unit, full, broadcast)
    with torch.no_grad():  # ``buffers`` has the parameters that fully_shard ignores, too
        for key, buffer in buffers.items():
            if source:
                buffer.copy_(values[key])
    if broadcast:
        broadcast_tensors(buffers.values(), state.ranks, state.device)
    if extra:
        _set_extra_state(model, state, values, broadcast)


def _set_extra_state(
    model: nn.Module, state: ShardState, values: Mapping[str, Any], broadcast: bool
) -> None:
    keys = [key for key in model.state_dict() if key.endswith(EXTRA_STATE)]
    extra = {key: values[key] for key in keys if key in values}
    extra = from_rank(state.ranks.groups, extra, state.device) if broadcast else extra
    for key, value in extra.items():
        model.get_submodule(key.removesuffix(EXTRA_STATE).rstrip(".")).set_extra_state(value)


def buffers_of(model: nn.Module, keys: Keys) -> dict[str, Tensor]:
    """Returns the tensors of ``model.state_dict()`` that are not sharded parameters."""
    names = {key for names in keys.values() for key in names}
    items = model.state_dict(keep_vars=True).items()  # inference_mode does not detach DTensors
    buffers = dict(model.named_buffers(remove_duplicate=False))  # hooks may replace their tensors
    return {
        key: buffers.get(key, value)
        for key, value in items
        if key not in names and isinstance(value, Tensor)
    }


def _check_several(state: ShardState, values: Mapping[str, Any]) -> None:
    if present := [name for name in state.several() if name in values]:
        raise NotImplementedError(
            f"parameter '{present[0]}' consists of several tensors and cannot be loaded: leave it "
            "out of the state dict, and load its values before zerocore.shard"
        )


def _check_values(
    model: nn.Module, keys: Keys, buffers: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    several = {
        name for name, buffer in model.state_dict().items() if is_wrapped(local_part(buffer))
    }
    expected = model.state_dict().keys() - several
    missing, unexpected = sorted(expected - set(values)), sorted(set(values) - expected)
    if missing or unexpected:
        raise ValueError(
            f"the state dict does not fit the model: missing {missing or 'nothing'}, unexpected "
            f"{unexpected or 'nothing'}"
        )
    places: list[tuple[str, str, Tensor, Any]] = [
        ("parameter", key, param.full, param.whole_shape)
        for param, names in keys.items()
        for key in names
    ]
    places += [("buffer", key, buffer, buffer.shape) for key, buffer in buffers.items()]
    for kind, key, place, shape in places:
        value = values[key]
        if not isinstance(value, Tensor) or isinstance(value, Placed | DTensor):
            actual = repr(value) if isinstance(value, Placed) else type(value).__name__
            raise TypeError(
                f"{kind} '{key}': the state dict has a {actual}; expected a full tensor, as from "
                "zerocore.full_state_dict(model)"
            )
        if value.shape != shape:
            raise ValueError(
                f"{kind} '{key}': the state dict has shape {tuple(value.shape)}, the model "
                f"{tuple(shape)}"
            )
        if value.is_complex() and not place.is_complex():
            raise ValueError(
                f"{kind} '{key}': the state dict has {value.dtype}, whose imaginary part would be "
                f"lost in the model's {place.dtype}; convert it, as torch.view_as_real does"
            )
