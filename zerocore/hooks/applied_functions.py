"""Gives full parameters to ``torch.autograd.Function``, which torch functions do not announce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerocore.tensor.implicit_unshard import call_with_full
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.place import PlacedParameter, leaves

_apply: Callable[..., Any] = torch._C._FunctionBase.__dict__["apply"]
# Arguments of other types hold no parameter. Asked of each call, so it is one set operation.
_MAY_HOLD = frozenset({ShardedParameter, list, tuple, dict})


def reads_in_full(apply: Any) -> Any:
    """The ``apply`` of a base class, in which ``Function.apply`` ends.

    An ``apply`` that was taken from its class before comes there, too.
    """
    return classmethod(_apply_with_full)


def _apply_with_full(cls: type, *args: Any, **kwargs: Any) -> Any:
    if _MAY_HOLD.isdisjoint(map(type, args)):
        return _apply(cls, *args, **kwargs)
    params = [value for value in leaves(args) if isinstance(value, PlacedParameter)]
    if not params:
        return _apply(cls, *args, **kwargs)
    return call_with_full(_apply, (cls, *args), kwargs, params)
