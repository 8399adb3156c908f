"""Parameters while modules compute with them in full: gradients, and what waits for them, are those
of the shard, the sum over the ranks. Copies and pickles are plain parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from zerocore._C import define_shown_grad
from zerocore.common.patching import around
from zerocore.tensor.parameter import attributes_of
from zerocore.tensor.place import IS_ROWS, OTHER
from zerocore.tensor.rows import seen_shard

_grad: Any = torch._C.TensorBase.grad


def show_gradients() -> None:
    """``grad`` of all parameters asks :func:`_get` and :func:`_set`, if they may be shown."""
    define_shown_grad(nn.Parameter, (OTHER, IS_ROWS), _get, _set)


def _get(full: Tensor) -> Any:
    """As of the shard. Within a backward this rank's own is not there yet."""
    shard = seen_shard(full)
    if shard is None or TracingContext.try_get() is not None:  # which records no gradients
        return _grad.__get__(full)
    return shard.grad


def _set(full: Tensor, value: Any) -> None:
    shard = seen_shard(full)
    if shard is None:
        _grad.__set__(full, value)
    elif value is not None and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f".grad of parameter '{getattr(shard, 'fqn', '')}' is set within a backward, at whose "
            "end the gradients of all ranks are added to it. Change this rank's own gradient in "
            "p.register_hook(...), or set .grad after the backward"
        )
    else:
        shard.grad = value


@around
def waits_for_the_shard(register: Any, self: Tensor, hook: Any) -> Any:
    """``Tensor.register_post_accumulate_grad_hook``."""
    return register(shard_or_self(self), hook)


def shard_or_self(tensor: Tensor) -> Any:
    """The shard of a parameter that modules compute with in full."""
    shard = seen_shard(tensor) if _may_be_shown(tensor) else None
    return tensor if shard is None else shard


def _may_be_shown(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not vars(tensor).keys().isdisjoint((OTHER, IS_ROWS))


@around
def as_plain(function: Any, self: nn.Parameter, *args: Any) -> Any:
    """A method of ``nn.Parameter`` that copies or pickles it."""
    if not _may_be_shown(self):
        return function(self, *args)
    plain = nn.Parameter(self.data, self.requires_grad)
    vars(plain).update(attributes_of(self))
    return function(plain, *args)
