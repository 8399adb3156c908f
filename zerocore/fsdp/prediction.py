"""The bytes that a fully sharded model holds on this rank, from the plan that shares its code."""

from __future__ import annotations

from torch import nn

from zerocore._C import Engine, MemoryPlan, PlanOptions, ShardOptions, UnitPlan, plan_memory
from zerocore.fsdp.group import Group, group_of
from zerocore.model.ranks import find_ranks


def predict_memory(model: nn.Module, optimizer_states: int = 2) -> MemoryPlan:
    """Bytes on this rank in a steady step of a model whose root has been called.

    Args:
        model: the root.
        optimizer_states: tensors of a parameter's size that the optimizer keeps; 2 for Adam.

    Returns:
        Bytes of parameters, main weights, gradients and optimizer states between steps, and the
        peak of the pool.

    Raises:
        ValueError: not the root of a fully sharded model, or no forward has been run yet.
    """
    group = group_of(model)
    if group is None or group.root is None or group.root.engine is None:
        raise ValueError(
            f"predict_memory: this {type(model).__name__} is not the root of a fully sharded model "
            "that has run a forward; call fully_shard, then run a forward"
        )
    engine, ranks = group.root.engine, find_ranks(group.mesh, model)
    options = PlanOptions(
        ShardOptions(stage=3, hold_full=True, by_rows=True),
        world_size=ranks.num_shards,
        backend=ranks.backend,
        num_replicas=ranks.num_replicas,
        sums_on_host=group.mesh.device_type == "cpu",
    )
    units = [_unit_plan(engine, each) for each in group.root.with_params()]
    return plan_memory(
        units,
        engine.order,
        options,
        rank=ranks.shard_rank,
        optimizer_states=optimizer_states,
    )


def _unit_plan(engine: Engine, group: Group) -> UnitPlan:
    specs = [engine.spec(group.unit, index) for index in range(len(group.params))]
    return UnitPlan(specs, stays=group.stays)
