"""Makes flat shards, by which ``zerocore.shard`` replaces a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from zerocore._C import UnitParam, window_on
from zerocore.layout.cuts import Cut
from zerocore.layout.place import Place, spread
from zerocore.model.as_ddp import behave_as_ddp
from zerocore.model.materialize import full_values
from zerocore.model.parameter_meshes import params_on
from zerocore.model.state import ShardState
from zerocore.model.unit_call import looked_at_by, set_unit_call, wrap_method
from zerocore.model.units import Param, Unit, UnitsOf
from zerocore.options.config import ShardConfig
from zerocore.options.precision import MixedPrecision, ParamTypes, param_types, unit_param
from zerocore.sharding.builder import Kind, Sharding, bind_shard, unit_call
from zerocore.tensor.parameter import ShardedGrad, as_parameter, become_shard
from zerocore.tensor.shown import ShownView, shown_class
from zerocore.tensor.wrapped import show_made


def types_of(param: Param, config: ShardConfig) -> ParamTypes:
    """Returns a parameter's dtypes; raises ValueError if mixed precision cannot use them."""
    full, mixed = param.object, config.mixed_precision
    return param.with_gather(param_types(mixed, param.fqn, full.dtype, full.requires_grad), mixed)


def _fact(param: Param, uneven: int | None = None) -> str:
    """Describes a parameter. ``uneven``: a dimension whose size differs between ranks."""
    shape: list[object] = list(param.tensor.shape)
    if uneven is not None and uneven < len(shape):
        shape[uneven] = "any"
    return (
        f"parameter '{' = '.join(param.fqns)}' of shape {shape}, {param.object.dtype}, "
        f"requires_grad={param.object.requires_grad}"
    )


def _unit_param(config: ShardConfig, unit: Unit, param: Param) -> UnitParam:
    is_gathered = all(extension.fqn != param.fqn for extension in unit.extensions)
    full, types, is_trained = param.tensor, param.types, param.object.requires_grad
    like = torch.empty_strided(full.shape, full.stride(), dtype=types.model, device="meta")
    like.requires_grad_(is_trained)
    lacks_main = (
        not is_trained and param_types(config.mixed_precision, param.fqn, full.dtype, True).has_main
    )
    return unit_param(param.fqn, like, types, lacks_main=lacks_main, is_gathered=is_gathered)


def _make_shard(state: ShardState, unit: Unit, position: int, param: Param) -> None:
    engine = state.engine
    seen: Any = param.object
    memory = engine.make_full(unit.index, position)
    place = _place_of(state, unit, position, param, memory)
    shard = engine.make_shard(unit.index, position)
    facts = _facts(state, unit, position, param, place) | {"elements": shard.detach()}
    grad: Tensor | None = None
    if _stays_whole(state.config, param, facts):
        from zerocore.tensor.whole import become_whole, grad_view  # late: of stage 0 alone

        memory = window_on(memory)  # libraries save whole storages, and find ties by them
        if seen.is_floating_point() or seen.is_complex():
            grad = grad_view(engine, unit.index, position, memory)
        param.hidden = become_whole(seen, memory, shard, facts | {"grad_device": shard.device})
        bind_shard(state, unit, position, param, grad)
        return
    param.hidden = as_parameter(memory, shown_class(seen.__class__), seen.requires_grad)
    if seen.is_floating_point() or seen.is_complex():
        grad = ShardedGrad.make(engine.make_grad(unit.index, position), place, ref(state))
    facts["grad_device"] = shard.device if grad is None else grad.device
    become_shard(seen, shard, param.hidden, facts)
    view = None
    if seen.make_view is not None:
        owners = [(owner._parameters, name) for owner, name in param.owners]
        view = ShownView(seen, owners, seen.shown)
    bind_shard(state, unit, position, param, grad, view=view)
    if grad is not None and place.group is not None:
        seen.bind_sums()


def _stays_whole(config: ShardConfig, param: Param, facts: dict[str, Any]) -> bool:
    """Whether programs hold the full parameter itself: see Note [Whole parameters]."""
    types, is_plain = param.types, param.part is None and facts["make_view"] is None
    is_kept = facts["model_weight"] is None and not (types.has_main or facts["on_host"])
    return config.stage == 0 and is_plain and is_kept and types.model == param.object.dtype


def _facts(
    state: ShardState, unit: Unit, position: int, param: Param, place: Place
) -> dict[str, Any]:
    """Returns the attributes of a :class:`ShardedParameter`, by name."""
    on_host = state.engine.is_updated_on_host(unit.index, position)
    return {
        "place": place,
        "state_ref": ref(state),
        "unit": unit.index,
        "position": position,
        "spec": param.dtensor_spec,
        "make_view": _view_of(param, place),
        "model_weight": state.engine.make_model_shard(unit.index, position),
        "on_host": on_host,
        "on_disk": on_host and state.config.place_of("states") == "disk",
        "aliases": [],
    }


def _place_of(state: ShardState, unit: Unit, position: int, param: Param, full: Tensor) -> Place:
    layout = state.engine.layout(unit.index)
    ranks, region = state.meshes[unit.mesh], layout.regions[layout.places[position].region]
    shared = layout.num_shards > 1
    owned = layout.owned(position, ranks.shard_rank if shared else 0)
    group = ranks.shard if shared else None
    strides = None if full.is_contiguous() or not region.is_gathered else full.stride()
    cut = Cut.of(layout, position)
    shape, elements = param.tensor.shape, (owned.begin, owned.end)
    return Place(param.fqn, shape, elements, group, strides, param.part, cut)


def _view_of(param: Param, place: Place) -> Callable[[Tensor], Tensor] | None:
    """Returns a function from the full parameter to the view that modules see; None without one."""
    if (spec := param.dtensor_spec) is not None:
        from zerocore.tensor.dtensors import show_dtensor  # late: takes a second

        return partial(show_dtensor, spec=spec, sums=place.part is None)
    wrapper = param.wrapper
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
            return [_fact(param) for param in params_on(sharding.units, mesh)]
        facts: list[object] = [sharding.config]
        facts += [
            f"groups['{part.pattern}'] of {part.ranks.world_size} ranks" for part in sharding.parts
        ]
        for unit in sharding.units:
            facts.append(f"unit '{unit.name}'")
            for param in (*unit.params, *unit.several):
                uneven = param.larger[1] if param.larger and unit.mesh > 0 else None
                facts.append(_fact(param, uneven))
        return facts

    def bind_extensions(self, state: ShardState, unit: Unit) -> None:
        if unit.extensions:
            from zerocore.sharding.extensions import bind_extensions

            bind_extensions(state, unit)

    def values(self, sharding: Sharding, state: ShardState, unit: Unit) -> list[Tensor]:
        values = full_values(unit.params, state.device, sharding.init_fn)
        if state.config.sync_params and unit.mesh == 0 and state.tensor_ranks is not None:
            for index, param in enumerate(unit.params):
                if param.dtensor_spec is None:  # take the values of the first tensor-parallel rank
                    shape, like = param.tensor.shape, values[index]
                    values[index] = spread(state.tensor_ranks, like, shape, like)
        return values

    def set_calls(self, sharding: Sharding, state: ShardState, units_of: UnitsOf) -> None:
        _set_unit_calls(sharding.model, units_of, state)

    def full_values(self, state: ShardState, unit: Unit) -> tuple[list[Tensor], list[Tensor]]:
        full, count = state.engine.full_values(unit.index), len(unit.params)
        pairs = zip(unit.params, full[:count], strict=True)
        return [param.shard.place.whole_of(value) for param, value in pairs], full[count:]
