"""Copies of modules and tensors that have shapes and no memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_CPU = torch.device("cpu")


def fake_copy(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are fake; no data is read or copied.

    Floating-point parameters take ``dtype`` where it is given.
    """
    # deepcopy takes what the memo has for a tensor instead of copying it.
    memo: dict[int, Any] = {}
    with mode:
        for param in model.parameters():
            fake = nn.Parameter(fake_like(param, dtype), requires_grad=param.requires_grad)
            memo[id(param)] = fake
        for buffer in model.buffers():
            memo[id(buffer)] = fake_like(buffer)
        return copy.deepcopy(model, memo)


def fake_like(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A tensor of the same shape and strides on the CPU; what is no tensor comes back as it is.

    Needs an active FakeTensorMode. Floating-point tensors take ``dtype`` where it is given.
    """
    if not isinstance(value, Tensor):
        return value
    cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return torch.empty_strided(value.shape, value.stride(), dtype=cast, device=_CPU)
