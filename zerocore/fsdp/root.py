"""The engine of a tree of fully sharded modules, made when its root is called first."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import nn
from torch._compile import _disable_dynamo

from zerocore._C import (
    CallEvent,
    Engine,
    EngineOptions,
    GroupNames,
    ParamOwner,
    ShardOptions,
    UnitParam,
    UnitSpec,
)
from zerocore.common.agreement import agree
from zerocore.common.alarm import stall_seconds, watch
from zerocore.fsdp.group import Group, RowParam, check_gathered_as_is, groups_below
from zerocore.fsdp.mesh import device_of
from zerocore.fsdp.rows import as_dtensor, at_origin
from zerocore.model.ranks import Ranks, control_group, find_ranks, with_reductions
from zerocore.tensor.parameter import make_alike

_live: WeakSet[Root] = WeakSet()


class Root:
    """A module that is called from outside, and all groups below it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.module = group.modules[0]
        self.engine: Engine | None = None
        self.is_provisional = True  # another one may be called later
        self.groups = groups_below(*group.modules)
        for name, inner in self.groups:
            if inner.root is not None and not inner.root.is_provisional:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    "FSDP requires running forward through the root module first"
                )
        for _, inner in self.groups:
            if inner.root is not None:
                inner.root.release()
            inner.root = self
        _live.add(self)

    def settle(self) -> None:
        """It is the root.

        Raises:
            RuntimeError: it is a group of several modules.
        """
        modules = self.group.modules
        if self.is_provisional and len(modules) > 1:
            names = ", ".join(type(module).__name__ for module in modules)
            raise RuntimeError(f"FSDP requires a single root module but got [{names}]")
        self.is_provisional = False

    def params(self) -> list[RowParam]:
        """Those of all groups, in the order of the units."""
        return [param for _, group in self.groups for param in group.params]

    def with_params(self) -> list[Group]:
        """The groups that are units of the engine, in their order."""
        return [group for _, group in self.groups if group.params]

    @_disable_dynamo  # torch.compile(root) would trace it
    def ready(self) -> Engine:
        """The engine; made anew if parameters were replaced or moved since. Collective then.

        Raises:
            RuntimeError, ValueError: the model cannot be trained like this, on every rank.
        """
        if self.engine is not None and not all(param.is_in_place() for param in self.params()):
            self.release()
        if self.engine is None:
            self._make()
        assert self.engine is not None
        return self.engine

    def release(self) -> None:
        """Drops the engine: modules show DTensors, which keep their values."""
        if self.engine is not None:
            self.engine.reset()
            self.engine = None
            for param in self.params():
                param.full = param.shown = param.local = None

    def _make(self) -> None:
        ranks = find_ranks(self.group.mesh, self.module)
        error: Exception | None = None
        try:
            self._check()
        except Exception as caught:
            error = caught
        device = device_of(self.group.mesh)
        name = agree(ranks.groups, error, self._facts(), device)
        if all(group.overlaps_reductions for _, group in self.groups):
            ranks = with_reductions(ranks, device)
        for unit, group in enumerate(self.with_params()):
            group.unit = unit
        engine = Engine(
            _options(ranks, name),
            device=device,
            units=[self._spec(name, group) for name, group in self.groups if group.params],
            order=call_order(self.group.modules),
        )
        watch(control_group(ranks))
        for group in self.with_params():
            _bind(engine, group)
        engine.start(False)
        self.engine = engine
        for group in self.with_params():
            apply_settings(group)

    def _check(self) -> None:
        self._check_ties()
        for name, group in self.groups:
            if group.mesh != self.group.mesh:
                raise ValueError(
                    f"module '{name}' is sharded over {group.mesh}, the root over "
                    f"{self.group.mesh}; zerocore.fsdp takes one mesh for a model"
                )
            for param in group.params:
                param.take_registered()
                check_gathered_as_is(param.shard, param.fqn)
            self._check_device(name, group)

    def _check_ties(self) -> None:
        names: dict[object, str] = {}
        for name, group in self.groups:
            for param in group.params:
                fqn = f"{name}.{param.fqn}" if name else param.fqn
                if param.origin in names:
                    raise ValueError(
                        f"Parameter '{fqn}' is shared with a parameter already managed by another "
                        f"FSDP group ('{names[param.origin]}'). For shared/tied parameters, use "
                        "fully_shard([module_a, module_b]) to place them in the same FSDP group."
                    )
                names[param.origin] = fqn

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

    def _facts(self) -> list[object]:
        return [
            f"parameter '{param.fqn}' of group '{name}', of shape {list(param.shard.shape)}, "
            f"{param.shard.dtype}, {group.policy}"
            for name, group in self.groups
            for param in group.params
        ]

    def _spec(self, name: str, group: Group) -> UnitSpec:
        prefix = f"{name}." if name else ""
        params = [_unit_param(param, f"{prefix}{param.fqn}", group) for param in group.params]
        return UnitSpec(name or type(self.module).__name__, params, stays=group.stays)


def apply_settings(group: Group) -> None:
    """Tells the engine, if there is one, what is set for the group."""
    engine = None if group.root is None else group.root.engine
    if engine is None or group.unit < 0:
        return
    engine.set_staying(
        group.unit,
        after_forward=group.stays,
        after_backward=not group.reshard_after_backward,
    )
    engine.set_syncs(group.unit, group.syncs)
    engine.set_gradient_scale(group.unit, 1.0 / (group.divide_factor or group.mesh.size()))


def live_roots() -> list[Root]:
    """All of this process."""
    return list(_live)


def call_order(modules: list[nn.Module]) -> list[CallEvent]:
    """Enters and exits of the units if modules are called in order of registration."""
    order: list[CallEvent] = []
    firsts = {group.modules[0]: group.unit for _, group in groups_below(*modules) if group.params}
    seen: set[nn.Module] = set()

    def visit(inner: nn.Module) -> None:
        if inner in seen:
            return
        seen.add(inner)
        unit = firsts.get(inner)
        if unit is not None:
            order.append(CallEvent(True, unit))
        for child in inner.children():
            visit(child)
        if unit is not None:
            order.append(CallEvent(False, unit))

    for module in modules:
        visit(module)
    return order


def _options(ranks: Ranks, name: str) -> EngineOptions:
    control = control_group(ranks)
    return EngineOptions(
        sharding=ShardOptions(stage=3, hold_full=True, by_rows=True),
        groups=GroupNames(
            shard=None if ranks.shard is None else ranks.shard.group_name,
            replicas=None if ranks.replicas is None else ranks.replicas.group_name,
            control=None if control is None else control.group_name,
            reductions=None if ranks.reductions is None else ranks.reductions.group_name,
        ),
        alarm_name="" if control is None else name,
        stall_seconds=stall_seconds(),
    )


def _unit_param(param: RowParam, fqn: str, group: Group) -> UnitParam:
    own, policy = param.shard.dtype, group.policy
    narrow = policy.param_dtype if own.is_floating_point else None
    model = narrow or own
    like = param.rows.inward(torch.empty(param.rows.shape, dtype=model, device="meta"))
    like = torch.empty(like.shape, dtype=model, device="meta")
    like.requires_grad_(param.shard.requires_grad)
    reduce = (policy.reduce_dtype or model) if own.is_floating_point else own
    return UnitParam(fqn, like, main=own, reduce=reduce, grad=own, lacks_main=False)


def _bind(engine: Engine, group: Group) -> None:
    """Moves the group's rows into the engine's memory and shows the engine where they belong."""
    engine.materialize(group.unit, [None] * len(group.params), False)  # memory, zero
    for index, param in enumerate(group.params):
        shard = param.shard
        param.full = nn.Parameter(
            engine.make_full(group.unit, index), requires_grad=shard.requires_grad
        )
        make_alike(param.full, param.kind, param.attributes)
        local = at_origin(engine.make_shard(group.unit, index))
        param.local = param.rows.outward(local)
        with torch.no_grad():
            param.local.copy_(shard._local_tensor)  # type: ignore[attr-defined]
        shard._local_tensor = param.local  # type: ignore[attr-defined]
        grad = None
        if shard.is_floating_point():
            grad = as_dtensor(param.rows.outward(engine.make_grad(group.unit, index)), shard)
        owners = [ParamOwner(owner._parameters, name) for owner, name in param.owners]
        for owner, name in param.owners:
            owner._parameters[name] = shard
        engine.bind(group.unit, index, param.full, shard, grad, owners, local)
