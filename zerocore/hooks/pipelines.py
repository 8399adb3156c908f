"""Refuses schedules of torch.distributed.pipelining that split a stage's backward in two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, wraps
from typing import Any

from zerocore.tensor.parameter import ShardedParameter


@cache
def refuse_split_backward() -> None:
    """From now on a backward for the inputs of a sharded stage alone is an error.

    On every rank of the pipeline before the first step, where the schedule is known beforehand.
    """
    from torch.distributed.pipelining import schedules, stage  # late: takes a while

    runner: Any = stage
    backward_input = getattr(runner, "stage_backward_input", None)
    step: Any = schedules.PipelineScheduleMulti.step
    if backward_input is None:  # a torch that splits backwards elsewhere
        return

    @wraps(backward_input)
    def checked_backward(outputs: Any, grads: Any, inputs: Any, weights: Any) -> Any:
        weights = list(weights)
        _check(weights)
        return backward_input(outputs, grads, inputs, iter(weights))

    @wraps(step)
    def checked_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if schedules.BACKWARD_INPUT in _computations(self):
            for part in self._stages:
                _check(part.submod.parameters())
        return step(self, *args, **kwargs)

    for owner, name, function in (
        (runner, "stage_backward_input", checked_backward),
        (schedules.PipelineScheduleMulti, "step", checked_step),
    ):
        setattr(owner, name, function)


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
