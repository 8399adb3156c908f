"""Finds and binds parameters that gather themselves, in a model of ``shard``.

At stage 3 their unit is laid out by rows, and the engine gathers the tensors that they return.
Between steps, a trained one is a plain main weight, and one of several tensors is this rank's rows,
in its class. At other stages the engine gathers the plain parameter, and modules see its class
around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerocore._C import Engine
from zerocore.common.agreement import together
from zerocore.model.buffers import broadcast
from zerocore.model.extensions import Extension
from zerocore.model.ranks import Ranks
from zerocore.model.state import Encoded, ShardState, Unit
from zerocore.model.units import ParamChoice, UnitPlanned
from zerocore.options.config import ShardConfig
from zerocore.options.precision import MixedPrecision, param_types
from zerocore.sharding.builder import Sharding
from zerocore.tensor.shown import ShownView
from zerocore.tensor.wrapped import own_chunk, wrapper_of


@cache
def _fsdp_state() -> SimpleNamespace:
    """Returns a stand-in for the FSDP state that TransformerEngine's tensors read. It says that
    they are encoded once, for forward and backward."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # takes a second

    group = SimpleNamespace(_reshard_after_forward=False, _training_state=TrainingState.FORWARD)
    return SimpleNamespace(_fsdp_param_group=group)


def split_several(planned: Sequence[UnitPlanned], config: ShardConfig) -> list[UnitPlanned]:
    """Separates each unit's parameters of several tensors from its others. If the stage does not
    shard parameters, they belong to no unit and are left alone."""
    units = []
    for unit in planned:
        several = [choice for choice in unit.params if choice.consists_of_several]
        params = [choice for choice in unit.params if not choice.consists_of_several]
        several = several if config.placements.parameters else []
        if params or several:
            units.append(replace(unit, params=params, several=several))
    return units


def check_options(planned: Sequence[UnitPlanned], config: ShardConfig) -> None:
    """Rejects an option that parameters which gather themselves do not support."""
    if not config.placements.parameters:
        return
    for choice in (choice for unit in planned for choice in (*unit.params, *unit.several)):
        if not choice.gathers_itself:
            continue
        communication = config.communication
        for option, is_set in (
            ("offload=", config.offload is not None),
            ("replicas_share", communication.replicas_share is not None),
            ("tensor parallelism", choice.spec is not None),
            ("memory that is not contiguous", not choice.tensor.is_contiguous()),
            ("the meta device", choice.consists_of_several and choice.tensor.is_meta),
        ):
            if is_set:
                raise NotImplementedError(
                    f"parameter '{choice.fqns[0]}' gathers itself (fsdp_pre_all_gather), which "
                    f"does not support {option}; use another option or stage"
                )


def with_extensions(sharding: Sharding) -> Sharding:
    """Adds the extensions of parameters that gather themselves, and asks for their tensors;
    collective. Raises AssertionError if a function's signature is not FSDP2's, ValueError if the
    tensors differ between ranks."""
    units = []
    with together(sharding.meshes[0].groups, sharding.device) as facts:
        for unit in sharding.units:
            added = _of_unit(unit, sharding.meshes[unit.mesh], sharding.config, sharding.device)
            for extension in added:
                extension.ask()
                facts.append(f"parameter '{extension.fqn}', gathered as {extension.kinds}")
            units.append(replace(unit, extensions=added))
    return replace(sharding, units=units)


def _of_unit(
    unit: UnitPlanned,
    ranks: Ranks,
    config: ShardConfig,
    device: torch.device,
) -> list[Extension]:
    choices = [choice for choice in unit.params if choice.gathers_itself] + unit.several
    if ranks.shard is None or not config.placements.parameters or not choices:
        return []
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = DeviceMesh.from_group(ranks.shard, device.type)
    mixed = config.mixed_precision or MixedPrecision()
    reduce, cast = mixed.wire_dtype or mixed.reduce_dtype, mixed.cast_inputs
    policy = MixedPrecisionPolicy(
        mixed.param_dtype, reduce, mixed.output_dtype, cast_forward_inputs=cast
    )
    for owner in (owner for choice in choices for owner, _ in choice.owners):
        owner._get_fsdp_state = _fsdp_state  # on the object, not its class
    return [
        Extension(
            choice.fqns[0],
            _first_rows(choice, ranks, config, device),
            choice.owners[0][0],
            mesh,
            policy,
            choice.tensor.shape,
            choice.owners,
            is_param=choice.wrapper is not None,
        )
        for choice in choices
    ]


def _first_rows(
    choice: ParamChoice, ranks: Ranks, config: ShardConfig, device: torch.device
) -> Tensor:
    """Returns this rank's rows; zeros if the unit will have the values later."""
    if (wrapper := choice.wrapper) is None:
        full: Any = choice.tensor.detach()
        if config.sync_params:
            broadcast([getattr(full, name) for name in full.__tensor_flatten__()[0]], ranks, device)
        return own_chunk(full, ranks.num_shards, ranks.shard_rank).to(device)
    param = choice.param
    types = param_types(config.mixed_precision, choice.fqns[0], param.dtype, param.requires_grad)
    like = torch.empty(choice.tensor.shape, device="meta")
    rows = own_chunk(like, ranks.num_shards, ranks.shard_rank).shape
    return wrapper.around(torch.zeros(rows, dtype=types.main, device=device))


def bind_extensions(state: ShardState, unit: Unit, planned: UnitPlanned) -> None:
    """Takes the engine's memory, and replaces parameters of several tensors by this rank's rows."""
    engine, unit.extensions = state.engine, list(planned.extensions)
    known = {param.fqn: position for position, param in enumerate(unit.params)}
    for extension in unit.extensions:
        extension.bind(engine, unit)
        if not extension.is_param:
            _bind_several(engine, unit, extension)
        else:
            position = known[extension.fqn]
            shard = unit.params[position].shard
            local, wrapper = shard.local(), wrapper_of(extension.rows)
            extension.version = partial(engine.param_version, unit.index, position)
            sizes = (local.numel() // max(prod(extension.shape[1:]), 1), *extension.shape[1:])
            assert wrapper is not None
            extension.rows = wrapper.around(local.view(sizes))
            shard.make_view = extension.show
        extension.encode()


def _bind_several(engine: Engine, unit: Unit, extension: Extension) -> None:
    position = len(unit.params) + len(unit.encoded)
    full = nn.Parameter(engine.make_full(unit.index, position), requires_grad=False)
    part = engine.make_shard(unit.index, position)
    shard = nn.Parameter(extension.rows, requires_grad=False)
    owners = [(owner._parameters, name) for owner, name in extension.owners]
    engine.bind(unit.index, position, full, shard, None, part)
    unit.views.append(ShownView(shard, owners, lambda: extension.show(full)))
    engine.set_view(unit.index, position, unit.views[-1].show)
    for owner, name in extension.owners:
        owner._parameters[name] = shard
    unit.encoded.append(Encoded(engine.spec(unit.index, position), None))
