"""The one builder: makes the engine of a model whose ranks have agreed, of either kind of shards.

``zerocore.shard`` fills it with flat shards, ``fully_shard`` with rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zerocore._C import CallEvent, Engine, EngineOptions, GroupNames, UnitSpec
from zerocore.common.agreement import together
from zerocore.common.alarm import watch
from zerocore.common.host import check_obtainable, local_ranks, shortage, update_threads
from zerocore.model.ranks import Ranks, control_group, make_levels, make_near, with_reductions
from zerocore.model.state import ShardState, set_state
from zerocore.model.units import UnitsOf, call_order, units_by_module
from zerocore.options.config import ShardConfig, shard_options
from zerocore.tensor import pending_host_updates

Fill = Callable[[ShardState, UnitsOf], None]
"""Appends the units to a state, and gives modules their calls."""


@dataclass(frozen=True)
class AgreedModel:
    """A model and how it is sharded, on which its ranks have agreed."""

    model: nn.Module
    called: Sequence[nn.Module]  # from outside: the model, or several of one unit
    config: ShardConfig
    ranks: Ranks  # all of the model
    meshes: Sequence[Ranks]  # those of data parallelism, and those of units on others
    device: torch.device  # where layers compute
    name: str  # the same on all ranks and no other model's
    stall_seconds: float | None  # as of :class:`zerocore.sharding.request.ShardRequest`
    units: list[UnitSpec]
    modules: Sequence[Sequence[nn.Module]]  # by unit: those whose calls enter it
    tensor_ranks: ProcessGroup | None = None  # of tensor parallelism


def build_model(agreed: AgreedModel, fill: Fill) -> ShardState:
    """The state of the model, with which functions of zerocore find it; collective."""
    config, device = agreed.config, agreed.device
    units_of = units_by_module(agreed.modules)
    engine = _make_engine(agreed, call_order(agreed.called, units_of))
    if (factor := config.communication.gradient_divide_factor) is not None:
        for index in range(len(agreed.units)):
            engine.settings(index).gradient_scale = 1.0 / factor
    _take_host_memory(engine, config, agreed.meshes[0], device)
    state = ShardState(
        engine, config, agreed.ranks, tuple(agreed.meshes), device, agreed.tensor_ranks
    )
    fill(state, units_of)
    engine.start(not config.by_rows and (config.sync_params or state.world_size == 1))
    set_state(agreed.model, state)
    loads_late = config.leaves("parameters") and device.type != "cpu"
    if engine.lands_gradients or loads_late:
        pending_host_updates.watch(ref(state))
    return state


def with_groups(meshes: Sequence[Ranks], config: ShardConfig, device: torch.device) -> list[Ranks]:
    """The ranks with the groups that their gathers and reductions need; collective."""
    made = [make_near(ranks, device) for ranks in meshes]
    if config.communication.replicas_share is not None:
        made = [make_levels(ranks, device) for ranks in made]
    if config.placements.parameters and config.communication.overlap_reductions:
        made = [with_reductions(ranks, device) for ranks in made]
    return made


def _make_engine(agreed: AgreedModel, order: list[CallEvent]) -> Engine:
    config = agreed.config
    control = control_group(agreed.ranks)
    threads = None if config.offload is None else config.offload.threads
    options = EngineOptions(
        sharding=shard_options(
            config.stage, config.communication, config.offload, config.by_rows, config.sums_in_order
        ),
        meshes=[
            GroupNames(
                shard=_name_of(ranks.shard if ranks.levels is None else ranks.levels[0]),
                replicas=_name_of(ranks.replicas if ranks.levels is None else ranks.levels[1]),
                near=_name_of(ranks.near),
                reductions=_name_of(ranks.reductions),
                first_rank=min(ranks.members, default=0),
            )
            for ranks in agreed.meshes
        ],
        control=_name_of(control),
        static_graph=config.communication.static_graph,
        registered=config.communication.registered,
        alarm_name="" if control is None else f"{agreed.name} {type(agreed.called[0]).__name__}",
        stall_seconds=agreed.stall_seconds,
        host_threads=update_threads(agreed.device) if threads is None else threads,
    )
    engine = Engine(options, device=agreed.device, units=agreed.units, order=order)
    watch(control)
    return engine


def _take_host_memory(
    engine: Engine, config: ShardConfig, ranks: Ranks, device: torch.device
) -> None:
    if config.offload is not None and config.offload.path is not None:
        with together(ranks.groups, device):  # the room of this rank's file is taken
            engine.open_disk(config.offload.path, f"states-of-rank-{ranks.rank}")
    if config.leaves("states") or config.leaves("gradients"):
        _map_host_memory(engine, ranks, device)


def _map_host_memory(engine: Engine, ranks: Ranks, device: torch.device) -> None:
    """Takes this rank's memory on the host; raises MemoryError if there is none for all ranks."""
    with together(ranks.groups, device):
        check_obtainable(engine.host_memory_nbytes, local_ranks())
        try:
            engine.map_host_memory()
        except RuntimeError as error:
            lack = shortage(engine.host_memory_nbytes, local_ranks())
            raise MemoryError(f"{lack}. {error}") from error


def _name_of(group: ProcessGroup | None) -> str | None:
    return None if group is None else group.group_name
