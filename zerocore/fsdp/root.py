"""Calls of fully sharded modules: the first one of a root makes the engine of its tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from zerocore._C import UnitParam, UnitSpec, counted
from zerocore.common.agreement import agree
from zerocore.common.alarm import stall_seconds
from zerocore.common.eager import eager
from zerocore.fsdp.collectives import set_collectives
from zerocore.fsdp.group import Group, RowParam, Tree, extensions_of, group_of, note_extensions
from zerocore.fsdp.mesh import device_of
from zerocore.fsdp.policy import types_of, wire_dtype_of
from zerocore.fsdp.traced import call_group_traced
from zerocore.model.memory import Extent, check_apart
from zerocore.model.ranks import Ranks, ranks_of, with_near
from zerocore.model.refusals import check_trained
from zerocore.model.state import Param, ShardState, Unit, drop_state
from zerocore.model.traced import is_traced
from zerocore.model.unit_call import UnitCall, note_unit_call
from zerocore.model.units import UnitsOf, backward_reads
from zerocore.options.config import Communication, ShardConfig
from zerocore.options.offload import Offload
from zerocore.options.precision import unit_param
from zerocore.sharding.builder import AgreedModel, build_model, with_groups
from zerocore.tensor.earlier import give_rows_to_all
from zerocore.tensor.rows import RowShard, as_dtensor, at_origin, forget_rows, local_part, note_rows
from zerocore.tensor.shown import ShownView, full_rows


class Root(Tree):
    """The tree with the engine of all its groups."""

    @eager  # torch.compile(root) would trace it
    def ready(self) -> ShardState:
        """The state; made anew if parameters were replaced or moved since. Collective then: raises
        RuntimeError or ValueError on every rank if the model cannot be trained like this."""
        if self.state is not None and not all(param.is_in_place() for param in self.params()):
            self.release()
        if self.state is None:
            # The messages of ranks are none of the program's, nor part of a torch.func transform.
            with _disable_current_modes(), temporarily_clear_interpreter_stack():
                self._make()
                give_rows_to_all()
        assert self.state is not None
        return self.state

    def release(self) -> None:
        """Drops the engine: modules show DTensors, which keep their values."""
        if self.state is None:
            return
        self.state.finish_reads()
        self.state.engine.reset()
        self.state = None
        drop_state(self.module)
        for _, group in self.groups:
            group.unit_call = None
            for module in group.modules:
                note_unit_call(module, None)
        for param in self.params():
            forget_rows(param.param, param.hidden)
            param.hidden = param.view = param.local = param.extension = None

    def _make(self) -> None:
        meshes = list(dict.fromkeys([self.group.mesh, *(group.mesh for _, group in self.groups)]))
        ranks, name, stall = self._agree(meshes)
        device = device_of(self.group.mesh)
        groups = self.with_params()
        for number, group in enumerate(groups):
            group.unit = number
        config = self._config(groups)
        ranks = with_groups(ranks, config, device)
        named = [(path, group, meshes.index(group.mesh)) for path, group in self.groups]
        agreed = AgreedModel(
            self.module,
            self.group.modules,
            config,
            ranks[0],
            ranks,
            device,
            name,
            stall,
            units=[self._spec(*each) for each in named if each[1].params],
            modules=[group.modules for group in groups],
        )
        self.state = build_model(agreed, partial(self._fill, named))
        for group in groups:
            apply_settings(group)
        if self.is_manual:
            self.state.engine.begin_deferred()

    def _fill(
        self, named: list[tuple[str, Group, int]], state: ShardState, units_of: UnitsOf
    ) -> None:
        """Moves rows into the engine's memory, and gives groups their calls."""
        for path, group, mesh in named:
            if group.params:
                self._add_unit(state, path, group, mesh)
        for _, group, _ in named:
            if group_of(group.modules[0]) is group:
                self._set_unit_call(state, group)

    def _config(self, groups: list[Group]) -> ShardConfig:
        leaves = any(group.offloads for group in groups)
        return ShardConfig(
            communication=Communication(
                accumulate="full",
                retain_last=not self.group.reshard_after_forward,
                overlap_reductions=all(group.overlaps_reductions for _, group in self.groups),
            ),
            offload=Offload(gradients="cpu", parameters="cpu") if leaves else None,
            by_rows=True,
            has_wire_dtype=any(wire_dtype_of(group.policy) is not None for group in groups),
        )

    def _agree(self, meshes: list[DeviceMesh]) -> tuple[list[Ranks], str, float | None]:
        """The ranks of each mesh, a name that no other model has, and the limit of silence."""
        ranks = [ranks_of(mesh, "mesh") for mesh in meshes]
        error: Exception | None = None
        stall: float | None = None
        try:
            stall = stall_seconds()
            self._check(ranks[0])
            ranks = [self._with_near(*pair) for pair in zip(meshes, ranks, strict=True)]
        except Exception as caught:
            error = caught
        device = device_of(self.group.mesh)
        name = agree(ranks[0].groups, error, self._facts(self.group.mesh), device)
        for mesh, each in zip(meshes[1:], ranks[1:], strict=True):
            agree(each.groups, None, self._facts(mesh), device)
        return ranks, name, stall

    def _add_unit(self, state: ShardState, path: str, group: Group, mesh: int) -> None:
        """Moves the group's rows into the engine's memory."""
        near = group.num_near > 1
        unit = Unit(group.unit, self._name_of(path, group), stays=group.stays, near=near, mesh=mesh)
        state.units.append(unit)
        count, extensions = len(group.params), extensions_of(group)
        num_inner = sum(len(each.inputs) for each in extensions)
        state.engine.materialize(unit.index, [None] * (count + num_inner), False)  # memory, zero
        unit.params = [_bind_param(state, unit, group, position) for position in range(count)]
        for each in extensions:
            each.bind(state.engine, unit)

    def _set_unit_call(self, state: ShardState, group: Group) -> None:
        policy = group.policy
        parts = [each for each in (group, *group.siblings) if each.params]
        views = tuple(view for each in parts for view in state.units[each.unit].views)
        is_lookup = len(group.modules) == 1 and not (views or backward_reads(group.modules[0]))
        group.unit_call = UnitCall(
            state,
            state.engine,
            tuple(each.unit for each in parts),
            is_root=group is self.group,
            cast_inputs=policy.param_dtype if policy.cast_forward_inputs else None,
            cast_outputs=policy.output_dtype,
            lookup=ref(group.modules[0]) if is_lookup else None,
            views=views,
        )
        for module in group.modules:
            note_unit_call(module, group.unit_call)

    def _with_near(self, mesh: DeviceMesh, ranks: Ranks) -> Ranks:
        numbers = sorted({group.num_near for _, group in self.groups if group.mesh == mesh} - {1})
        if len(numbers) > 1:
            raise NotImplementedError(
                f"reshard_after_forward={numbers[0]} and {numbers[1]}: zerocore.fsdp takes one "
                "number of ranks for a mesh"
            )
        return with_near(ranks, numbers[0] if numbers else None)

    def _check(self, ranks: Ranks) -> None:
        self._check_ties()
        if len({group.offloads for group in self.with_params()}) > 1:
            raise NotImplementedError(
                "offload_policy: some modules of this model have a CPUOffloadPolicy and others do "
                "not; zerocore.fsdp takes one policy for a model"
            )
        if len({wire_dtype_of(group.policy) is None for group in self.with_params()}) > 1:
            raise NotImplementedError(
                "mp_policy: some modules of this model have a wire_dtype and others do not; "
                "zerocore.fsdp sums all gradients of a model in one way"
            )
        for name, group in self.groups:
            if not set(group.mesh.mesh.flatten().tolist()) <= set(ranks.members):
                raise ValueError(
                    f"module '{name}' is sharded over {group.mesh}, the root over "
                    f"{self.group.mesh}; zerocore.fsdp takes a mesh of the root's ranks"
                )
            for param in group.params:
                param.take_registered()
                check_trained(param.fqn, param.shard)
            self._check_device(name, group)
            note_extensions(group)
        self.extensions = [each for _, group in self.groups for each in extensions_of(group)]

    def _check_ties(self) -> None:
        paths = {module: name for name, module in self.module.named_modules()}
        names: dict[object, str] = {}
        params: list[tuple[str, Extent | None]] = []
        for param in self.params():
            owner, key = param.owners[0]
            fqn = f"{paths[owner]}.{key}" if paths.get(owner) else param.fqn
            params.append((fqn, param.extent))
            keys: list[object] = [param.origin]
            if param.extent is not None:
                keys.append((param.extent.key, param.shard.requires_grad))
            for each in keys:
                if each in names:
                    raise ValueError(
                        f"Parameter '{fqn}' is shared with a parameter already managed by another "
                        f"FSDP group ('{names[each]}'). For shared/tied parameters, use "
                        "fully_shard([module_a, module_b]) to place them in the same FSDP group."
                    )
            names.update(dict.fromkeys(keys, fqn))
        check_apart(params, [self.module])

    def _check_device(self, name: str, group: Group) -> None:
        prefix = f"{name}." if name else ""
        on_meta = [f"{prefix}{param.fqn}" for param in group.params if param.shard.is_meta]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {on_meta}\nFor example, call "
                "module.to_empty(device) to materialize to device and call "
                "module.reset_parameters() on each module to initialize values."
            )
        elsewhere = [
            (f"{prefix}{param.fqn}", param.shard.device)
            for param in group.params
            if group.offloads and param.shard.device.type != "cpu"
        ]
        if elsewhere:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
                'For example, load a CPU state dict or call module.to_empty(device="cpu"). '
                f"Found following parameters on non-CPU device: {elsewhere}"
            )

    def _facts(self, mesh: DeviceMesh) -> list[object]:
        """Facts that ranks of a mesh compare; other ranks may have other shapes."""
        return [
            f"parameter '{param.fqn}' of group '{name}', of "
            f"{f'shape {list(param.shard.shape)}' if group.mesh == mesh else 'any shape'}, "
            f"{param.shard.dtype}, {group.policy}, {group.num_near} near ranks, "
            f"on {group.shard_device.type}"
            f"{'' if param.extension is None else f', gathered as {param.extension.kinds}'}"
            for name, group in self.groups
            for param in group.params
        ]

    def _spec(self, name: str, group: Group, mesh: int) -> UnitSpec:
        prefix = f"{name}." if name else ""
        params = [_unit_param(param, f"{prefix}{param.fqn}", group) for param in group.params]
        for each in extensions_of(group):
            params += each.unit_params(f"{prefix}{each.fqn}")
        return UnitSpec(self._name_of(name, group), params, group.stays, group.num_near > 1, mesh)

    def _name_of(self, name: str, group: Group) -> str:
        name = name or type(self.module).__name__
        is_sibling = group_of(group.modules[0]) is not group
        return f"{name} over {group.mesh.mesh_dim_names}" if is_sibling else name


def root_of(group: Group, is_provisional: bool = False) -> Tree:
    """The root that the group belongs to; itself, if no other was called before. If it
    ``is_provisional`` another one may be called later. Raises RuntimeError if a module below has
    been called as a root before, or it is one of several that are gathered together."""
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
    """The state of the group's root, made if need be; another root may be called later."""
    return root_of(group, is_provisional=True).ready()


def call(group: Group, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs ``function(*args, **kwargs)`` with the group's parameters unsharded."""
    if is_traced():
        return call_group_traced(group, function, args, kwargs)
    root = root_of(group)
    if root.group is group or root.state is None:
        root.ready()
        for extension in root.extensions:
            extension.encode()
    unit_call = group.unit_call
    assert unit_call is not None
    device = unit_call.state.device
    if unit_call.is_root and device.type != "cpu":
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs)
        )
    output = unit_call.call(function, *args, **kwargs)
    if unit_call.is_root and unit_call.state.config.offload is not None:
        unit_call.engine.synchronize()  # loads from the host end before anyone changes parameters
    return output


def apply_settings(group: Group) -> None:
    """Tells the engine, if there is one, what is set for the group."""
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
    set_collectives(settings, group)


def _unit_param(param: RowParam, fqn: str, group: Group) -> UnitParam:
    types = types_of(param, group)
    like = param.rows.inward(torch.empty(param.rows.shape, dtype=types.model, device="meta"))
    like = torch.empty(like.shape, dtype=types.model, device="meta")
    like.requires_grad_(param.shard.requires_grad)
    is_plain = param.extension is None
    return unit_param(fqn, like, types, is_gathered=is_plain, is_kept=is_plain)


def _bind_param(state: ShardState, made: Unit, group: Group, position: int) -> Param:
    engine, unit, param = state.engine, group.unit, group.params[position]
    shard, rows = param.shard, param.rows
    full = full_rows(engine.make_full(unit, position), shard, param.kind)
    local = engine.make_shard(unit, position)
    param.hidden = full
    if param.extension is None:
        local = counted(rows.outward(at_origin(local)))
        param.local = local
        with torch.no_grad():
            param.local.copy_(local_part(shard))
        shard._local_tensor = param.local
    else:
        param.local = local_part(shard)
    grad = None
    if shard.is_floating_point():
        grad = as_dtensor(rows.outward(engine.make_grad(unit, position)), shard)
    engine.bind(unit, position, full, shard, grad, local)
    if param.is_viewed:
        owners = [(owner._parameters, key) for owner, key in param.owners]
        param.view = ShownView(shard, owners, param.make_view)
        engine.set_view(unit, position, param.view.show)
        made.views.append(param.view)
    spec = engine.spec(unit, position)
    written = engine.make_model_shard(unit, position)
    model_weight = None if written is None else rows.outward(written)
    on_host = engine.is_updated_on_host(unit, position)
    elements = local_part(shard).detach()
    known = RowShard(spec.fqn, ref(state), unit, position, elements, model_weight, on_host)
    note_rows(shard, full, known)
    return Param([spec.fqn], param.owners, shard, full, spec, types_of(param, group))
