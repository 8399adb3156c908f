"""Bytes and collectives of a sharded model's step, predicted from its layouts."""

from __future__ import annotations

from torch import nn

from zerocore import _C
from zerocore.common.checks import check_int
from zerocore.common.memory_bytes import MemoryBytes
from zerocore.model.state import ShardState, state_of


def predict_memory(
    model: nn.Module,
    stage: int | None = None,
    optimizer_states: int = 2,
    micro_batches: int = 1,
) -> MemoryBytes:
    """Predicted from the layouts: what :func:`zerocore.memory_usage` shows after a steady step.

    Args:
        model: a sharded model.
        stage: any stage, the model's own by default.
        optimizer_states: tensors of the parameter's size that the optimizer keeps (Adam: 2).
        micro_batches: forwards and backwards of a step, all but the last under ``no_sync``.

    Raises:
        ValueError: the model is not sharded, there is no such stage, or a number is too small.
        TypeError: a number is no int.
        RuntimeError: this process was forked from the one that sharded the model.
    """
    check_int("optimizer_states", optimizer_states, 0)
    state = state_of(model)
    units, order = _inputs(state)
    chosen = state.config.stage if stage is None else stage
    options = _options(state, chosen, micro_batches)
    plan = _C.plan_memory(
        units, order, options, rank=state.ranks.shard_rank, optimizer_states=optimizer_states
    )
    return MemoryBytes(
        plan.parameters, plan.gradients, plan.optimizer, plan.pool, plan.main_weights
    )


def _inputs(state: ShardState) -> tuple[list[list[_C.ParamSpec]], list[_C.CallEvent]]:
    units = [[param.spec for param in unit.params] for unit in state.units]
    return units, state.engine.order


def _options(state: ShardState, stage: int, micro_batches: int = 1) -> _C.PlanOptions:
    check_int("stage", stage, 0)
    check_int("micro_batches", micro_batches, 1)
    return _C.PlanOptions(
        stage=stage,
        world_size=state.ranks.num_shards,
        num_replicas=state.ranks.num_replicas,
        prefetch=state.config.prefetch,
        exchanges=state.ranks.exchanges,
        sums_on_host=state.device.type == "cpu",
        micro_batches=micro_batches,
        hold_full=state.config.accumulate == "full",
    )


def planned_events(model: nn.Module, micro_batches: int = 1) -> list[tuple[str, str, int, int]]:
    """Predicted events of a steady step: ``(op, unit, nbytes, pool_nbytes)`` in order.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`predict_events`.
    """
    state = state_of(model)
    options = _options(state, state.config.stage, micro_batches)
    events = _C.plan_events(*_inputs(state), options)
    return [(op, state.units[unit].name, nbytes, pool) for op, unit, nbytes, pool, *_ in events]


def predict_events(model: nn.Module, micro_batches: int = 1) -> list[tuple[str, str, int]]:
    """Predicted collectives of a steady step: ``(op, unit, nbytes)`` in order.

    All micro-batches but the last are under ``no_sync``.

    ``nbytes`` is the full bucket; a rank sends or receives ``nbytes * (W - 1) / W`` of it (twice
    that for an all-reduce).

    Raises:
        ValueError: the model is not sharded, or ``micro_batches`` is below 1.
        TypeError: ``micro_batches`` is no int.
        RuntimeError: this process was forked from the one that sharded the model.
    """
    return [
        (op, unit, nbytes)
        for op, unit, nbytes, _ in planned_events(model, micro_batches)
        if op not in ("unshard", "reshard")
    ]
