"""Puts flat shards in the place of a model's parameters: what ``zerocore.shard`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from zerocore._C import (
    UnitParam,
    UnitSpec,
)
from zerocore.hooks.optimizer_rules import earlier_optimizers, take_over
from zerocore.hooks.registration import watch_registrations, watch_state_dicts
from zerocore.layout.cuts import Cut
from zerocore.layout.place import PartOf, Place, spread
from zerocore.model.as_ddp import behave_as_ddp
from zerocore.model.casting import cast_around_kept
from zerocore.model.extensions import Extension
from zerocore.model.materialize import InitFn, full_values, materialize_buffers
from zerocore.model.parameter_meshes import find_ranges, find_sizes
from zerocore.model.state import Param, ShardState, Unit
from zerocore.model.unit_call import UnitCall, looked_at_by, set_unit_call
from zerocore.model.units import (
    ParamChoice,
    UnitPlanned,
    UnitsOf,
    backward_reads,
)
from zerocore.options.config import ShardConfig
from zerocore.options.precision import MixedPrecision, param_types, unit_param
from zerocore.sharding.builder import AgreedModel, build_model, with_groups
from zerocore.sharding.extensions import bind_extensions, encoded_params, make_extensions
from zerocore.sharding.request import ShardRequest, check_same_values, types_of
from zerocore.tensor.parameter import ShardedGrad, as_parameter, become_shard
from zerocore.tensor.shown import ShownView, shown_class
from zerocore.tensor.wrapped import show_made


def build(request: ShardRequest) -> ShardState:
    """Shards ``request.model`` in place and returns its state; on all ranks alike."""
    model, config, planned = request.model, request.config, request.planned
    earlier = earlier_optimizers(choice.param for unit in planned for choice in unit.params)
    if config.sync_params:
        check_same_values(request)
    meshes = with_groups(request.meshes, config, request.device)
    extensions = make_extensions(planned, meshes, config, request.ranks, request.device)
    all_ranks = meshes[0] if request.tensor_ranks is None else request.all_ranks
    agreed = AgreedModel(
        model,
        [model],
        config,
        all_ranks,
        meshes,
        request.device,
        request.name,
        request.stall_seconds,
        units=_unit_specs(planned, config, extensions),
        modules=[unit.modules for unit in planned],
        tensor_ranks=request.tensor_ranks,
    )
    state = build_model(agreed, partial(_fill, request, extensions))
    watch_registrations(model, state)
    take_over(earlier, all_ranks)
    return state


def _fill(
    request: ShardRequest,
    extensions: Sequence[Sequence[Extension]],
    state: ShardState,
    units_of: UnitsOf,
) -> None:
    """Puts flat shards in the place of the parameters, and gives modules their calls."""
    model, config, planned = request.model, request.config, request.planned
    if config.mixed_precision is not None:
        cast_around_kept(model, config.mixed_precision)  # by the dtypes that parameters have now
    wholes = find_sizes(planned, request.parts, request.device)
    for index, unit in enumerate(planned):
        state.units.append(_shard_unit(state, index, unit, extensions, request.init_fn, wholes))
    state.part_ranges = find_ranges(state)
    materialize_buffers(model, request.device, request.init_fn)
    _set_unit_calls(model, units_of, state)
    watch_state_dicts(model, state)


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
