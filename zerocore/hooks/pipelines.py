"""Pipelines that compute gradients of inputs and of weights apart (zero bubble).

Their backwards for weights set gradients of what they are given, and no backward is complete. So a
sharded stage gives its full parameters, whose gradients wait there until the schedule reduces
them, once for all micro-batches; until then gathered units stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from zerocore.common.patching import around
from zerocore.model.state import find_state
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.place import leaf_of
from zerocore.tensor.rows import shard_of


@around
def for_full_weights(backward: Any, *args: Any, **kwargs: Any) -> Any:
    """A backward of a stage, among whose arguments its weights are the one iterator."""
    full = [_full(arg) if isinstance(arg, Iterator) else arg for arg in args]
    return backward(*full, **kwargs)


def _full(weights: Iterable[Any]) -> Iterator[Any]:
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
    if any(computation.name == "BACKWARD_INPUT" for computation in _computations(self)):
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


def _computations(schedule: Any) -> Iterator[Any]:
    """The steps that the ranks are going to do; see PipelineScheduleMulti.pipeline_order."""
    for actions in schedule.pipeline_order.values():
        for action in actions:
            if action is not None:
                yield action.computation_type
