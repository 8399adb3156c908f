"""Wraps torch's calls of autograd: a backward's begin and end, and functions of parameters.

Pipelines without bubbles compute gradients of inputs and of weights apart. Their backwards for
weights set gradients of what they are given, and no backward is complete. So a sharded stage gives
its full parameters, whose gradients wait there until the schedule reduces them, once for all
micro-batches; until then gathered units stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zerocore._C import forget_backward_call, note_backward_call
from zerocore.common import late
from zerocore.common.patching import around
from zerocore.model.state import find_state, live_states
from zerocore.tensor.implicit_unshard import call_with_full
from zerocore.tensor.parameter import KINDS, ShardedParameter
from zerocore.tensor.placed import PlacedParameter, leaf_of, leaves
from zerocore.tensor.rows import shard_of


def notes_backward(function: Callable[..., Any]) -> Callable[..., Any]:
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
    """The ``apply`` of a base class, in which ``Function.apply`` ends.

    An ``apply`` that was taken from its class before comes there, too.
    """
    return classmethod(_apply_with_full)


def _apply_with_full(cls: type, *args: Any, **kwargs: Any) -> Any:
    kinds = set(map(type, args))  # those of other types hold no parameter
    if KINDS.isdisjoint(kinds) and _CONTAINERS.isdisjoint(kinds):
        return _apply(cls, *args, **kwargs)
    params = [value for value in leaves(args) if isinstance(value, PlacedParameter)]
    if not params:
        return _apply(cls, *args, **kwargs)
    return call_with_full(_apply, (cls, *args), kwargs, params)


@around
def for_full_weights(backward: Any, *args: Any, **kwargs: Any) -> Any:
    """A backward of a stage, among whose arguments its weights are the one iterator."""
    full = [_full_weights(arg) if isinstance(arg, Iterator) else arg for arg in args]
    return backward(*full, **kwargs)


def _full_weights(weights: Iterable[Any]) -> Iterator[Any]:
    for weight in weights:
        shard = shard_of(weight)
        if isinstance(weight, ShardedParameter):
            _check_deferred(weight)
            yield weight.full
        elif shard is not None:
            unit = shard.state_ref().units[shard.unit]
            yield unit.params[shard.position].full
        else:
            yield leaf_of(weight)


def _check_deferred(weight: ShardedParameter) -> None:
    state = weight.state_ref()
    if state is None or not state.engine.defers_reductions:
        raise RuntimeError(
            f"parameter '{weight.fqn}' is sharded, and gradients of its weights alone would be "
            "lost outside of the step of a pipeline schedule (zero bubble). Call the schedule's "
            "step"
        )


@around
def reduces_at_the_end(step: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The step of a schedule, in which sharded stages reduce no earlier than it says."""
    engines = []
    actions = chain.from_iterable(self.pipeline_order.values())  # of all ranks, None for a pause
    if any(each is not None and each.computation_type.name == "BACKWARD_INPUT" for each in actions):
        states = [find_state(part.submod) for part in self._stages]  # fsdp's are told by torch
        engines = [state.engine for state in states if state is not None]
    for engine in engines:
        engine.begin_deferred()
    try:
        result = step(self, *args, **kwargs)
    except BaseException:
        for engine in engines:
            engine.end_deferred(drops=True)
        raise
    for engine in engines:
        if engine.defers_reductions:
            engine.end_deferred(drops=False)
    return result


@around
def reduces_deferred(reduce: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The end of a stage's backwards, before its gradients are scaled."""
    state = find_state(self.submod)
    if state is not None and state.engine.defers_reductions:
        state.engine.end_deferred(drops=False)
    return reduce(self, *args, **kwargs)
