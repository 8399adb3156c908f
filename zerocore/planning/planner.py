"""Describes a model to the C++ planner: units, order of calls, dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerocore import _C
from zerocore.common.memory_bytes import MemoryBytes
from zerocore.model.units import Param, Unit, call_order, units_by_module
from zerocore.options.config import shard_options
from zerocore.options.precision import MixedPrecision, ParamTypes, param_types
from zerocore.planning.division import Division

# State tensors of a parameter's size that each optimizer of torch.optim allocates.
OPTIMIZER_STATES = {
    "sgd": 0,
    "momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "lion": 1,
    "muon": 1,
    "adam": 2,
    "adamw": 2,
    "amsgrad": 3,
}
_DTYPE_NUMBERS: dict[torch.dtype, int] = {}  # the C++ plan only compares them


def optimizer_states(optimizer: str | int) -> int:
    """Returns the number of state tensors of an optimizer in :data:`OPTIMIZER_STATES`, or the
    number given. Raises ValueError for an unknown name or a negative number."""
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return optimizer
    if isinstance(optimizer, str) and optimizer.lower() in OPTIMIZER_STATES:
        return OPTIMIZER_STATES[optimizer.lower()]
    raise ValueError(
        f"optimizer must be one of {', '.join(OPTIMIZER_STATES)}, or how many tensors of a "
        f"parameter's size it keeps, got {optimizer!r}"
    )


@dataclass(frozen=True)
class PlannerUnit:
    """A unit as the C++ planner needs it.

    Attributes:
        name: the unit's name.
        specs: its parameters as they are gathered.
        types: the parameters' dtypes.
        unused: indices of parameters that get no gradient.
        stays: whether it stays unsharded from forward to backward.
        near: whether later gathers come from the near ranks, if there are any.
        mesh: 0 for the model's mesh, or the number of its part.
    """

    name: str
    specs: tuple[_C.ParamSpec, ...]
    types: tuple[ParamTypes, ...]
    unused: tuple[int, ...] = ()
    stays: bool = False
    near: bool = True
    mesh: int = 0


@dataclass(frozen=True)
class Planner:
    """A planner of one model's bytes, for any stage and number of ranks.

    Attributes:
        units: the model's units.
        order: calls of the units in a forward.
        first_order: calls that the runtime expects before it has seen a forward; empty if it has
            seen ``order``.
        backward: events of the backward; if empty, it mirrors the forward.
        num_states: the optimizer's state tensors of a parameter's size.
        micro_batches: forwards and backwards of a step, all but the last under ``no_sync``.
        by_rows: a shard is some rows of each parameter, as under ``fully_shard``.
        sums_in_order: ranks sum gradients themselves, in the order of ranks.
        moves_matrices: the optimizer is Muon, which sends matrices to their owners.
    """

    units: tuple[PlannerUnit, ...]
    order: tuple[_C.CallEvent, ...]
    first_order: tuple[_C.CallEvent, ...] = ()
    backward: tuple[_C.BackwardEvent, ...] = ()
    num_states: int = 2
    micro_batches: int = 1
    by_rows: bool = False
    sums_in_order: bool = False
    moves_matrices: bool = False

    @property
    def full_gradient_nbytes(self) -> int:
        """Bytes of all full gradients, as autograd makes them."""
        return sum(
            spec.numel * types.model.itemsize
            for unit in self.units
            for spec, types in zip(unit.specs, unit.types, strict=True)
            if spec.requires_grad
        )

    def memory(self, division: Division) -> MemoryBytes:
        """Returns the bytes on the division's rank after a steady step."""
        plan = _C.plan_memory(
            self._units(), self.order, self._options(division), optimizer_states=self.num_states
        )
        return MemoryBytes(
            parameters=plan.parameters,
            gradients=plan.gradients,
            optimizer=plan.optimizer,
            pool=plan.pool,
            main_weights=plan.main_weights,
            pool_reserved=plan.pool_reserved,
            host_weights=plan.host.weights,
            host_gradients=plan.host.gradients,
            host_optimizer=plan.host.optimizer,
            host_buffers=plan.host.buffers,
            disk=plan.host.disk,
        )

    def layouts(self, division: Division) -> list[_C.Layout]:
        """Returns the layouts of the units."""
        return _C.plan_layouts(self._units(), self._options(division))

    def events(self, division: Division) -> list[_C.PlannedEvent]:
        """Returns the events of a steady step, in order."""
        return _C.plan_events(self._units(), self.order, self._options(division))

    def _units(self) -> list[_C.UnitPlan]:
        return [_C.UnitPlan(u.specs, u.unused, u.stays, u.near, u.mesh) for u in self.units]

    def _options(self, division: Division) -> _C.PlanOptions:
        return _C.PlanOptions(
            shard_options(
                division.stage,
                division.communication,
                division.offload,
                self.by_rows,
                self.sums_in_order,
            ),
            world_size=division.num_shards,
            num_replicas=division.num_replicas,
            num_near=division.communication.num_near,
            rank=division.rank,
            parts=division.parts,
            backend=division.backend,
            sums_on_host=division.sums_on_host,
            micro_batches=self.micro_batches,
            first_order=self.first_order,
            backward=self.backward,
        )


def make_planner(
    model: nn.Module,
    planned: list[Unit],
    *,
    dtype: torch.dtype | None = None,
    mixed: MixedPrecision | None = None,
    num_states: int = 2,
    num_parts: Sequence[int] = (),
) -> Planner:
    """Makes a planner that expects units in order of registration, and every parameter in use.

    Args:
        model: a model that is not sharded.
        planned: its units, as :func:`zerocore.model.units.choose_units` returns them.
        dtype: floating-point dtype of the model; None for its parameters' own.
        mixed: the dtypes of compute, gathers and reductions, where they differ.
        num_states: the optimizer's state tensors of a parameter's size.
        num_parts: by mesh, into how many parts training cuts parameters along dimension 0; empty if
            the model's are as in training.

    Raises:
        NotImplementedError: a parameter gathers itself, so its bytes are known only in ``shard``.
    """
    for param in (param for unit in planned for param in (*unit.params, *unit.several)):
        if param.gathers_itself:
            raise NotImplementedError(
                f"parameter '{param.fqn}' gathers itself (fsdp_pre_all_gather): its bytes are "
                "unknown before the model is sharded. Shard it inside of `with "
                "zerocore.emulate(world_size):` and call zerocore.planning.predict_memory(model)"
            )
    units = []
    for unit in planned:
        types = tuple(_types(param, dtype, mixed) for param in unit.params)
        parts = num_parts[unit.mesh] if num_parts else 1
        pairs = zip(unit.params, types, strict=True)
        specs = tuple(_spec(param, kinds, parts) for param, kinds in pairs)
        units.append(PlannerUnit(unit.name, specs, types, mesh=unit.mesh))
    order = tuple(call_order([model], units_by_module(unit.modules for unit in planned)))
    return Planner(
        units=tuple(units),
        order=order,
        first_order=order,
        num_states=num_states,
        sums_in_order=mixed is not None and mixed.sums_in_order,
    )


def _types(param: Param, dtype: torch.dtype | None, mixed: MixedPrecision | None) -> ParamTypes:
    model_dtype = param.tensor.dtype
    if dtype is not None and model_dtype.is_floating_point:
        model_dtype = dtype
    types = param_types(mixed, param.fqn, model_dtype, param.object.requires_grad)
    return param.with_gather(types, mixed)


def _spec(param: Param, types: ParamTypes, num_parts: int) -> _C.ParamSpec:
    shape = list(param.tensor.shape)
    if num_parts > 1 and shape:
        shape[0] = -(-shape[0] // num_parts)
    return _C.ParamSpec(
        param.fqn,
        shape,
        _number(types.model),
        types.model.itemsize,
        param.object.requires_grad,
        main=_element(types.main),
        reduce=_element(types.reduce),
        grad=_element(types.grad),
        gather=_C.ElementType(0, 0) if types.gather is None else _element(types.gather),
    )


def _element(dtype: torch.dtype) -> _C.ElementType:
    return _C.ElementType(_number(dtype), dtype.itemsize)


def _number(dtype: torch.dtype) -> int:
    return _DTYPE_NUMBERS.setdefault(dtype, len(_DTYPE_NUMBERS))
