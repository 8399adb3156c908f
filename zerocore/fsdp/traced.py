"""Runs traced calls of fully sharded modules, also before there is an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerocore.fsdp.group import Group, RowParam, groups_below
from zerocore.fsdp.mesh import device_of
from zerocore.fsdp.policy import types_of
from zerocore.model.traced import TracedParam, call_traced


def call_group_traced(group: Group, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls ``function``, a method of one of the group's modules, without communication."""
    params = [
        TracedParam(param.fqn, param.owners, param.param, param.is_full, _maker_of(param))
        for _, inner in groups_below(*group.modules)
        for param in inner.params
    ]
    policy = group.policy
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    return call_traced(params, (inputs, policy.output_dtype), function, args, kwargs)


def _maker_of(param: RowParam) -> Callable[[], Tensor] | None:
    if param.extension is not None or param.rows.whole is not None or param.rows.sums:
        return None
    dtype, device = types_of(param).model, device_of(param.group.mesh)
    return partial(torch.empty, param.shard.shape, dtype=dtype, device=device)
