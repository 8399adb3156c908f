"""Runs backwards of pipeline stages with full weights, and reduces once for all micro-batches.

Zero-bubble pipelines compute the gradients of inputs and of weights in separate backwards. A
backward for weights sets the gradients of the tensors passed to it, and no backward is complete.
So a sharded stage passes its full parameters. Their gradients stay there until the schedule
reduces them, once for all micro-batches; until then the units stay unsharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from zerocore.common.patching import around
from zerocore.model.state import find_state
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import leaf_of
from zerocore.tensor.rows import shard_of


@around
def for_full_weights(backward: Any, *args: Any, **kwargs: Any) -> Any:
    """Passes full parameters to a stage's backward; its weights are the only iterator argument."""
    return backward(*_with_full_weights(args), **kwargs)


@around
def adds_to_full_weights(backward: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a backward for weights, which adds to the gradients of full parameters.

    Engines leave these gradients where they are until the next backward for inputs ends, as FSDP2
    does. An engine that watches the graph would otherwise take them within this backward, and one
    that knows the graph would not.
    """
    full = _with_full_weights(args)
    states = {state for arg in full if isinstance(arg, FullWeights) for state in arg.states()}
    engines = [state.engine for state in states if not state.engine.defers_reductions]
    for engine in engines:
        engine.defers_reductions = True
    try:
        return backward(*full, **kwargs)
    finally:
        for engine in engines:
            engine.defers_reductions = False


class FullWeights(list[Any]):
    """Full parameters of a stage."""

    def states(self) -> set[Any]:
        """Returns the states of the sharded models that they belong to."""
        shards = map(shard_of, self)
        return {shard.state_ref() for shard in shards if shard is not None}


def _with_full_weights(args: Iterable[Any]) -> list[Any]:
    return [
        FullWeights(map(_full_weight, arg)) if isinstance(arg, Iterator) else arg for arg in args
    ]


def _full_weight(weight: Any) -> Any:
    shard = shard_of(weight)
    if isinstance(weight, ShardedParameter):
        _check_deferred(weight)
        return weight.full
    if shard is None:
        return leaf_of(weight)
    return shard.state_ref().units[shard.unit].params[shard.position].full


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
        states = [find_state(stage.submod) for stage in self._stages]  # torch tells fsdp's stages
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
