"""Turns a model into a sharded one: validate, agree, build the engine, swap parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from zerocore._C import Engine
from zerocore.agreement import agree, is_simulated
from zerocore.alarm import stall_seconds, watch_end
from zerocore.backward_calls import watch_backward_calls
from zerocore.budget import check_budget
from zerocore.calls import call_order, entry_units
from zerocore.casting import cast_around_kept
from zerocore.config import ShardConfig
from zerocore.groups import Ranks
from zerocore.kinds import check_kinds
from zerocore.local_states import watch_loads
from zerocore.materialize import InitFn, full_values, materialize_buffers
from zerocore.module import Entry, set_entry
from zerocore.moves import keep_in_place
from zerocore.optimizer_hooks import mark_full, mark_replaced
from zerocore.out_of_memory import explain_forward, remember_model
from zerocore.pipelines import refuse_split_backward
from zerocore.place import Place
from zerocore.precision import MixedPrecision, ParamTypes, param_types
from zerocore.quantities import parse_nbytes
from zerocore.registration import watch_registrations
from zerocore.replaced import replace
from zerocore.state import Param, ShardState, Unit, find_state, set_state
from zerocore.tensor import ShardedGrad, ShardedParameter
from zerocore.wrapping import ParamChoice, UnitChoice, UnitPlanned, choose_units


def shard_model(
    model: nn.Module,
    options: dict[str, Any],
    ranks: Ranks,
    units: Sequence[UnitChoice] | None,
    device: torch.device | None,
    init_fn: InitFn | None,
    optimizer: Optimizer | None,
    memory_budget: str | int | None = None,
) -> ShardState:
    """Shards ``model`` in place and returns its state; ``options`` are those of ShardConfig.

    Errors come on every rank alike.
    """
    config = ShardConfig()
    planned: list[UnitPlanned] = []
    target: torch.device | None = None
    error: Exception | None = None
    seconds = 0.0
    try:
        seconds = stall_seconds()
        config = ShardConfig(**options)
        _check_model(model, optimizer)
        check_kinds(model, ranks.world_size)
        planned = choose_units(model, units)
        choices = [choice for unit in planned for choice in unit.params]
        if config.mixed_precision is not None:
            config.mixed_precision.check_names([choice.fqns[0] for choice in choices])
        for choice in choices:
            _types(choice, config)
        target = _find_device(planned, device)
        if memory_budget is not None:
            nbytes = parse_nbytes(memory_budget, "memory_budget")
            check_budget(model, planned, config, ranks, nbytes)
    except Exception as caught:
        error = caught
    name = agree(ranks.groups, error, [] if error else _facts(planned, config), target)
    assert target is not None
    engine = _make_engine(model, config, ranks, target, planned, (name, seconds))
    state = ShardState(engine, config, ranks, target)
    if config.mixed_precision is not None:
        cast_around_kept(model, config.mixed_precision)  # by the dtypes that parameters have now
    for index, unit in enumerate(planned):
        state.units.append(_shard_unit(state, index, unit, init_fn))
    materialize_buffers(model, target, init_fn)
    _set_entries(model, planned, state)
    watch_loads(model, state)
    engine.start(config.sync_params or state.world_size == 1)
    set_state(model, state)
    remember_model(state, model)
    watch_backward_calls()
    watch_registrations(model, state)
    refuse_split_backward()
    return state


def _make_engine(
    model: nn.Module,
    config: ShardConfig,
    ranks: Ranks,
    device: torch.device,
    planned: list[UnitPlanned],
    alarm: tuple[str, float],
) -> Engine:
    watched = not any(is_simulated(group) for group in ranks.groups)
    watch_end()
    return Engine(
        alarm_name=alarm[0] if watched else "",
        stall_seconds=alarm[1],
        stage=config.stage,
        prefetch=config.prefetch,
        hold_full=config.accumulate == "full",
        exchange_used=config.find_unused_parameters,
        group_name=None if ranks.shard is None else ranks.shard.group_name,
        replicas_name=None if ranks.replicas is None else ranks.replicas.group_name,
        device=device,
        units=[(unit.name, [_param_arg(c, config) for c in unit.params]) for unit in planned],
        order=call_order(model, planned),
    )


def _check_model(model: nn.Module, optimizer: Optimizer | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard expects an nn.Module, got {type(model)}")
    if find_state(model) is not None:
        raise ValueError(
            f"this {type(model).__name__} (or a part of it) is sharded already; shard once, the "
            "outermost model"
        )
    if optimizer is not None:
        raise ValueError(
            "optimizer: build it after zerocore.shard, from model.parameters(); one built before "
            "holds parameters that the model does not use any more"
        )


def _find_device(planned: list[UnitPlanned], device: torch.device | None) -> torch.device:
    found: dict[torch.device, str] = {}
    for unit in planned:
        for choice in unit.params:
            if not choice.param.is_meta:
                found.setdefault(choice.param.device, choice.fqns[0])
    if len(found) > 1:
        places = ", ".join(f"'{fqn}' on {where}" for where, fqn in found.items())
        raise ValueError(f"parameters are on different devices: {places}; move the model to one")
    if device is not None:
        chosen = torch.device(device)
        # Memory of "cuda" without an index would count as of another device than "cuda:0".
        if chosen.type == "cuda" and chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
        return chosen
    if found:
        return next(iter(found))
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _facts(planned: list[UnitPlanned], config: ShardConfig) -> list[object]:
    facts: list[object] = [config]
    for unit in planned:
        facts.append(f"unit '{unit.name}'")
        facts += [
            f"parameter '{' = '.join(c.fqns)}' of shape {list(c.param.shape)}, {c.param.dtype}, "
            f"requires_grad={c.param.requires_grad}"
            for c in unit.params
        ]
    return facts


def _types(choice: ParamChoice, config: ShardConfig) -> ParamTypes:
    param = choice.param
    return param_types(config.mixed_precision, choice.fqns[0], param.dtype, param.requires_grad)


def _param_arg(
    choice: ParamChoice, config: ShardConfig
) -> tuple[str, torch.Tensor, torch.dtype, torch.dtype, torch.dtype, bool]:
    param, types = choice.param, _types(choice, config)
    like = torch.empty_strided(param.shape, param.stride(), dtype=types.model, device="meta")
    like.requires_grad_(param.requires_grad)
    lacks_main = (
        not param.requires_grad
        and param_types(config.mixed_precision, choice.fqns[0], param.dtype, True).has_main
    )
    return choice.fqns[0], like, types.main, types.reduce, types.grad, lacks_main


def _shard_unit(
    state: ShardState, index: int, planned: UnitPlanned, init_fn: InitFn | None
) -> Unit:
    values = full_values(planned.params, state.device, init_fn)
    state.engine.materialize(index, values, state.config.sync_params)
    del values
    unit = Unit(index, planned.name)
    for position, choice in enumerate(planned.params):
        unit.params.append(_shard_param(state, unit, position, choice))
    planned.params.clear()
    return unit


def _shard_param(state: ShardState, unit: Unit, position: int, choice: ParamChoice) -> Param:
    engine, old = state.engine, choice.param
    layout = engine.layout(unit.index)
    shared = layout.num_shards > 1
    full = nn.Parameter(engine.make_full(unit.index, position), requires_grad=old.requires_grad)
    place = Place(
        choice.fqns[0],
        old.shape,
        layout.owned(position, state.ranks.shard_rank if shared else 0),
        state.ranks.shard if shared else None,
        None if full.is_contiguous() else full.stride(),
    )
    data = engine.make_shard(unit.index, position)
    shard = ShardedParameter.make(data, place, old.requires_grad, unit.index, ref(state), full)
    shard.position = position
    shard.model_weight = engine.make_model_shard(unit.index, position)
    grad = None
    if old.is_floating_point():
        grad = ShardedGrad.make(engine.make_grad(unit.index, position), place)
    owners = [(owner._parameters, name) for owner, name in choice.owners]
    engine.bind(unit.index, position, full, shard, grad, owners)
    for parameters, name in owners:
        parameters[name] = shard
    shard.adopt_hooks(old)
    mark_replaced(old, choice.fqns[0])
    replace(old, choice.fqns[0])
    mark_full(full, choice.fqns[0])
    for face in (shard, full):
        keep_in_place(face, choice.fqns[0])
    spec = engine.spec(unit.index, position)
    return Param(choice.fqns, choice.owners, full, shard, spec, _types(choice, state.config))


def _set_entries(model: nn.Module, planned: list[UnitPlanned], state: ShardState) -> None:
    entries = entry_units(planned)
    mixed = state.config.mixed_precision or MixedPrecision()
    narrow = mixed.param_dtype if mixed.cast_inputs else None
    for module in list(model.modules()):
        units = entries.get(id(module), ())
        is_root = module is model
        if units or is_root:
            computes = {param.types.model for unit in units for param in state.units[unit].params}
            entry = Entry(
                state,
                state.engine,
                explain_forward,
                units,
                is_root,
                cast_inputs=narrow if is_root or narrow in computes else None,
                cast_outputs=mixed.output_dtype if is_root else None,
            )
            set_entry(module, entry)
