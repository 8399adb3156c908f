"""Builds the state of a model from its units, for both kinds of shards.

A collector finds and checks parameters, units and meshes; ``shard`` and ``fully_shard`` each have
one. The ranks compare the results. The builder then makes the engine and binds it to the shards.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zerocore._C import CallEvent, Engine, EngineOptions, GroupNames, UnitParam, UnitSpec
from zerocore.common.agreement import agree
from zerocore.common.alarm import stall_seconds, watch
from zerocore.common.host import update_threads
from zerocore.model.materialize import InitFn
from zerocore.model.parameter_meshes import ModelPart
from zerocore.model.ranks import Ranks, control_group, make_levels, make_near, with_reductions
from zerocore.model.state import ShardKind, ShardState, set_state
from zerocore.model.unit_call import UnitCall
from zerocore.model.units import Param, Unit, UnitsOf, backward_reads, call_order, units_by_module
from zerocore.options.config import ShardConfig, shard_options
from zerocore.tensor import pending_host_updates
from zerocore.tensor.shown import ShownView


@dataclass(frozen=True)
class Sharding:
    """A model and how to shard it. Each step of the way returns one with more facts."""

    model: nn.Module
    called: Sequence[nn.Module]  # modules that programs call: the model, or several of one unit
    kind: Kind
    config: ShardConfig
    units: Sequence[Unit]
    ranks: Ranks  # all ranks of the model; tensor-parallel ranks count as replicas
    meshes: tuple[Ranks, ...]  # the data-parallel ranks, then the ranks of units on other meshes
    device: torch.device  # the device of layers
    # How long ranks wait for each other: 0 forever, None for the process group's timeout.
    stall_seconds: float | None = field(default_factory=stall_seconds)
    name: str = ""  # the same on all ranks, and unique to the model, after :func:`agreed`
    parts: tuple[ModelPart, ...] = ()  # parameters that not all data-parallel ranks share
    tensor_ranks: ProcessGroup | None = None  # of tensor parallelism
    init_fn: InitFn | None = None  # initialises a module on the meta device


class Kind(ShardKind):
    """The functions that make one kind of shards."""

    sets_values: ClassVar[bool]  # it passes full values to the engine, not this rank's part

    @abstractmethod
    def facts(self, sharding: Sharding, mesh: int) -> list[object]:
        """Returns facts that the ranks of a mesh compare; mesh 0 has all units."""

    @abstractmethod
    def unit_param(self, config: ShardConfig, unit: Unit, param: Any, /) -> UnitParam:
        """Describes a parameter to the engine."""

    def values(self, sharding: Sharding, state: ShardState, unit: Unit) -> list[Tensor]:
        """Returns the full parameters of a unit; an empty list if they are unknown."""
        return []

    @abstractmethod
    def make_shard(self, state: ShardState, unit: Unit, position: int, param: Any, /) -> None:
        """Replaces a parameter by its shard, and binds it to the engine by :func:`bind_shard`."""

    def bind_extensions(self, state: ShardState, unit: Unit) -> None:
        """Binds the engine's memory to parameters that gather themselves."""
        for extension in unit.extensions:
            extension.bind(state.engine, unit)

    @abstractmethod
    def set_calls(self, sharding: Sharding, state: ShardState, units_of: UnitsOf) -> None:
        """Makes modules enter units when called."""


def agreed(
    ranks: Ranks, collect: Callable[[], Sharding], device: torch.device | None = None
) -> Sharding:
    """Returns the result of ``collect`` with a name; collective. All ranks raise an error of one
    rank, and a ValueError if their facts differ. ``device``: as in :func:`agree`."""
    sharding = named(ranks, collect, lambda sharding: sharding.kind.facts(sharding, 0), device)
    for number, mesh in enumerate(sharding.meshes[1:], 1):
        agree(mesh.groups, None, sharding.kind.facts(sharding, number), sharding.device)
    return sharding


def named(
    ranks: Ranks,
    collect: Callable[[], Sharding],
    facts_of: Callable[[Sharding], list[Any]],
    device: torch.device | None = None,
) -> Sharding:
    """Does the same as :func:`agreed`, but ``ranks`` compare only the facts of ``facts_of``."""
    sharding: Sharding | None = None
    facts: list[Any] = []
    error: Exception | None = None
    try:
        sharding = collect()
        facts = facts_of(sharding)
    except Exception as caught:
        error = caught
    name = agree(ranks.groups, error, facts, device if sharding is None else sharding.device)
    assert sharding is not None  # agree() has raised the error
    return replace(sharding, name=name)


def build(sharding: Sharding) -> ShardState:
    """Shards a model in place, after its ranks have agreed; collective. Returns its state, which it
    also attaches to the model."""
    sharding = _with_groups(sharding)
    kind, config, device = sharding.kind, sharding.config, sharding.device
    units_of = units_by_module(unit.modules for unit in sharding.units)
    engine = _make_engine(sharding, call_order(sharding.called, units_of))
    if (factor := config.communication.gradient_divide_factor) is not None:
        for index in range(len(sharding.units)):
            engine.settings(index).gradient_scale = 1.0 / factor
    if config.offload is not None:
        from zerocore.sharding.host_memory import take_host_memory  # late: most models offload none

        take_host_memory(engine, config, sharding.meshes[0], device)
    ranks, meshes, tensor_ranks = sharding.ranks, sharding.meshes, sharding.tensor_ranks
    state = ShardState(engine, kind, config, ranks, meshes, device, tensor_ranks)
    for unit in sharding.units:
        _add_unit(sharding, state, unit)
    kind.set_calls(sharding, state, units_of)
    engine.start(kind.sets_values and (config.sync_params or state.world_size == 1))
    set_state(sharding.model, state)
    loads_late = config.leaves("parameters") and device.type != "cpu"
    if engine.lands_gradients or loads_late:
        pending_host_updates.watch(ref(state))
    return state


def _with_groups(sharding: Sharding) -> Sharding:
    """Makes the groups that gathers and reductions need; collective."""
    config, device = sharding.config, sharding.device
    meshes = [make_near(ranks, device) for ranks in sharding.meshes]
    if config.communication.replicas_share is not None:
        meshes = [make_levels(ranks, device) for ranks in meshes]
    if config.placements.parameters and config.communication.overlap_reductions:
        meshes = [with_reductions(ranks, device) for ranks in meshes]
    ranks = meshes[0] if sharding.tensor_ranks is None else sharding.ranks
    return replace(sharding, ranks=ranks, meshes=tuple(meshes))


def _add_unit(sharding: Sharding, state: ShardState, unit: Unit) -> None:
    kind, unit.index = sharding.kind, len(state.units)
    state.units.append(unit)
    values = kind.values(sharding, state, unit)
    unknown = [None] * (len(state.engine.layout(unit.index).places) - len(values))
    broadcast = kind.sets_values and sharding.config.sync_params
    state.engine.materialize(unit.index, [*values, *unknown], broadcast)
    del values
    for position, param in enumerate(unit.params):
        kind.make_shard(state, unit, position, param)
    kind.bind_extensions(state, unit)
    state.extensions += unit.extensions


def bind_shard(
    state: ShardState,
    unit: Unit,
    position: int,
    param: Param,
    grad: Tensor | None,
    local: Tensor | None = None,
    view: ShownView | None = None,
) -> None:
    """Binds a parameter, whose shard is made, to the engine. ``local``: the memory of a shard that
    is a DTensor; ``view``: the view that modules see instead of the full parameter."""
    engine, index, is_full = state.engine, unit.index, param.is_full
    param.spec = engine.spec(index, position)
    engine.bind(index, position, param.full, param.shard, grad, local, is_whole=is_full)
    if view is not None:
        engine.set_view(index, position, view.show)
        unit.views.append(view)


def unit_call(
    state: ShardState, modules: Sequence[nn.Module], units: tuple[int, ...], **options: Any
) -> UnitCall:
    """Makes the unit call of ``modules``, which enters ``units``; ``options`` are its fields."""
    views = tuple(view for unit in units for view in state.units[unit].views)
    has_any = bool(views) or "before_units" in options
    is_lookup = len(modules) == 1 and not (has_any or backward_reads(modules[0]))
    lookup = ref(modules[0]) if is_lookup else None
    return UnitCall(state, state.engine, units, views=views, lookup=lookup, **options)


def _make_engine(sharding: Sharding, order: list[CallEvent]) -> Engine:
    config, kind, called = sharding.config, sharding.kind, type(sharding.called[0]).__name__
    control = control_group(sharding.ranks)
    threads = None if config.offload is None else config.offload.threads
    options = EngineOptions(
        sharding=shard_options(
            config.stage, config.communication, config.offload, kind.by_rows, config.sums_in_order
        ),
        meshes=[
            GroupNames(
                shard=_name_of(ranks.shard if ranks.levels is None else ranks.levels[0]),
                replicas=_name_of(ranks.replicas if ranks.levels is None else ranks.levels[1]),
                near=_name_of(ranks.near),
                reductions=_name_of(ranks.reductions),
                first_rank=min(ranks.members, default=0),
            )
            for ranks in sharding.meshes
        ],
        control=_name_of(control),
        static_graph=config.communication.static_graph,
        registered=config.communication.registered,
        alarm_name="" if control is None else f"{sharding.name} {called}",
        stall_seconds=sharding.stall_seconds,
        host_threads=update_threads(sharding.device) if threads is None else threads,
    )
    units = [_unit_spec(sharding, unit) for unit in sharding.units]
    engine = Engine(options, device=sharding.device, units=units, order=order)
    watch(control)
    return engine


def _unit_spec(sharding: Sharding, unit: Unit) -> UnitSpec:
    params = [sharding.kind.unit_param(sharding.config, unit, param) for param in unit.params]
    for extension in unit.extensions:
        params += extension.unit_params()
    return UnitSpec(unit.name, params, unit.stays, unit.near, unit.mesh)


def _name_of(group: ProcessGroup | None) -> str | None:
    return None if group is None else group.group_name
