"""Runs calls of fully sharded modules. A root's first call makes its engine; shards are rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, ClassVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from zerocore._C import UnitParam, counted
from zerocore.common.eager import eager
from zerocore.fsdp.collect import collect_rows
from zerocore.fsdp.group import Group, Root, RowParam, group_of, groups_below
from zerocore.fsdp.mesh import device_of
from zerocore.model.buffers import broadcast as broadcast_tensors
from zerocore.model.ranks import ranks_of
from zerocore.model.state import ShardState
from zerocore.model.traced import call_traced, is_traced
from zerocore.model.unit_call import note_unit_call, unit_call_of
from zerocore.model.units import Unit, UnitsOf
from zerocore.options.config import ShardConfig
from zerocore.options.precision import unit_param
from zerocore.sharding.builder import Kind, Sharding, agreed, bind_shard, build, unit_call
from zerocore.tensor.earlier import give_rows_to_all
from zerocore.tensor.rows import (
    RowShard,
    as_dtensor,
    at_origin,
    local_part,
    note_rows,
    own_elements,
    part_like,
)
from zerocore.tensor.shown import ShownView, full_rows


@eager  # torch.compile(root) would trace it
def ready(root: Root) -> ShardState:
    """Returns the state. Makes it, which is collective, in the first call and after parameters were
    replaced or moved; raises RuntimeError or ValueError on every rank if that is impossible."""
    if root.state is not None and not all(param.is_in_place() for param in root.params()):
        root.release()
    if root.state is None:
        # The program's dispatch modes and torch.func transforms must not see the ranks' messages.
        with _disable_current_modes(), temporarily_clear_interpreter_stack():
            root.state = _make(root)
            give_rows_to_all()
    return root.state


def _make(root: Root) -> ShardState:
    ranks = ranks_of(root.group.mesh, "mesh")
    device = device_of(root.group.mesh)
    collect = partial(collect_rows, root, Rows(), ranks, device)
    root.state = build(agreed(ranks, collect, device))
    for group in root.units:
        apply_settings(group)
    if root.is_manual:
        root.state.engine.begin_deferred()
    return root.state


def root_of(group: Group, is_provisional: bool = False) -> Root:
    """Returns the root of a group: the group itself if no module around it has been called. If it
    ``is_provisional``, another root may be called later. Raises RuntimeError if a module below was
    called as a root before, or if the root's group has several modules."""
    if group.root is None:
        _make_root(group)
    root = group.root
    assert root is not None
    if not is_provisional:
        root.settle()
    return root


@eager  # torch.compile(root) would trace it
def _make_root(group: Group) -> None:
    Root(group)


def ready_state(group: Group) -> ShardState:
    """Returns the state of the group's root, made if need be; another root may be called later."""
    return ready(root_of(group, is_provisional=True))


def call(group: Group, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs ``function(*args, **kwargs)`` with the group's parameters unsharded."""
    if is_traced():
        return _call_traced(group, function, args, kwargs)
    root = root_of(group)
    if root.group is group or root.state is None:
        for extension in ready(root).extensions:
            extension.encode()
    unit_call = unit_call_of(group.modules[0])
    assert unit_call is not None
    device = unit_call.state.device
    if unit_call.is_root and device.type != "cpu":
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs)
        )
    output = unit_call.call(function, *args, **kwargs)
    if unit_call.is_root and unit_call.state.config.offload is not None:
        unit_call.engine.synchronize()  # copies from the host end before the program writes there
    return output


def apply_settings(group: Group) -> None:
    """Passes the group's settings to the engine, if there is one."""
    state = None if group.root is None else group.root.state
    if state is None or group.unit < 0:
        return
    state.units[group.unit].stays = group.stays
    state.engine.set_staying(
        group.unit, after_forward=group.stays, after_backward=not group.reshard_after_backward
    )
    settings = state.engine.settings(group.unit)
    settings.syncs = group.syncs
    settings.gradient_scale = 1.0 / (group.divide_factor or group.mesh.size())
    settings.gather, settings.reduce = group.gather, group.reduce
    settings.after_reduce = group.after_reduce


def gather_in(module: nn.Module, name: str) -> None:
    """Makes ``module.name(...)`` unshard the module's group, if it has one."""
    group, method = group_of(module), getattr(module, name)
    if group is None:
        return

    @wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        return call(group, method, args, kwargs)

    setattr(module, name, gathered)


def _fact(param: RowParam, unit: str, shape: str | None) -> str:
    group, extension = param.group, param.extension
    return (
        f"parameter '{param.fqn}' of unit '{unit}', of "
        f"{shape or f'shape {list(param.shard.shape)}'}, {param.shard.dtype}, {group.policy}, "
        f"{group.num_near} near ranks, on {group.shard_device.type}"
        f"{'' if extension is None else f', gathered as {extension.kinds}'}"
    )


def _unit_param(config: ShardConfig, unit: Unit, param: RowParam) -> UnitParam:
    dtype, is_plain = param.types.model, param.extension is None
    like = param.rows.inward(torch.empty(param.rows.shape, dtype=dtype, device="meta"))
    like = torch.empty(like.shape, dtype=dtype, device="meta")
    like.requires_grad_(param.shard.requires_grad)
    return unit_param(param.fqn, like, param.types, is_gathered=is_plain, is_kept=is_plain)


def _make_shard(state: ShardState, unit: Unit, position: int, param: RowParam) -> None:
    """Moves a parameter's rows into the engine's memory, and binds its objects."""
    engine, index, shard, rows = state.engine, unit.index, param.shard, param.rows
    param.hidden = full_rows(engine.make_full(index, position), shard, param.kind)
    local = engine.make_shard(index, position)
    if param.extension is None:
        local = counted(rows.outward(at_origin(local)))
        param.local = local
        with torch.no_grad():
            param.local.copy_(local_part(shard))
        shard._local_tensor = param.local
    else:
        param.local = local_part(shard)
    grad: Any = None
    if shard.is_floating_point():
        grad = as_dtensor(rows.outward(engine.make_grad(index, position)), shard)
    if param.is_viewed:
        owners = [(owner._parameters, key) for owner, key in param.owners]
        param.view = ShownView(shard, owners, param.make_view)
    bind_shard(state, unit, position, param, grad, local, param.view)
    written = engine.make_model_shard(index, position)
    model_weight = None if written is None else rows.outward(written)
    on_host = engine.is_updated_on_host(index, position)
    elements = local_part(shard).detach()
    known = RowShard(param.fqn, ref(state), index, position, elements, model_weight, on_host)
    note_rows(shard, param.hidden, known)


def _root_above(module: nn.Module) -> Root:
    group = group_of(module)
    assert group is not None and group.root is not None
    return group.root


class Rows(Kind):
    """The kind of model whose shards are rows of each parameter, as DTensors."""

    by_rows: ClassVar[bool] = True
    has_all: ClassVar[bool] = False  # a program may ignore parameters
    sets_values: ClassVar[bool] = False
    unit_param = staticmethod(_unit_param)
    make_shard = staticmethod(_make_shard)
    wrap_method = staticmethod(gather_in)

    def facts(self, sharding: Sharding, mesh: int) -> list[object]:
        """Returns facts that the ranks of ``mesh`` must agree on; on other meshes shapes differ."""
        return [
            _fact(cast(RowParam, param), unit.name, None if unit.mesh == mesh else "any shape")
            for unit in sharding.units
            for param in unit.params
        ]

    def set_calls(self, sharding: Sharding, state: ShardState, units_of: UnitsOf) -> None:
        root = _root_above(sharding.model)
        for group in root.groups:
            if group.is_sibling:
                continue
            policy = group.policy
            calls = unit_call(
                state,
                group.modules,
                tuple(part.unit for part in (group, *group.siblings) if part.params),
                is_root=group is root.group,
                cast_inputs=policy.param_dtype if policy.cast_forward_inputs else None,
                cast_outputs=policy.output_dtype,
            )
            for module in group.modules:
                note_unit_call(module, calls)

    def full_values(self, state: ShardState, unit: Unit) -> tuple[list[Tensor], list[Tensor]]:
        return [param.shard.full_tensor() for param in unit.params], []

    def load(
        self, state: ShardState, unit: Unit, given: Mapping[int, Tensor | None], broadcast: bool
    ) -> None:
        for index, value in given.items():
            shard = unit.params[index].shard
            full = torch.empty(shard.shape, dtype=shard.dtype, device=state.device)
            if value is not None:
                full.copy_(value)
            if broadcast:
                broadcast_tensors([full], state.ranks, state.device)
            own_elements(shard).copy_(part_like(shard, full))


def _call_traced(group: Group, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a method of one of the group's modules without communication, engine or not."""
    params = [param for inner in groups_below(*group.modules) for param in inner.params]
    policy = group.policy
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    return call_traced(params, (inputs, policy.output_dtype), function, args, kwargs)
