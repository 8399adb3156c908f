"""Makes flat shards, by which ``zerocore.shard`` replaces a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from zerocore._C import UnitParam
from zerocore.layout.cuts import Cut
from zerocore.layout.place import Place, spread
from zerocore.model.as_ddp import behave_as_ddp
from zerocore.model.materialize import full_values
from zerocore.model.parameter_meshes import choices_on
from zerocore.model.state import Param, ShardState, Unit
from zerocore.model.unit_call import looked_at_by, set_unit_call, wrap_method
from zerocore.model.units import ParamChoice, UnitPlanned, UnitsOf
from zerocore.options.config import ShardConfig
from zerocore.options.precision import MixedPrecision, ParamTypes, param_types, unit_param
from zerocore.sharding.builder import Kind, Sharding, bind_shard, unit_call
from zerocore.tensor.parameter import ShardedGrad, as_parameter, become_shard
from zerocore.tensor.shown import ShownView, shown_class
from zerocore.tensor.wrapped import show_made


def types_of(choice: ParamChoice, config: ShardConfig) -> ParamTypes:
    """Returns a parameter's dtypes; raises ValueError if mixed precision cannot use them."""
    param, mixed = choice.param, config.mixed_precision
    return choice.with_gather(
        param_types(mixed, choice.fqns[0], param.dtype, param.requires_grad), mixed
    )


def _fact(choice: ParamChoice, uneven: int | None = None) -> str:
    """Describes a parameter. ``uneven``: a dimension whose size differs between ranks."""
    shape: list[object] = list(choice.tensor.shape)
    if uneven is not None and uneven < len(shape):
        shape[uneven] = "any"
    return (
        f"parameter '{' = '.join(choice.fqns)}' of shape {shape}, {choice.param.dtype}, "
        f"requires_grad={choice.param.requires_grad}"
    )


def _unit_param(config: ShardConfig, unit: UnitPlanned, choice: ParamChoice) -> UnitParam:
    is_gathered = all(extension.fqn != choice.fqns[0] for extension in unit.extensions)
    param, types = choice.tensor, types_of(choice, config)
    like = torch.empty_strided(param.shape, param.stride(), dtype=types.model, device="meta")
    like.requires_grad_(choice.param.requires_grad)
    lacks_main = (
        not choice.param.requires_grad
        and param_types(config.mixed_precision, choice.fqns[0], param.dtype, True).has_main
    )
    return unit_param(choice.fqns[0], like, types, lacks_main=lacks_main, is_gathered=is_gathered)


def _make_shard(state: ShardState, unit: Unit, position: int, choice: ParamChoice) -> Param:
    engine, param = state.engine, choice.param
    types = types_of(choice, state.config)  # first: become_shard() changes the parameter
    memory = engine.make_full(unit.index, position)
    place = _place_of(state, unit, position, choice, memory)
    shard = engine.make_shard(unit.index, position)
    facts = _facts(state, unit, position, choice, place) | {"elements": shard.detach()}
    spec, grad = engine.spec(unit.index, position), None
    if _stays_whole(state.config, choice, facts):
        from zerocore.tensor.whole import become_whole, grad_view  # late: of stage 0 alone

        if param.is_floating_point():
            grad = grad_view(engine, unit.index, position, memory)
        hidden = become_whole(param, memory, shard, facts | {"grad_device": shard.device})
        bound = Param(choice.fqns, choice.owners, param, hidden, spec, types)
        return bind_shard(state, unit, bound, grad)
    full = as_parameter(memory, shown_class(type(param)), param.requires_grad)
    if param.is_floating_point():
        grad = ShardedGrad.make(engine.make_grad(unit.index, position), place, ref(state))
    facts["grad_device"] = shard.device if grad is None else grad.device
    become_shard(param, shard, full, facts)
    sharded: Any = param
    view = None
    if sharded.make_view is not None:
        owners = [(owner._parameters, name) for owner, name in choice.owners]
        view = ShownView(param, owners, sharded.shown)
    bound = Param(choice.fqns, choice.owners, param, full, spec, types)
    bind_shard(state, unit, bound, grad, view=view)
    if grad is not None and place.group is not None:
        sharded.bind_sums()
    return bound


def _stays_whole(config: ShardConfig, choice: ParamChoice, facts: dict[str, Any]) -> bool:
    """Whether programs hold the full parameter itself: see Note [Whole parameters]."""
    is_plain = choice.part is None and facts["make_view"] is None
    types = types_of(choice, config)
    is_kept = facts["model_weight"] is None and not (types.has_main or facts["on_host"])
    return config.stage == 0 and is_plain and is_kept and types.model == choice.param.dtype


def _facts(
    state: ShardState, unit: Unit, position: int, choice: ParamChoice, place: Place
) -> dict[str, Any]:
    """Returns the attributes of a :class:`ShardedParameter`, by name."""
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
    state: ShardState, unit: Unit, position: int, choice: ParamChoice, full: Tensor
) -> Place:
    layout = state.engine.layout(unit.index)
    ranks, region = state.meshes[unit.mesh], layout.regions[layout.places[position].region]
    shared = layout.num_shards > 1
    owned = layout.owned(position, ranks.shard_rank if shared else 0)
    group = ranks.shard if shared else None
    strides = None if full.is_contiguous() or not region.is_gathered else full.stride()
    cut = Cut.of(layout, position)
    shape, elements = choice.tensor.shape, (owned.begin, owned.end)
    return Place(choice.fqns[0], shape, elements, group, strides, choice.part, cut)


def _view_of(choice: ParamChoice, place: Place) -> Callable[[Tensor], Tensor] | None:
    """Returns a function from the full parameter to the view that modules see; None without one."""
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
        looked_at = {unit for child in inner for unit in units_of.get(id(child), ())} - {*units}
        if units or is_root or looked_at:
            among = state.units if is_root else [state.units[unit] for unit in units]
            encodes = any(unit.extensions for unit in among)
            computes = {param.types.model for unit in units for param in state.units[unit].params}
            call = unit_call(
                state,
                [module],
                units,
                is_root=is_root,
                cast_inputs=narrow if is_root or narrow in computes else None,
                cast_outputs=mixed.output_dtype if is_root else None,
                before_call=before_call if is_root else None,
                looked_at=tuple(sorted(looked_at)),
                **({"before_units": state.encode} if encodes else {}),
            )
            set_unit_call(module, call)


def _load(
    state: ShardState, unit: Unit, given: Mapping[int, Tensor | None], broadcast: bool
) -> None:
    full: list[Tensor | None] = [None] * len(unit.params)
    if len(given) < len(full):  # the other parameters keep their values
        full = [*state.engine.full_values(unit.index)[: len(full)]]
    for index, value in given.items():
        param, full[index] = unit.params[index], value
        place = param.shard.place
        holds_all = unit.mesh > 0 and place.part is None  # so do all ranks of the mesh
        group = state.tensor_ranks if place.part is None else place.part.group
        if group is None or holds_all:
            continue
        if broadcast and state.ranks_of(unit.index).rank == 0:
            full[index] = spread(group, value, place.whole_shape, param.shard)
        if (whole := full[index]) is not None:
            full[index] = place.part_of_whole(whole)
    state.engine.materialize(unit.index, [*full, *[None] * len(unit.encoded)], broadcast)
    for extension in unit.extensions:
        extension.encode()


class Flat(Kind):
    """The kind of model whose shards are ranges of each parameter's elements."""

    by_rows: ClassVar[bool] = False
    has_all: ClassVar[bool] = True
    sets_values: ClassVar[bool] = True
    unit_param = staticmethod(_unit_param)
    make_shard = staticmethod(_make_shard)
    load = staticmethod(_load)
    wrap_method = staticmethod(wrap_method)

    def facts(self, sharding: Sharding, mesh: int) -> list[object]:
        if mesh > 0:
            return [_fact(choice) for choice in choices_on(sharding.units, mesh)]
        facts: list[object] = [sharding.config]
        facts += [
            f"groups['{part.pattern}'] of {part.ranks.world_size} ranks" for part in sharding.parts
        ]
        for unit in sharding.units:
            facts.append(f"unit '{unit.name}'")
            for choice in (*unit.params, *unit.several):
                uneven = choice.larger[1] if choice.larger and unit.mesh > 0 else None
                facts.append(_fact(choice, uneven))
        return facts

    def bind_extensions(self, state: ShardState, unit: Unit, planned: UnitPlanned) -> None:
        if planned.extensions:
            from zerocore.sharding.extensions import bind_extensions

            bind_extensions(state, unit, planned.extensions)

    def values(self, sharding: Sharding, state: ShardState, unit: UnitPlanned) -> list[Tensor]:
        values = full_values(unit.params, state.device, sharding.init_fn)
        if state.config.sync_params and unit.mesh == 0 and state.tensor_ranks is not None:
            for index, choice in enumerate(unit.params):
                if choice.spec is None:  # take the values of the first tensor-parallel rank
                    shape, like = choice.tensor.shape, values[index]
                    values[index] = spread(state.tensor_ranks, like, shape, like)
        return values

    def set_calls(self, sharding: Sharding, state: ShardState, units_of: UnitsOf) -> None:
        _set_unit_calls(sharding.model, units_of, state)

    def full_values(self, state: ShardState, unit: Unit) -> tuple[list[Tensor], list[Tensor]]:
        full, count = state.engine.full_values(unit.index), len(unit.params)
        pairs = zip(unit.params, full[:count], strict=True)
        return [param.shard.place.whole_of(value) for param, value in pairs], full[count:]
