"""Wraps torch's calls of a backward, once: autograd tells of neither their begin nor failure."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zerocore._C import forget_backward_call, note_backward_call
from zerocore.model.state import live_states
from zerocore.tensor.place import PlacedParameter

_WATCHED = "_zerocore_watched"
# Is given what a backward raised, and returns what to raise instead, or None.
Explain = Callable[[BaseException], BaseException | None]


def watch_backward_calls(explain: Explain) -> None:
    """From now on the engines know of each call of a backward, and when one fails.

    ``inputs`` that are sharded parameters stand for the full ones, which take part in the graph:
    ``backward`` reduces their gradients alone, and ``torch.autograd.grad`` returns this rank's own
    full gradients, as it does under DistributedDataParallel.

    Args:
        explain: makes an error of a backward say more, see :data:`Explain`.
    """
    for name in ("backward", "grad"):
        function = getattr(torch.autograd, name)
        if not hasattr(function, _WATCHED):
            setattr(torch.autograd, name, _watched(function, explain))
    graph: Any = torch.autograd.graph
    if not hasattr(graph._get_grad_fn_or_grad_acc, _WATCHED):
        graph._get_grad_fn_or_grad_acc = _node_of_full(graph._get_grad_fn_or_grad_acc)


def _node_of_full(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """For edges and hooks of several tensors: the node of a parameter is that of the full one."""

    @wraps(function)
    def run(tensor: Tensor) -> Any:
        return function(_full(tensor))

    setattr(run, _WATCHED, True)
    return run


def _watched(function: Callable[..., Any], explain: Explain) -> Callable[..., Any]:
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
            explained = explain(error)
            for state in live_states():
                state.engine.fail_backward()
            if explained is not None:
                raise explained from error
            raise
        finally:
            forget_backward_call()

    setattr(run, _WATCHED, True)
    return run


def _full(inputs: Any) -> Any:
    if isinstance(inputs, PlacedParameter):
        return inputs.full
    if isinstance(inputs, dict):
        return {key: _full(value) for key, value in inputs.items()}
    if isinstance(inputs, Tensor | GradientEdge) or not hasattr(inputs, "__iter__"):
        return inputs
    return [_full(value) for value in inputs]
