"""Wraps torch's calls of autograd: a backward's begin and end, and functions of parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zerocore._C import forget_backward_call, note_backward_call
from zerocore.model.state import live_states
from zerocore.tensor.implicit_unshard import call_with_full
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.place import PlacedParameter, leaves


def takes_full(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """For edges and hooks of several tensors: the node of a parameter is that of the full one."""

    @wraps(function)
    def run(tensor: Tensor) -> Any:
        return function(_full(tensor))

    return run


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a backward of which the engines know, also when it fails.

    ``inputs`` that are sharded parameters stand for the full ones, which take part in the graph:
    ``backward`` reduces their gradients alone, and ``torch.autograd.grad`` returns this rank's own
    full gradients, as it does under DistributedDataParallel.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "grad" and len(args) > 1:
            args = (args[0], _full(args[1]), *args[2:])
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = _full(kwargs["inputs"])
        note_backward_call(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            states = live_states()
            answers = (state.explain_backward(error, state) for state in states)
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
