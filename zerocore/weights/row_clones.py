"""Shards a copy of a model by rows, in the same way as the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from zerocore.fsdp import fully_shard
from zerocore.fsdp.group import Group, RowParam, group_of, groups_below


def shard_rows_alike(model: nn.Module, copied: nn.Module, device: torch.device) -> None:
    """Shards ``copied``, a plain model on the meta device, over the same modules and meshes as
    ``model``. Its shards and other tensors go to ``device``, without values yet.

    Raises:
        ValueError: ``copied`` lacks a parameter of ``model``, or tensor parallelism also cuts a
            parameter of ``model``, or ``shard_placement_fn`` puts it on a mesh of its own.
    """
    names = {module: name for name, module in model.named_modules()}
    twins = dict(copied.named_modules())
    for group in reversed(groups_below(model)):
        if group.is_sibling:
            raise ValueError("clone_sharded does not support a module with several meshes")
        params = {_twin_of(param, names, twins): param for param in group.params}
        for twin, param in params.items():  # a clone has no main weights
            twin.data = twin.data.to(param.types.model)
        _shard_group(group, [twins[names[module]] for module in group.modules], params, device)
    for module in copied.modules():
        for values in (module._parameters, module._buffers):
            for key, value in values.items():
                if value is not None and value.is_meta:
                    values[key] = _empty(value, device)


def _twin_of(
    param: RowParam, names: Mapping[nn.Module, str], twins: Mapping[str, nn.Module]
) -> nn.Parameter:
    if param.rows.whole is not None or param.rows.sums:
        raise ValueError("clone_sharded does not support groups= or tensor parallelism")
    owner, key = param.owners[0]
    twin = getattr(twins.get(names[owner]), "_parameters", {}).get(key)
    if twin is None or twin.shape != param.shard.shape:
        raise ValueError(f"the two models have different parameters, such as '{param.fqn}'")
    return twin


def _shard_group(
    group: Group,
    modules: list[nn.Module],
    params: Mapping[nn.Parameter, RowParam],
    device: torch.device,
) -> None:
    ignored = {param for module in modules for param in module.parameters() if param not in params}
    fully_shard(
        modules,
        mesh=group.mesh,
        reshard_after_forward=group.num_near if group.num_near > 1 else group.reshard_after_forward,
        shard_placement_fn=lambda param: Shard(params[param].rows.dim),
        mp_policy=group.policy,
        ignored_params=ignored,
    )
    new_group = group_of(modules[0])
    assert new_group is not None
    for param in new_group.params:
        shard = _empty(param.shard, device)
        for owner, key in param.owners:
            owner._parameters[key] = shard


def _empty(value: torch.Tensor, device: torch.device) -> Any:
    """Returns an uninitialised tensor like ``value`` on the device, with its attributes."""
    empty: Any = torch.empty_like(value, device=device)
    if isinstance(value, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=False)
    vars(empty).update(vars(value))
    return empty
