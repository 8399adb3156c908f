"""Full state dicts of sharded models, streamed one unit at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zerocore.agreement import agree
from zerocore.state import Param, ShardState, Unit, state_of

Keys = Mapping[Param, Sequence[str]]


def full_state_dict(model: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
    """Full parameters and buffers on the CPU, keys and order as before sharding.

    Under mixed precision they are the main weights. All ranks must call. Never more than one unit
    is held in full on the device. Tied parameters share one tensor.

    Args:
        rank0_only: ranks other than 0 get an empty dict.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: this process was forked from the one that sharded it.
    """
    state = state_of(model)
    keys = _keys(model, state)
    keep = not rank0_only or state.rank == 0
    full: dict[str, Tensor] = {}
    for unit in state.units:
        values = state.engine.full_values(unit.index)
        if keep:
            _copy_out(unit, keys, values, full)
        del values
    if not keep:
        return {}
    result: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        if key in full:
            result[key] = full[key]
        else:
            result[key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return result


def _keys(model: nn.Module, state: ShardState) -> Keys:
    """What ``model.state_dict()`` calls each parameter; wrappers in the model rename theirs."""
    faces = {id(face): param for param in state.params() for face in (param.shard, param.full)}
    keys: dict[Param, list[str]] = {param: [] for param in state.params()}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) in faces:
            keys[faces[id(value)]].append(key)
    return keys


def _copy_out(unit: Unit, keys: Keys, values: list[Tensor], full: dict[str, Tensor]) -> None:
    for param, on_device in zip(unit.params, values, strict=True):
        value = on_device.to("cpu", copy=True)
        full.update(dict.fromkeys(keys[param], value))


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, broadcast: bool = True
) -> None:
    """Loads full parameters and buffers into a sharded model.

    All ranks must call.

    Args:
        state_dict: as :func:`full_state_dict` returns; with ``broadcast`` only rank 0's is read,
            else every rank gives its own.

    Raises:
        ValueError: missing or unexpected keys, or a wrong shape, on every rank.
    """
    state = state_of(model)
    source = not broadcast or state.rank == 0
    keys = _keys(model, state)
    error = _check_keys(model, keys, state_dict or {}) if source else None
    agree(state.ranks.groups, error, [], state.device)
    values = state_dict or {}
    for unit in state.units:
        _load_unit(state, unit, keys, values if source else None, broadcast)
    _load_buffers(model, state, keys, values if source else None, broadcast)


def _check_keys(model: nn.Module, keys: Keys, values: Mapping[str, Any]) -> ValueError | None:
    expected = set(model.state_dict())
    missing, unexpected = sorted(expected - set(values)), sorted(set(values) - expected)
    if missing or unexpected:
        return ValueError(
            f"the state dict does not fit the model: missing {missing or 'nothing'}, unexpected "
            f"{unexpected or 'nothing'}"
        )
    for param, names in keys.items():
        for key in names:
            if tuple(values[key].shape) != tuple(param.full.shape):
                return ValueError(
                    f"parameter '{key}': the state dict has shape {tuple(values[key].shape)}, the "
                    f"model {tuple(param.full.shape)}"
                )
    return None


def _load_unit(
    state: ShardState, unit: Unit, keys: Keys, values: Mapping[str, Any] | None, broadcast: bool
) -> None:
    given: list[Tensor | None] = [None] * len(unit.params)
    if not all(keys[param] for param in unit.params):
        given = list(state.engine.full_values(unit.index))  # what has no key stays as it is
    if values is not None:
        for index, param in enumerate(unit.params):
            if keys[param]:
                given[index] = values[keys[param][0]]
    state.engine.materialize(unit.index, given, broadcast)


def _load_buffers(
    model: nn.Module,
    state: ShardState,
    keys: Keys,
    values: Mapping[str, Any] | None,
    broadcast: bool,
) -> None:
    names = {key for names in keys.values() for key in names}
    for key, value in model.state_dict().items():
        if key not in names and isinstance(value, Tensor):
            if values is not None:
                value.copy_(values[key])
            if broadcast:
                _broadcast(state, value)


def _broadcast(state: ShardState, tensor: Tensor) -> None:
    # Collectives move memory in order, so a permuted dense tensor travels as its flat storage.
    flat = tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
    for group in reversed(state.ranks.groups):  # to the other replicas first
        dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
