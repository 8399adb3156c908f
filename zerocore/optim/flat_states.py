"""Flat optimizer states: one allocation per unit, dtype and moment, with views for parameters."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocore.hooks.optimizer_states import as_state, state_memory
from zerocore.tensor import pending_host_updates
from zerocore.tensor.functions import Args, Function, Kwargs
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import Placed
from zerocore.tensor.rows import local_part, shard_of

State = dict[str, Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")
# Views are aligned for the kernels' widest accesses, as the shards are.
_ALIGNMENT_NBYTES = 16


class HostState(Tensor):
    """A step count that a thread updates, also after ``step()`` returns: torch functions wait."""

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        pending_host_updates.finish()
        if any(issubclass(kind, Placed) for kind in types):
            return NotImplemented  # the shards' rules handle it together with a shard
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(proto)


def allocate_states(params: Sequence[Tensor]) -> list[State]:
    """Makes Adam's states of each parameter, zero: ``step``, ``exp_avg`` and ``exp_avg_sq``.

    Parameters of one unit and dtype share an allocation for each of the three; so do parameters
    that are not sharded. A parameter's moments are views with its shape, strides and dtype, or
    shards at its place; ``step`` is a float32 scalar on its device. Up to 12 bytes separate two
    views. The engine has memory on the host or on disk for the moments of one optimizer. A second
    optimizer gets memory of its own on the host; on disk, it raises ValueError.
    """
    shared: dict[Hashable, list[int]] = {}
    states: list[State] = [{} for _ in params]
    planned = _planned_moments(params)
    for index, param in enumerate(params):
        if index in planned:
            moments = dict(zip(MOMENTS, planned[index], strict=True))
            states[index] = {"step": torch.zeros((), device="cpu"), **moments}
        else:
            shard = shard_of(param)
            unit = None if shard is None else (shard.state_ref, shard.unit)
            shared.setdefault((unit, param.device, param.dtype), []).append(index)
    for indices in shared.values():
        allocated = _allocate([local_part(params[index]) for index in indices])
        for index, state in zip(indices, allocated, strict=True):
            states[index] = state
    return list(map(_placed, params, states))


def _placed(param: Tensor, state: State) -> State:
    on_host = isinstance(param, ShardedParameter) and param.on_host
    step = state["step"].as_subclass(HostState) if on_host else state["step"]
    return {"step": step, **{name: as_state(state[name], param) for name in MOMENTS}}


def _planned_moments(params: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """Returns the moments, by index, of parameters for which the engine has memory to give."""
    planned: dict[int, list[Tensor]] = {}
    has_collected = False
    for index, param in enumerate(params):
        if not isinstance(param, ShardedParameter) or not param.on_host:
            continue
        engine = param.state_ref().engine
        moments = engine.make_moments(param.unit, param.position)
        if not moments and not has_collected:
            has_collected = True
            gc.collect()  # a dropped optimizer that holds them may await collection
            moments = engine.make_moments(param.unit, param.position)
        if moments:
            planned[index] = moments
        elif param.on_disk:
            raise ValueError(
                f"parameter '{param.fqn}': another optimizer has its moments on disk, which holds "
                "the moments of one optimizer. Delete that optimizer first."
            )
    return planned


def _allocate(params: Sequence[Tensor]) -> list[State]:
    step = _ALIGNMENT_NBYTES // params[0].element_size()
    offsets, end = [], 0
    for param in params:
        offsets.append(end)
        end += -(-param.numel() // step) * step
    steps = torch.zeros(len(params), dtype=torch.float32, device=params[0].device)
    states: list[State] = [{"step": steps[index]} for index in range(len(params))]
    for name in MOMENTS:
        flat = state_memory(end, params[0].dtype, params[0].device)
        for param, offset, state in zip(params, offsets, states, strict=True):
            state[name] = flat.as_strided(param.shape, param.stride(), offset)
    return states


def check_loaded(
    states: Mapping[Any, Any], params: Sequence[Tensor], label: Callable[[Tensor], str]
) -> None:
    """Rejects a parameter's loaded state if it is not Adam's, or has another shape (ValueError)."""
    for param in params:
        state = states.get(param)
        if not state:
            continue
        for name in ("step", *MOMENTS):
            if name not in state:
                raise ValueError(
                    f"the loaded state of {label(param)} has {sorted(state)}, expected "
                    f"{sorted(('step', *MOMENTS))}: it was saved by another kind of optimizer"
                )
        for name in MOMENTS:
            shape, expected = local_part(state[name]).shape, local_part(param).shape
            if shape != expected:
                raise ValueError(
                    f"the loaded {name} of {label(param)} has shape {tuple(shape)}, "
                    f"this rank's parameter {tuple(expected)}. Load a state that was saved with "
                    "the same stage and number of ranks"
                )


def adopt_states(
    loaded: Mapping[Any, Any], params: Sequence[Tensor], held: Mapping[Any, Any]
) -> dict[Tensor, State]:
    """Copies loaded states into the ``held`` flat ones, or into new ones; returns the copies."""
    stated = [param for param in params if loaded.get(param)]
    new = [param for param in stated if not held.get(param)]
    fresh = dict(zip(new, allocate_states(new), strict=True))
    result = {}
    for param in stated:
        state = fresh.get(param) or held[param]
        for name in MOMENTS:
            local_part(state[name]).copy_(local_part(loaded[param][name]))
        state["step"].copy_(torch.as_tensor(loaded[param]["step"], device="cpu"))
        result[param] = state
    return result
