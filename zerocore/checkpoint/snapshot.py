"""Copies of a state that training goes on to change."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zerocore.hooks.optimizer_states import as_shard
from zerocore.tensor.place import Placed, local_of


@torch.no_grad()
def snapshot(value: Any) -> Any:
    """A copy on the CPU of nested dicts, lists and tuples; shards stay shards."""
    if isinstance(value, Placed):
        local = local_of(value).to("cpu", copy=True)
        return as_shard(local, replace(value.place, group=None))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot(item) for item in value)
    return copy.deepcopy(value)
