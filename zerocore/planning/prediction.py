"""Predicts the bytes and collectives of a sharded model's step from its layouts."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from zerocore.common.checks import check_int
from zerocore.common.memory_bytes import MemoryBytes
from zerocore.model.state import ShardState, state_of
from zerocore.planning.division import Division, parts_of
from zerocore.planning.planner import Planner, PlannerUnit


def predict_memory(
    model: nn.Module,
    stage: int | None = None,
    optimizer_states: int = 2,
    micro_batches: int = 1,
) -> MemoryBytes:
    """Predicts from the layouts what :func:`zerocore.memory_usage` shows after a steady step.

    Args:
        model: a sharded model.
        stage: any stage, the model's own by default.
        optimizer_states: state tensors of a parameter's size that the optimizer keeps (Adam: 2).
        micro_batches: forwards and backwards of a step, all but the last under ``no_sync``.

    Raises:
        ValueError: the model is not sharded, there is no such stage, or a number is too small.
        TypeError: a number is not an int.
        RuntimeError: this process was forked from the one that sharded the model.
    """
    check_int("optimizer_states", optimizer_states, 0)
    state = state_of(model)
    division = division_of(state)
    if stage is not None:
        check_int("stage", stage, 0)
        if state.kind.by_rows and stage != state.config.stage:
            raise ValueError(
                f"stage={stage}: this {type(model).__name__} is sharded by zerocore.fsdp, which is "
                "stage 3; leave stage out, or plan the model before it is sharded"
            )
        division = replace(division, stage=stage)
    return planner_of(state, micro_batches, optimizer_states).memory(division)


def division_of(state: ShardState) -> Division:
    """Returns how a sharded model is divided, seen from this rank."""
    ranks = state.meshes[0]
    return Division(
        stage=state.config.stage,
        world_size=ranks.world_size,
        num_replicas=ranks.shape[0],
        communication=replace(state.config.communication, regather=ranks.num_near),
        rank=ranks.rank,
        backend=state.ranks.backend,
        sums_on_host=state.device.type == "cpu",
        offload=state.config.offload,
        parts=parts_of(state.meshes[1:]),
    )


def planner_of(state: ShardState, micro_batches: int = 1, num_states: int = 2) -> Planner:
    """Makes the planner of a sharded model, with the calls that its runtime has seen. Raises
    ValueError if ``micro_batches`` is below 1, TypeError if it is not an int."""
    check_int("micro_batches", micro_batches, 1)
    units = (
        PlannerUnit(
            unit.name,
            tuple(param.spec for param in unit.laid_out),
            tuple(param.types for param in unit.laid_out),
            stays=unit.stays,
            near=unit.near,
            mesh=unit.mesh,
        )
        for unit in state.units
    )
    return Planner(
        units=tuple(units),
        order=tuple(state.engine.order),
        num_states=num_states,
        micro_batches=micro_batches,
        by_rows=state.kind.by_rows,
        sums_in_order=state.config.sums_in_order,
    )


def planned_events(model: nn.Module, micro_batches: int = 1) -> list[tuple[str, str, int, int]]:
    """Predicts a steady step's events: ``(op, unit, nbytes, pool_nbytes)`` in order.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`predict_events`.
    """
    state = state_of(model)
    events = planner_of(state, micro_batches).events(division_of(state))
    return [(e.op, state.units[e.unit].name, e.nbytes, e.pool_nbytes) for e in events]


def predict_events(model: nn.Module, micro_batches: int = 1) -> list[tuple[str, str, int]]:
    """Predicts a steady step's collectives: ``(op, unit, nbytes)`` in order.

    All micro-batches but the last are under ``no_sync``.

    ``nbytes`` is the full bucket. In a collective of ``W`` ranks, a rank sends and receives
    ``nbytes * (W - 1) / W`` of it; twice as much for an all-reduce.

    Raises:
        ValueError: the model is not sharded, or ``micro_batches`` is below 1.
        TypeError: ``micro_batches`` is not an int.
        RuntimeError: this process was forked from the one that sharded the model.
    """
    return [
        (op, unit, nbytes)
        for op, unit, nbytes, _ in planned_events(model, micro_batches)
        if op not in ("unshard", "reshard")
    ]
