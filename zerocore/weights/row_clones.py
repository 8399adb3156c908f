"""Shards a copy of a model by rows, as the model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from zerocore.fsdp import fully_shard
from zerocore.fsdp.group import Group, RowParam, group_of, groups_below
from zerocore.fsdp.policy import types_of


def shard_rows_alike(model: nn.Module, copied: nn.Module, device: torch.device) -> None:
    """Shards ``copied``, a plain model on the meta device, over the same modules and meshes as
    ``model``. Its shards and all that is not sharded lie on ``device`` and have no values yet.

    Raises:
        ValueError: ``copied`` lacks a parameter of ``model``, or one of ``model`` is cut by tensor
            parallelism, too, or ``shard_placement_fn`` puts it on a mesh of its own.
    """
    names = {module: name for name, module in model.named_modules()}
    twins = dict(copied.named_modules())
    for _, group in reversed(groups_below(model)):
        if group_of(group.modules[0]) is not group:
            raise ValueError("clone_sharded takes no module with parameters on several meshes")
        own = {_twin_of(param, names, twins): param for param in group.params}
        for twin, param in own.items():  # no main weights
            twin.data = twin.data.to(types_of(param).model)
        _shard_group(group, [twins[names[module]] for module in group.modules], own, device)
    for module in copied.modules():
        for values in (module._parameters, module._buffers):
            for key, value in values.items():
                if value is not None and value.is_meta:
                    values[key] = _empty(value, device)


def _twin_of(
    param: RowParam, names: Mapping[nn.Module, str], twins: Mapping[str, nn.Module]
) -> nn.Parameter:
    if param.rows.whole is not None or param.rows.sums:
        raise ValueError("clone_sharded takes no model with groups= or tensor parallelism")
    owner, key = param.owners[0]
    found = getattr(twins.get(names[owner]), "_parameters", {}).get(key)
    if found is None or found.shape != param.shard.shape:
        raise ValueError(f"the two models have other parameters, such as '{param.name}'")
    return found


def _shard_group(
    group: Group,
    modules: list[nn.Module],
    own: Mapping[nn.Parameter, RowParam],
    device: torch.device,
) -> None:
    others = {param for module in modules for param in module.parameters() if param not in own}
    fully_shard(
        modules,
        mesh=group.mesh,
        reshard_after_forward=group.num_near if group.num_near > 1 else group.reshard_after_forward,
        shard_placement_fn=lambda param: Shard(own[param].rows.dim),
        mp_policy=group.policy,
        ignored_params=others,
    )
    made = group_of(modules[0])
    assert made is not None
    for param in made.params:
        shard = _empty(param.shard, device)
        for owner, key in param.owners:
            owner._parameters[key] = shard


def _empty(value: torch.Tensor, device: torch.device) -> Any:
    """``value`` on the device, with its attributes."""
    made: Any = torch.empty_like(value, device=device)
    if isinstance(value, nn.Parameter):
        made = nn.Parameter(made, requires_grad=False)
    vars(made).update(vars(value))
    return made
