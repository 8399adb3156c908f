"""Full state dicts of sharded models, streamed one unit at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zerocore.agreement import agree
from zerocore.state import ShardState, Unit, state_of


def full_state_dict(model: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
    """Full parameters and buffers on the CPU, keys and order as before sharding.

    Under mixed precision they are the main weights. All ranks must call. Never more than one unit
    is held in full on the device. Tied parameters share one tensor.

    Args:
        rank0_only: ranks other than 0 get an empty dict.
    """
    state = state_of(model)
    keep = not rank0_only or state.rank == 0
    full: dict[str, Tensor] = {}
    for unit in state.units:
        values = state.engine.full_values(unit.index)
        if keep:
            _copy_out(unit, values, full)
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


def _copy_out(unit: Unit, values: list[Tensor], full: dict[str, Tensor]) -> None:
    for param, on_device in zip(unit.params, values, strict=True):
        value = on_device.to("cpu", copy=True)
        for fqn in param.fqns:
            full[fqn] = value


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
    error = _check_keys(model, state, state_dict or {}) if source else None
    agree(state.group, error, [])
    values = state_dict or {}
    for unit in state.units:
        _load_unit(state, unit, values if source else None, broadcast)
    _load_buffers(model, state, values if source else None, broadcast)


def _check_keys(
    model: nn.Module, state: ShardState, values: Mapping[str, Any]
) -> ValueError | None:
    expected = set(model.state_dict())
    missing, unexpected = sorted(expected - set(values)), sorted(set(values) - expected)
    if missing or unexpected:
        return ValueError(
            f"the state dict does not fit the model: missing {missing or 'nothing'}, unexpected "
            f"{unexpected or 'nothing'}"
        )
    for param in state.params():
        for fqn in param.fqns:
            if fqn in values and tuple(values[fqn].shape) != tuple(param.full.shape):
                return ValueError(
                    f"parameter '{fqn}': the state dict has shape {tuple(values[fqn].shape)}, the "
                    f"model {tuple(param.full.shape)}"
                )
    return None


def _load_unit(
    state: ShardState, unit: Unit, values: Mapping[str, Any] | None, broadcast: bool
) -> None:
    given: list[Tensor | None] = [None] * len(unit.params)
    if values is not None:
        given = [next(values[fqn] for fqn in p.fqns if fqn in values) for p in unit.params]
    state.engine.materialize(unit.index, given, broadcast)


def _load_buffers(
    model: nn.Module, state: ShardState, values: Mapping[str, Any] | None, broadcast: bool
) -> None:
    names = {fqn for param in state.params() for fqn in param.fqns}
    for key, value in model.state_dict().items():
        if key not in names and isinstance(value, Tensor):
            if values is not None:
                value.copy_(values[key])
            if broadcast:
                _broadcast(state, value)


def _broadcast(state: ShardState, tensor: Tensor) -> None:
    if state.group is None:
        return
    # Collectives move memory in order, so a permuted dense tensor travels as its flat storage.
    flat = tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
    dist.broadcast(flat, dist.get_global_rank(state.group, 0), group=state.group)
