"""The collector of ``shard``: finds units and meshes, checks them, and passes them to the builder.

A mistake on one rank is an error on all. It also compares the ranks' parameters before the first
rank's values overwrite the others'. docs/behaviour.md has the rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerocore.common import late
from zerocore.common.agreement import (
    checksum,
    differing,
    together,
)
from zerocore.common.parsing import parse_nbytes
from zerocore.hooks.optimizer_rules import earlier_optimizers, take_over
from zerocore.hooks.registration import watch_registrations, watch_state_dicts
from zerocore.model.casting import cast_around_kept
from zerocore.model.materialize import InitFn, materialize_buffers
from zerocore.model.memory import check_apart, extent_of
from zerocore.model.parameter_meshes import params_on
from zerocore.model.ranks import Ranks, local_gpu
from zerocore.model.refusals import check_kinds
from zerocore.model.state import ShardState, find_state
from zerocore.model.units import Param, Unit, UnitChoice, choose_units
from zerocore.options.config import ShardConfig
from zerocore.sharding.builder import Sharding, agreed, build, named
from zerocore.sharding.flat import Flat, types_of

if TYPE_CHECKING:
    from zerocore.sharding.extensions import Extension

_log = logging.getLogger("zerocore")


def shard_model(
    model: nn.Module,
    make_config: Callable[[], ShardConfig],
    ranks: Ranks,
    *,
    units: Sequence[UnitChoice] | None = None,
    device: torch.device | None = None,
    init_fn: InitFn | None = None,
    memory_budget: str | int | None = None,
    groups: Any = None,
) -> ShardState:
    """Shards ``model`` in place; arguments as in :func:`zerocore.shard`. Every rank raises a
    mistake of one rank, also if only its ``make_config`` fails."""

    def collect() -> Sharding:
        plan = _collected(model, make_config(), ranks, units, device)
        plan = _checked(_on_meshes(replace(plan, init_fn=init_fn), groups))
        return plan if plan.tensor_ranks is not None else _within(plan, memory_budget)

    sharding = agreed(ranks, collect)
    if sharding.parts or sharding.tensor_ranks is not None:
        sharding = _over_all(sharding, memory_budget)
    params = [param.object for unit in sharding.units for param in unit.params]
    earlier = earlier_optimizers(params)
    if sharding.config.sync_params:
        check_same_values(sharding)
    if (mixed := sharding.config.mixed_precision) is not None:
        cast_around_kept(model, mixed)  # now: it reads the parameters' original dtypes
    state = build(_with_extensions(sharding))
    if sharding.parts or sharding.tensor_ranks is not None:
        from zerocore.sharding.meshes import find_ranges

        state.part_ranges = find_ranges(state)
    materialize_buffers(model, state.device, init_fn)
    watch_state_dicts(model, state)
    watch_registrations(model, state)
    take_over(earlier, state.ranks)
    state.given_ranks = ranks
    state.given_units = units and _without_modules(model, units)
    return state


def _without_modules(model: nn.Module, units: Sequence[UnitChoice]) -> Sequence[UnitChoice]:
    """Replaces modules among the chosen units by their names, for a copy of the model."""
    if not any(isinstance(unit, nn.Module) for unit in units):
        return units
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] if isinstance(unit, nn.Module) else unit for unit in units]


def _collected(
    model: nn.Module,
    config: ShardConfig,
    ranks: Ranks,
    units: Sequence[UnitChoice] | None,
    device: torch.device | None,
) -> Sharding:
    """Collects all parameters, by unit."""
    _check_model(model)
    ranks = _with_near(ranks, config)
    known = replace(config.communication, regather=ranks.num_near)  # a group cannot be compared
    config = replace(config, communication=known)
    check_kinds(model)
    chosen = _split_several(choose_units(model, units), config)
    return Sharding(
        model=model,
        called=[model],
        kind=Flat(),
        config=config,
        units=chosen,
        ranks=ranks,
        meshes=(ranks,),
        device=_find_device(chosen, device),
    )


def _split_several(planned: Sequence[Unit], config: ShardConfig) -> list[Unit]:
    """Separates each unit's parameters of several tensors from its others. If the stage does not
    shard parameters, they belong to no unit and are left alone."""
    units = []
    for unit in planned:
        several = [param for param in unit.params if param.consists_of_several]
        params = [param for param in unit.params if not param.consists_of_several]
        several = several if config.placements.parameters else []
        if params or several:
            units.append(replace(unit, params=params, several=several))
    return units


def _on_meshes(sharding: Sharding, groups: Any) -> Sharding:
    """Adds the meshes of parameters that not all ranks share, and puts each unit on one mesh."""
    params = [param for unit in sharding.units for param in unit.params]
    check_apart([(param.fqn, extent_of(param.tensor)) for param in params], [sharding.model])
    if groups is None and all(param.dtensor_spec is None for param in params):
        return sharding
    from zerocore.sharding.meshes import on_meshes  # late: most models have one mesh

    return on_meshes(sharding, groups)


def _checked(sharding: Sharding) -> Sharding:
    """Rejects options that the parameters or meshes do not support; returns ``sharding``."""
    config = sharding.config
    if config.communication.replicas_share is not None:
        from zerocore.sharding.rank_options import check_shared  # late: few share them

        check_shared(sharding)
    _set_types(sharding.units, config)
    _check_extensions(sharding.units, config)
    if config.offload is not None:
        config.offload.check_path()
    return sharding


def _over_all(sharding: Sharding, memory_budget: str | int | None) -> Sharding:
    """Adds a mesh with the tensor-parallel ranks, which must agree, too, and finds the sizes of
    larger tensors; collective."""
    from zerocore.sharding.meshes import find_sizes, with_tensor_ranks

    if (group := sharding.tensor_ranks) is not None:
        ranks = with_tensor_ranks(sharding.ranks, group, sharding.device)
        widened = replace(sharding, ranks=ranks, meshes=(*sharding.meshes, ranks))
        facts = [widened.config, *(unit.name for unit in widened.units)]
        sharding = named(ranks, lambda: _within(widened, memory_budget), lambda _: facts)
    find_sizes(sharding.units, sharding.device)
    return sharding


def _with_extensions(sharding: Sharding) -> Sharding:
    """Adds the extensions of parameters that gather themselves; collective. Raises ValueError if
    the ranks would gather other tensors."""
    units = []
    with together(sharding.meshes[0].groups, sharding.device) as facts:
        for unit in sharding.units:
            added = _extensions_of(sharding, unit)
            facts += [f"parameter '{ext.fqn}', gathered as {ext.kinds}" for ext in added]
            units.append(replace(unit, extensions=added))
    return replace(sharding, units=units)


def _extensions_of(sharding: Sharding, unit: Unit) -> list[Extension]:
    params = [param for param in unit.params if param.gathers_itself] + unit.several
    ranks, config = sharding.meshes[unit.mesh], sharding.config
    if ranks.shard is None or not config.placements.parameters or not params:
        return []
    from zerocore.sharding.extensions import make_extensions  # late: most models have none

    return make_extensions(params, ranks, config, sharding.device)


def _within(sharding: Sharding, memory_budget: str | int | None) -> Sharding:
    """Rejects a model that takes more memory than the budget; returns ``sharding``."""
    if memory_budget is not None:
        budget = parse_nbytes(memory_budget, "memory_budget")
        facts = sharding.model, sharding.units, sharding.config, sharding.meshes
        late.call("check_budget", *facts, budget)
    return sharding


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard expects an nn.Module, got {type(model)}")
    if find_state(model) is not None:
        raise ValueError(
            f"this {type(model).__name__} (or a part of it) is sharded already; call "
            "zerocore.shard once, on the outermost module"
        )


def _with_near(ranks: Ranks, config: ShardConfig) -> Ranks:
    regather = config.communication.regather
    if regather is None:
        return ranks
    if not config.placements.parameters:
        raise ValueError(
            f"regather: stage {config.stage} gathers parameters once a step; leave it out, or use "
            "stage=3"
        )
    from zerocore.sharding.rank_options import with_near  # late: few gather from some ranks

    return with_near(ranks, regather)


def _find_device(units: Sequence[Unit], device: torch.device | None) -> torch.device:
    fqns: dict[torch.device, str] = {}
    for unit in units:
        for param in (*unit.params, *unit.several):
            if not param.tensor.is_meta:
                fqns.setdefault(param.tensor.device, param.fqn)
    if len(fqns) > 1:
        places = ", ".join(f"'{fqn}' on {where}" for where, fqn in fqns.items())
        raise ValueError(f"parameters are on different devices: {places}; call model.to(device)")
    if device is not None:
        chosen = torch.device(device)
        # "cuda" without an index does not compare equal to "cuda:0".
        if chosen.type not in ("cpu", "meta") and chosen.index is None:
            is_cuda = chosen.type == "cuda"
            index = torch.get_device_module(chosen).current_device()
            chosen = local_gpu() if is_cuda else torch.device(chosen.type, index)
        return chosen
    if fqns:
        return next(iter(fqns))
    return local_gpu() if torch.cuda.is_available() else torch.device("cpu")


def _set_types(units: Sequence[Unit], config: ShardConfig) -> None:
    """Sets parameters' dtypes; raises ValueError if mixed precision cannot use them."""
    params = [param for unit in units for param in unit.params]
    if config.mixed_precision is not None:
        config.mixed_precision.check_names([param.fqn for param in params])
    for param in params:
        param.types = types_of(param, config)


def _check_extensions(planned: Sequence[Unit], config: ShardConfig) -> None:
    """Rejects an option that parameters which gather themselves do not support."""
    if not config.placements.parameters:
        return
    for param in (param for unit in planned for param in (*unit.params, *unit.several)):
        if not param.gathers_itself:
            continue
        communication = config.communication
        for option, is_set in (
            ("offload=", config.offload is not None),
            ("replicas_share", communication.replicas_share is not None),
            ("tensor parallelism", param.dtensor_spec is not None),
            ("memory that is not contiguous", not param.tensor.is_contiguous()),
            ("the meta device", param.consists_of_several and param.tensor.is_meta),
        ):
            if is_set:
                raise NotImplementedError(
                    f"parameter '{param.fqn}' gathers itself (fsdp_pre_all_gather), which "
                    f"does not support {option}; use another option or stage"
                )


def check_same_values(sharding: Sharding) -> None:
    """Warns of parameters whose values differ between ranks; collective. Raises ValueError, with
    parameters and ranks, if groups of ranks hold values of their own."""
    by_mesh = [params_on(sharding.units, mesh) for mesh in range(len(sharding.meshes))]
    plain = [param for param in by_mesh[0] if param.dtensor_spec is None]
    by_mesh[0] = [param for param in by_mesh[0] if param.dtensor_spec is not None]
    pairs = zip(sharding.meshes, by_mesh, strict=True)
    for ranks, params in ((sharding.ranks, plain), *pairs):
        chosen = [param for param in params if not param.tensor.is_meta]
        if ranks.groups and chosen:
            _compare_values(ranks, chosen, sharding.device)


def _compare_values(ranks: Ranks, chosen: Sequence[Param], device: torch.device) -> None:
    with torch.no_grad():
        numbers = torch.stack([checksum(param.tensor).to(device) for param in chosen])
    if places := differing(ranks.groups, numbers):
        from zerocore.sharding.unequal_values import explain  # late: only if some differ

        explain(ranks, chosen, [int(numbers[place]) for place in places], places, device)
