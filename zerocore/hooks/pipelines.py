"""Refuses schedules of torch.distributed.pipelining that split a stage's backward in two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from zerocore.common.patching import around
from zerocore.tensor.parameter import ShardedParameter


@around
def checked_backward(backward: Any, outputs: Any, grads: Any, inputs: Any, weights: Any) -> Any:
    """The backward for the inputs of a stage alone, which refuses a sharded stage."""
    weights = list(weights)
    _check(weights)
    return backward(outputs, grads, inputs, iter(weights))


def checked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of a schedule, which refuses sharded stages on every rank before the first one."""
    from torch.distributed.pipelining import schedules  # late: takes a while

    @wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if schedules.BACKWARD_INPUT in _computations(self):
            for part in self._stages:
                _check(part.submod.parameters())
        return step(self, *args, **kwargs)

    return run


def _computations(schedule: Any) -> Iterator[Any]:
    """The steps that the ranks are going to do; see PipelineScheduleMulti.pipeline_order."""
    for actions in schedule.pipeline_order.values():
        for action in actions:
            if action is not None:
                yield action.computation_type


def _check(weights: Iterable[Any]) -> None:
    for weight in weights:
        if isinstance(weight, ShardedParameter):
            raise RuntimeError(
                f"parameter '{weight.fqn}' is sharded, and this pipeline schedule computes "
                "gradients of inputs and of weights in two backwards (zero bubble): those of "
                "sharded weights would be lost. Take ScheduleGPipe, Schedule1F1B or "
                "ScheduleInterleaved1F1B"
            )
