"""Builds the engine of a model and puts shards in the place of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zerocore._C import (
    CallEvent,
    Engine,
    EngineOptions,
    GroupNames,
    UnitParam,
    UnitSpec,
)
from zerocore.common.agreement import together
from zerocore.common.alarm import watch
from zerocore.common.host import check_obtainable, local_ranks, shortage, update_threads
from zerocore.hooks.optimizer_rules import earlier_optimizers, take_over
from zerocore.hooks.registration import watch_registrations, watch_state_dicts
from zerocore.layout.cuts import Cut
from zerocore.layout.place import PartOf, Place, spread
from zerocore.model.as_ddp import behave_as_ddp
from zerocore.model.casting import cast_around_kept
from zerocore.model.extensions import Extension
from zerocore.model.materialize import InitFn, full_values, materialize_buffers
from zerocore.model.parameter_meshes import find_ranges, find_sizes
from zerocore.model.ranks import Ranks, control_group, make_levels, make_near, with_reductions
from zerocore.model.state import Param, ShardState, Unit, set_state
from zerocore.model.unit_call import UnitCall, looked_at_by, set_unit_call
from zerocore.model.units import (
    ParamChoice,
    UnitPlanned,
    UnitsOf,
    backward_reads,
    call_order,
    units_by_module,
)
from zerocore.options.config import ShardConfig, shard_options
from zerocore.options.precision import MixedPrecision, param_types, unit_param
from zerocore.sharding.extensions import bind_extensions, encoded_params, make_extensions
from zerocore.sharding.request import ShardRequest, check_same_values, types_of
from zerocore.tensor import pending_host_updates
from zerocore.tensor.parameter import ShardedGrad, as_parameter, become_shard
from zerocore.tensor.shown import ShownView, shown_class
from zerocore.tensor.wrapped import show_made


def build(request: ShardRequest) -> ShardState:
    """Shards ``request.model`` in place and returns its state; on all ranks alike."""
    model, config, planned = request.model, request.config, request.planned
    earlier = earlier_optimizers(choice.param for unit in planned for choice in unit.params)
    if config.sync_params:
        check_same_values(request)
    meshes = _make_groups(request)
    extensions = make_extensions(planned, meshes, config, request.ranks, request.device)
    all_ranks = meshes[0] if request.tensor_ranks is None else request.all_ranks
    units_of = units_by_module(unit.modules for unit in planned)
    engine = make_engine(
        config,
        all_ranks,
        meshes,
        request.device,
        units=_unit_specs(planned, config, extensions),
        order=call_order([model], units_of),
        name=request.name,
        model=model,
        stall_seconds=request.stall_seconds,
    )
    _scale_gradients(engine, config, len(planned))
    _take_host_memory(engine, config, meshes[0], request.device)
    state = ShardState(
        engine, config, all_ranks, tuple(meshes), request.device, request.tensor_ranks
    )
    if config.mixed_precision is not None:
        cast_around_kept(model, config.mixed_precision)  # by the dtypes that parameters have now
    wholes = find_sizes(planned, request.parts, request.device)
    for index, unit in enumerate(planned):
        state.units.append(_shard_unit(state, index, unit, extensions, request.init_fn, wholes))
    state.part_ranges = find_ranges(state)
    materialize_buffers(model, request.device, request.init_fn)
    _set_unit_calls(model, units_of, state)
    watch_state_dicts(model, state)
    start(model, state, config.sync_params or state.world_size == 1)
    loads_late = config.leaves("parameters") and request.device.type != "cpu"
    if engine.lands_gradients or loads_late:
        pending_host_updates.watch(ref(state))
    watch_registrations(model, state)
    take_over(earlier, all_ranks)
    return state


def _scale_gradients(engine: Engine, config: ShardConfig, num_units: int) -> None:
    if (factor := config.communication.gradient_divide_factor) is not None:
        for index in range(num_units):
            engine.settings(index).gradient_scale = 1.0 / factor


def _make_groups(request: ShardRequest) -> list[Ranks]:
    communication, device = request.config.communication, request.device
    meshes = [make_near(ranks, device) for ranks in request.meshes]
    if communication.replicas_share is not None:
        meshes = [make_levels(ranks, device) for ranks in meshes]
    if request.config.placements.parameters and communication.overlap_reductions:
        meshes = [with_reductions(ranks, device) for ranks in meshes]
    return meshes


def make_engine(
    config: ShardConfig,
    ranks: Ranks,
    meshes: Sequence[Ranks],
    device: torch.device,
    *,
    units: list[UnitSpec],
    order: list[CallEvent],
    name: str,
    model: nn.Module,
    stall_seconds: float | None,
) -> Engine:
    """The engine of one model, of whatever kind its shards are; collective. ``ranks`` are all of
    the model, ``meshes`` those of data parallelism and those of units on others; the other options
    are as of :class:`ShardRequest`."""
    control = control_group(ranks)
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
            for ranks in meshes
        ],
        control=_name_of(control),
        static_graph=config.communication.static_graph,
        registered=config.communication.registered,
        alarm_name="" if control is None else f"{name} {type(model).__name__}",
        stall_seconds=stall_seconds,
        host_threads=update_threads(device) if threads is None else threads,
    )
    engine = Engine(options, device=device, units=units, order=order)
    watch(control)
    return engine


def start(model: nn.Module, state: ShardState, consistent: bool) -> None:
    """The state is complete: functions of zerocore find it."""
    state.engine.start(consistent)
    set_state(model, state)


def _take_host_memory(
    engine: Engine, config: ShardConfig, ranks: Ranks, device: torch.device
) -> None:
    if config.offload is not None and config.offload.path is not None:
        with together(ranks.groups, device):  # the room of this rank's file is taken
            engine.open_disk(config.offload.path, f"states-of-rank-{ranks.rank}")
    if config.leaves("states") or config.leaves("gradients"):
        map_host_memory(engine, ranks, device)


def map_host_memory(engine: Engine, ranks: Ranks, device: torch.device) -> None:
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


def _unit_specs(
    planned: Sequence[UnitPlanned], config: ShardConfig, extensions: Sequence[Sequence[Extension]]
) -> list[UnitSpec]:
    specs = []
    for unit, own in zip(planned, extensions, strict=True):
        apart = {each.fqn for each in own}
        params = [_unit_param(each, config, each.fqns[0] not in apart) for each in unit.params]
        specs.append(UnitSpec(unit.name, params + encoded_params(own, unit), mesh=unit.mesh))
    return specs


def _unit_param(choice: ParamChoice, config: ShardConfig, is_gathered: bool) -> UnitParam:
    param, types = choice.tensor, types_of(choice, config)
    like = torch.empty_strided(param.shape, param.stride(), dtype=types.model, device="meta")
    like.requires_grad_(choice.param.requires_grad)
    lacks_main = (
        not choice.param.requires_grad
        and param_types(config.mixed_precision, choice.fqns[0], param.dtype, True).has_main
    )
    return unit_param(choice.fqns[0], like, types, lacks_main=lacks_main, is_gathered=is_gathered)


def _shard_unit(
    state: ShardState,
    index: int,
    planned: UnitPlanned,
    extensions: Sequence[Sequence[Extension]],
    init_fn: InitFn | None,
    wholes: Mapping[str, PartOf],
) -> Unit:
    values = full_values(planned.params, state.device, init_fn)
    if state.config.sync_params and planned.mesh == 0:
        _spread(planned.params, values, state)
    none = [None] * len(encoded_params(extensions[index], planned))
    state.engine.materialize(index, [*values, *none], state.config.sync_params)
    del values
    unit = Unit(index, planned.name, mesh=planned.mesh)
    for position, choice in enumerate(planned.params):
        unit.params.append(_shard_param(state, unit, position, choice, wholes))
    bind_extensions(state.engine, unit, extensions[index])
    planned.params.clear()
    planned.several.clear()
    return unit


def _spread(params: Sequence[ParamChoice], values: list[Tensor], state: ShardState) -> None:
    """Gives plain parameters the values of the first rank of tensor parallelism."""
    if (group := state.tensor_ranks) is not None:
        for index, choice in enumerate(params):
            if choice.spec is None:
                values[index] = spread(group, values[index], choice.tensor.shape, values[index])


def _shard_param(
    state: ShardState,
    unit: Unit,
    position: int,
    choice: ParamChoice,
    wholes: Mapping[str, PartOf],
) -> Param:
    engine, fqn = state.engine, choice.fqns[0]
    param: Any = choice.param
    types = types_of(choice, state.config)  # of the parameter as it was
    made = engine.make_full(unit.index, position)
    kind: Any = type(param)
    full: nn.Parameter = as_parameter(made, shown_class(kind), param.requires_grad)
    place = _place_of(state, unit, position, choice, full, wholes.get(fqn))
    shard = engine.make_shard(unit.index, position)
    grad = None
    if param.is_floating_point():
        grad = ShardedGrad.make(engine.make_grad(unit.index, position), place, ref(state))
    facts = _facts(state, unit, position, choice, place) | {"elements": shard.detach()}
    facts["grad_device"] = shard.device if grad is None else grad.device
    become_shard(param, shard, full, facts)
    engine.bind(unit.index, position, full, param, grad)
    if grad is not None and place.group is not None:
        param.bind_sums()
    if param.make_view is not None:
        owners = [(owner._parameters, name) for owner, name in choice.owners]
        unit.views.append(ShownView(param, owners, param.shown))
        engine.set_view(unit.index, position, unit.views[-1].show)
    spec = engine.spec(unit.index, position)
    return Param(choice.fqns, choice.owners, param, full, spec, types)


def _facts(
    state: ShardState, unit: Unit, position: int, choice: ParamChoice, place: Place
) -> dict[str, Any]:
    """Attributes of a :class:`ShardedParameter`, by name."""
    on_host = state.engine.is_updated_on_host(unit.index, position)
    return {
        "place": place,
        "state_ref": ref(state),
        "unit": unit.index,
        "position": position,
        "spec": choice.spec,
        "make_view": _view_of(choice, place),
        "model_weight": state.engine.make_model_shard(unit.index, position),
        "on_host": on_host,
        "on_disk": on_host and state.config.place_of("states") == "disk",
        "aliases": [],
    }


def _place_of(
    state: ShardState,
    unit: Unit,
    position: int,
    choice: ParamChoice,
    full: nn.Parameter,
    part: PartOf | None,
) -> Place:
    layout = state.engine.layout(unit.index)
    placed, ranks = layout.places[position], state.meshes[unit.mesh]
    region = layout.regions[placed.region]
    shared = layout.num_shards > 1
    owned = layout.owned(position, ranks.shard_rank if shared else 0)
    group = ranks.shard if shared else None
    strides = None if full.is_contiguous() or not region.is_gathered else full.stride()
    cut = Cut(placed.offset, region.shard_numel, region.num_across)
    shape, elements = choice.tensor.shape, (owned.begin, owned.end)
    return Place(choice.fqns[0], shape, elements, group, strides, part, cut)


def _view_of(choice: ParamChoice, place: Place) -> Callable[[Tensor], Tensor] | None:
    """Makes of the full parameter what modules see; None where that is itself."""
    if choice.spec is not None:
        from zerocore.tensor.dtensors import show_dtensor  # late: takes a second

        return partial(show_dtensor, spec=choice.spec, sums=place.part is None)
    wrapper = choice.wrapper
    return None if wrapper is None else partial(show_made, make=wrapper.around)


def _set_unit_calls(model: nn.Module, units_of: UnitsOf, state: ShardState) -> None:
    mixed = state.config.mixed_precision or MixedPrecision()
    before_call = behave_as_ddp(model, state)
    narrow = mixed.param_dtype if mixed.cast_inputs else None
    for module in list(model.modules()):
        units = units_of.get(id(module), ())
        is_root = module is model
        inside = looked_at_by(module)
        inner = () if inside is None else inside.modules()
        looked_at = {unit for each in inner for unit in units_of.get(id(each), ())} - {*units}
        if units or is_root or looked_at:
            among = state.units if is_root else [state.units[unit] for unit in units]
            has_any = any(unit.extensions for unit in among)
            encodes = {"before_units": state.encode} if has_any else {}
            views = tuple(view for unit in units for view in state.units[unit].views)
            is_lookup = not (has_any or views or backward_reads(module))
            computes = {param.types.model for unit in units for param in state.units[unit].params}
            unit_call = UnitCall(
                state,
                state.engine,
                units,
                is_root,
                cast_inputs=narrow if is_root or narrow in computes else None,
                cast_outputs=mixed.output_dtype if is_root else None,
                before_call=before_call if is_root else None,
                looked_at=tuple(sorted(looked_at)),
                lookup=ref(module) if is_lookup else None,
                **encodes,
                views=views,
            )
            set_unit_call(module, unit_call)
