"""Refuses calls of torch that would lose shards: broadcasts of modules, backwards in two parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from zerocore.common.patching import around
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.place import Placed, leaves

# Before 2.13 torch does not ask the tensors of these, as it does those of the other collectives.
UNASKED = (
    *("all_gather_coalesced", "all_reduce_coalesced", "all_to_all", "broadcast", "gather"),
    *("irecv", "isend", "recv", "reduce", "reduce_scatter", "scatter", "send"),
)


@around
def sends_no_shards(
    send: Any, group: Any, tensors: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """The broadcast of a list of tensors, which refuses shards before anything is sent.

    Other collectives of shards are refused by their rules. This one, with which wrappers and
    trainers give all ranks the module of rank 0, goes past them.
    """
    for tensor in tensors:
        if isinstance(tensor, Placed) and tensor.place.group is not None:
            raise TypeError(
                f"broadcast of the shard of '{tensor.place.fqn}': each rank holds other "
                "elements and would lose them. zerocore.shard has given all ranks the values "
                "of rank 0; leave the broadcast out, or where a trainer does it use "
                "zerocore.integrations (transformers, accelerate, lightning)"
            )
    return send(group, tensors, *args, **kwargs)


@around
def asks_shards(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A collective that lets shards among its tensors decide, by their rules."""
    tensors = tuple(value for value in leaves((args, kwargs)) if isinstance(value, Tensor))
    if has_torch_function(tensors):
        return handle_torch_function(function, tensors, *args, **kwargs)
    return function(*args, **kwargs)


@around
def checked_backward(backward: Any, outputs: Any, grads: Any, inputs: Any, weights: Any) -> Any:
    """The backward for the inputs of a stage alone, which refuses a sharded stage."""
    weights = list(weights)
    _check_stage(weights)
    return backward(outputs, grads, inputs, iter(weights))


def checked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of a schedule, which refuses sharded stages on every rank before the first one."""
    from torch.distributed.pipelining import schedules  # late: takes a while

    @wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if schedules.BACKWARD_INPUT in _computations(self):
            for part in self._stages:
                _check_stage(part.submod.parameters())
        return step(self, *args, **kwargs)

    return run


def _computations(schedule: Any) -> Iterator[Any]:
    """The steps that the ranks are going to do; see PipelineScheduleMulti.pipeline_order."""
    for actions in schedule.pipeline_order.values():
        for action in actions:
            if action is not None:
                yield action.computation_type


def _check_stage(weights: Iterable[Any]) -> None:
    for weight in weights:
        if isinstance(weight, ShardedParameter):
            raise RuntimeError(
                f"parameter '{weight.fqn}' is sharded, and this pipeline schedule computes "
                "gradients of inputs and of weights in two backwards (zero bubble): those of "
                "sharded weights would be lost. Take ScheduleGPipe, Schedule1F1B or "
                "ScheduleInterleaved1F1B"
            )
