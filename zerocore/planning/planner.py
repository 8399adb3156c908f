"""Feeds the C++ plan of a model that is not sharded: units, order of calls, dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from zerocore import _C
from zerocore.model.call_order import call_order
from zerocore.model.precision import MixedPrecision, ParamTypes, param_types
from zerocore.model.units import ParamChoice, UnitPlanned

# Tensors of a parameter's size that an optimizer keeps for it, as torch.optim allocates them.
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
MAX_RANKS = 65536  # where a search for enough ranks gives up
_DTYPE_NUMBERS: dict[torch.dtype, int] = {}  # the C++ plan only compares them


def optimizer_states(optimizer: str | int) -> int:
    """State tensors of an optimizer named as in :data:`OPTIMIZER_STATES`, or a number of them.

    Raises:
        ValueError: an unknown name or a negative number.
    """
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return optimizer
    if isinstance(optimizer, str) and optimizer.lower() in OPTIMIZER_STATES:
        return OPTIMIZER_STATES[optimizer.lower()]
    raise ValueError(
        f"optimizer must be one of {', '.join(OPTIMIZER_STATES)}, or how many tensors of a "
        f"parameter's size it keeps, got {optimizer!r}"
    )


def fewer_replicas(world_size: int, num_replicas: int) -> Iterator[int]:
    """Numbers of replicas below ``num_replicas`` that ``world_size`` ranks can make, falling."""
    return (fewer for fewer in range(num_replicas - 1, 0, -1) if world_size % fewer == 0)


class PlannedEvent(NamedTuple):
    """One thing a rank does in a step.

    Attributes:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``unshard`` or ``reshard``.
        unit: index of the unit.
        nbytes: bytes of the full bucket.
        pool_nbytes: bytes of the bucket pool in use right after.
        moment: when, counted by the calls of the forward.
        across: among the ranks that hold the same shard, not those that share the state.
        num_ranks: how many these are.
    """

    op: str
    unit: int
    nbytes: int
    pool_nbytes: int
    moment: int
    across: bool
    num_ranks: int


@dataclass(frozen=True)
class Planner:
    """Byte plans of one model on one rank, for any stage and number of ranks.

    ``world_size`` counts all ranks; the state is sharded over ``world_size / num_replicas``.

    Attributes:
        names: the units' names.
        specs: the units' parameters as they are gathered.
        types: their dtypes.
        order: calls of the units in a forward.
        first_order: calls that the runtime expects before it has seen a forward.
        backward: observed backward: (False, index of an exit in ``order``) when a call's outputs
            get their gradient, (True, unit) when all gradients of a unit exist; mirrors the
            forward where empty.
        num_states: the optimizer's tensors of a parameter's size.
        unused: by unit, indices of parameters that get no gradient.
        micro_batches: forwards and backwards of a step, all but the last under ``no_sync``.
        hold_full: ``accumulate="full"``.
    """

    names: tuple[str, ...]
    specs: tuple[tuple[_C.ParamSpec, ...], ...]
    types: tuple[tuple[ParamTypes, ...], ...]
    order: tuple[_C.CallEvent, ...]
    first_order: tuple[_C.CallEvent, ...]
    backward: tuple[tuple[bool, int], ...] = ()
    num_states: int = 2
    unused: tuple[tuple[int, ...], ...] = ()
    micro_batches: int = 1
    hold_full: bool = False

    @property
    def num_params(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(spec.numel for unit in self.specs for spec in unit)

    def memory(
        self,
        stage: int,
        world_size: int,
        num_replicas: int = 1,
        *,
        prefetch: int = 1,
        rank: int = 0,
        exchanges: bool = False,
    ) -> _C.MemoryPlan:
        """Bytes on ``rank``; ``exchanges`` as on gloo, whose reduce-scatter needs scratch.

        Ranks are numbered replica by replica.
        """
        return _C.plan_memory(
            self.specs,
            self.order,
            self._options(stage, world_size, num_replicas, prefetch, exchanges),
            rank=rank % (world_size // num_replicas),
            optimizer_states=self.num_states,
            unused=self.unused,
        )

    def layouts(self, stage: int, world_size: int) -> list[_C.Layout]:
        """Layouts of the units."""
        return _C.plan_layouts(self.specs, self._options(stage, world_size))

    def events(
        self, stage: int, world_size: int, num_replicas: int = 1, *, prefetch: int = 1
    ) -> list[PlannedEvent]:
        """A steady step, in order."""
        options = self._options(stage, world_size, num_replicas, prefetch)
        num_shards = world_size // num_replicas
        return [
            PlannedEvent(*event, num_ranks=num_replicas if event[-1] else num_shards)
            for event in _C.plan_events(self.specs, self.order, options)
        ]

    def _options(
        self,
        stage: int,
        world_size: int,
        num_replicas: int = 1,
        prefetch: int = 0,
        exchanges: bool = False,
    ) -> _C.PlanOptions:
        return _C.PlanOptions(
            stage=stage,
            world_size=world_size // num_replicas,
            num_replicas=num_replicas,
            prefetch=prefetch,
            exchanges=exchanges,
            micro_batches=self.micro_batches,
            hold_full=self.hold_full,
            first_order=self.first_order,
            backward=self.backward,
        )


@dataclass(frozen=True)
class Precision:
    """Dtypes of a plan.

    Attributes:
        dtype: floating-point dtype of the model; None for that of its parameters.
        mixed: what is computed, gathered and reduced in another dtype.

    Raises:
        TypeError: ``dtype`` is no floating-point ``torch.dtype``.
    """

    dtype: torch.dtype | None = None
    mixed: MixedPrecision | None = None

    def __post_init__(self) -> None:
        dtype = self.dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"dtype must be a floating-point torch.dtype such as torch.bfloat16, got {dtype!r}"
            )

    def types(self, choice: ParamChoice) -> ParamTypes:
        """The dtypes of a parameter."""
        own = choice.param.dtype
        if self.dtype is not None and own.is_floating_point:
            own = self.dtype
        return param_types(self.mixed, choice.fqns[0], own, choice.param.requires_grad)

    @property
    def run_dtype(self) -> torch.dtype | None:
        """The dtype that activations are measured in; None for that of the model."""
        mixed = self.mixed.param_dtype if self.mixed is not None else None
        return mixed or self.dtype


def make_planner(
    model: nn.Module,
    planned: list[UnitPlanned],
    precision: Precision | None = None,
    num_states: int = 2,
) -> Planner:
    """A planner that expects the units in order of registration and every parameter to be used.

    Args:
        model: a model that is not sharded.
        planned: its units, as :func:`zerocore.model.units.choose_units` returns them.
        precision: dtypes; those of the parameters by default.
        num_states: the optimizer's tensors of a parameter's size.
    """
    precision = precision or Precision()
    types = [[precision.types(choice) for choice in unit.params] for unit in planned]
    order = tuple(call_order(model, planned))
    return Planner(
        names=tuple(unit.name for unit in planned),
        specs=tuple(
            tuple(_spec(choice, each) for choice, each in zip(unit.params, row, strict=True))
            for unit, row in zip(planned, types, strict=True)
        ),
        types=tuple(tuple(row) for row in types),
        order=order,
        first_order=order,
        num_states=num_states,
    )


def _spec(choice: ParamChoice, types: ParamTypes) -> _C.ParamSpec:
    return _C.ParamSpec(
        choice.fqns[0],
        list(choice.param.shape),
        *_element(types.model),
        choice.param.requires_grad,
        main=_element(types.main),
        reduce=_element(types.reduce),
        grad=_element(types.grad),
    )


def _element(dtype: torch.dtype) -> tuple[int, int]:
    return _DTYPE_NUMBERS.setdefault(dtype, len(_DTYPE_NUMBERS)), dtype.itemsize
