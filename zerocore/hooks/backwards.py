"""Wraps torch's entry points of autograd: backward, grad, functions that take parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zerocore._C import forget_backward_call, note_backward_call
from zerocore.common import late
from zerocore.model.state import live_states
from zerocore.tensor.implicit_unshard import call_with_full
from zerocore.tensor.noted_writes import copied_views
from zerocore.tensor.parameter import KINDS
from zerocore.tensor.placed import PlacedParameter, leaves


def notes_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``backward`` or ``grad``: tells the engines when the call begins, ends or fails.

    Replaces sharded parameters in ``inputs`` by the full ones, which are in the graph. ``backward``
    then reduces only their gradients, and ``torch.autograd.grad`` returns this rank's full
    gradients without a reduction, as under DistributedDataParallel.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "grad" and len(args) > 1:
            args = (args[0], _full(args[1]), *args[2:])
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = _full(kwargs["inputs"])
        elif copied_views and function.__name__ == "backward":
            late.call("check_grads", live_states(), leaves((args, kwargs)))
        note_backward_call(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            states = live_states()
            answers = (late.call("explain_backward", error, state) for state in states)
            explained = next(filter(None, answers), None)
            for state in states:
                state.engine.fail_backward()
            if explained is not None:
                raise explained from error
            raise
        finally:
            forget_backward_call()

    return run


def _full(inputs: Any) -> Any:
    if isinstance(inputs, PlacedParameter):
        return inputs.full
    if isinstance(inputs, dict):
        return {key: _full(value) for key, value in inputs.items()}
    if isinstance(inputs, Tensor | GradientEdge) or not hasattr(inputs, "__iter__"):
        return inputs
    return [_full(value) for value in inputs]


_apply: Callable[..., Any] = torch._C._FunctionBase.__dict__["apply"]
_CONTAINERS = frozenset({list, tuple, dict})


def reads_in_full(apply: Any) -> Any:
    """Returns an ``apply`` that unshards parameters first.

    It replaces ``apply`` of the base class, so that earlier references to it reach this one.
    """
    return classmethod(_apply_with_full)


def _apply_with_full(cls: type, *args: Any, **kwargs: Any) -> Any:
    kinds = set(map(type, args))
    if KINDS.isdisjoint(kinds) and _CONTAINERS.isdisjoint(kinds):
        return _apply(cls, *args, **kwargs)
    params = [value for value in leaves(args) if isinstance(value, PlacedParameter)]
    if not params:
        return _apply(cls, *args, **kwargs)
    return call_with_full(_apply, (cls, *args), kwargs, params)
