"""Wraps torch's entries to autograd: backward, grad, and functions that take parameters.

Zero-bubble pipelines compute the gradients of inputs and of weights in separate backwards. A
backward for weights sets the gradients of the tensors passed to it, and no backward is complete.
So a sharded stage passes its full parameters. Their gradients stay there until the schedule
reduces them, once for all micro-batches; until then the units stay unsharded.
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
    """Wraps ``backward`` or ``grad``: tells the engines when it begins, ends or fails.

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
    """Returns the ``apply`` that unshards parameters first.

    It replaces the base class's, so that references to ``Function.apply`` taken earlier reach it.
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


@around
def for_full_weights(backward: Any, *args: Any, **kwargs: Any) -> Any:
    """Passes full parameters to a stage's backward; its weights are the only iterator argument."""
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
            f"parameter '{weight.fqn}' is sharded: a backward for weights alone would lose its "
            "gradient outside the step of a (zero-bubble) pipeline schedule. Call the schedule's "
            "step"
        )


@around
def reduces_at_the_end(step: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Defers the reductions of sharded stages in a schedule that splits backwards."""
    engines = []
    actions = filter(None, chain.from_iterable(self.pipeline_order.values()))  # None: a bubble
    if any(action.computation_type.name == "BACKWARD_INPUT" for action in actions):
        states = [find_state(stage.submod) for stage in self._stages]  # torch tells fsdp's itself
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
    """Reduces a stage's deferred gradients before the schedule scales them."""
    state = find_state(self.submod)
    if state is not None and state.engine.defers_reductions:
        state.engine.end_deferred(drops=False)
    return reduce(self, *args, **kwargs)
