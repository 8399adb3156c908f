"""The state of a sharded model: its engine, group, units and parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast, overload
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import TypeIs

from zerocore._C import Engine
from zerocore.common import late
from zerocore.common.eager import eager
from zerocore.model.meters import Meters
from zerocore.model.parameter_meshes import PartRanges
from zerocore.model.ranks import Ranks
from zerocore.model.unit_call import unit_call_of
from zerocore.model.units import Param, Unit
from zerocore.options.config import ShardConfig
from zerocore.tensor.noted_writes import copied_views
from zerocore.tensor.placed import Placed
from zerocore.tensor.rows import shard_of

_STATE = "_zerocore_state"
_MAKER = "_zerocore_state_maker"


class ShardKind(ABC):
    """The functions that differ between models of ``shard`` and ``fully_shard``."""

    by_rows: ClassVar[bool]  # a shard is some rows of each parameter, a DTensor
    has_all: ClassVar[bool]  # it must have all parameters: others are a mistake of the program

    @abstractmethod
    def full_values(self, state: ShardState, unit: Unit) -> tuple[list[Tensor], list[Tensor]]:
        """Gathers the unit's full parameters, and its encoded ones after them; collective."""

    @abstractmethod
    def load(
        self, state: ShardState, unit: Unit, given: Mapping[int, Tensor | None], broadcast: bool
    ) -> None:
        """Sets parameters of the unit, by their positions, to full values; collective. With
        ``broadcast``, uses rank 0's values, and the other ranks may pass None."""

    @abstractmethod
    def wrap_method(self, module: nn.Module, name: str) -> None:
        """Makes ``module.name(...)`` unshard parameters as the module's forward does."""


@dataclass(eq=False)
class ShardState:
    """Everything that belongs to one sharded model."""

    num_made: ClassVar[int] = 0  # in this process

    engine: Engine
    kind: ShardKind
    config: ShardConfig
    ranks: Ranks  # all ranks of the model; tensor-parallel ranks count as replicas
    meshes: tuple[Ranks, ...]  # the data-parallel ranks, then the ranks of units on other meshes
    device: torch.device
    tensor_ranks: ProcessGroup | None = None  # of tensor parallelism
    part_ranges: dict[str, list[PartRanges]] = field(default_factory=dict)  # by FQN
    units: list[Unit] = field(default_factory=list)
    extensions: list[Any] = field(default_factory=list)  # parameters that gather themselves
    meters: Meters = field(init=False)
    shown_full: Counter[int] = field(default_factory=Counter)  # units inside unsharded()
    # Each waits until a background reader of weights and optimizer states has ended.
    readers: list[Callable[[], None]] = field(default_factory=list)
    # Values that higher packages keep with the model, by name.
    kept: dict[str, Any] = field(default_factory=dict)
    given_units: Sequence[Any] | None = None  # arguments of zerocore.shard
    given_ranks: Ranks = field(default_factory=Ranks)
    model: Callable[[], nn.Module | None] = lambda: None  # the root
    # Of a model of ``shard``, those that are registered later included: their names.
    modules: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.meters = Meters(self.engine, self.device)

    def ranks_of(self, unit: int) -> Ranks:
        """Returns the ranks that share a unit."""
        return self.meshes[self.units[unit].mesh]

    def ranks_holding(self, fqn: str) -> Ranks:
        """Returns the ranks that share a parameter."""
        holders = (u for u in self.units if any(param.fqn == fqn for param in u.params))
        return self.meshes[next(holders).mesh]

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @eager
    def begin_pass(self) -> None:
        """Notes that a root forward begins."""
        if copied_views:
            late.call("check_weights", self)
        self.meters.begin_pass()

    def finish_reads(self) -> None:
        """Waits for background readers, before weights or optimizer states change."""
        while self.readers:
            self.readers.pop(0)()

    def encode(self) -> None:
        """Encodes the parameters that gather themselves and have changed."""
        if self.extensions:
            late.call("encode_changed", self)

    def several(self) -> list[str]:
        """Returns the names of frozen parameters of several tensors, which are not sharded."""
        return [extension.fqn for extension in self.extensions if not extension.is_param]

    def params(self) -> list[Param]:
        """Returns all parameters, in the order of the units."""
        return [param for unit in self.units for param in unit.params]

    def units_of(self, module: nn.Module) -> list[Unit]:
        """Returns the units with a parameter that is registered in ``module`` or below."""
        inside = set(module.modules())
        return [
            unit
            for unit in self.units
            if any(
                owner in inside
                for param in (*unit.params, *unit.several)
                for owner, _ in param.owners
            )
        ]


_states: WeakSet[ShardState] = WeakSet()


def set_state(model: nn.Module, state: ShardState) -> None:
    model.__dict__[_STATE] = state
    state.model = ref(model)
    _states.add(state)
    ShardState.num_made += 1


def drop_state(model: nn.Module) -> None:
    """Detaches the state from the model; its engine is gone."""
    _states.discard(model.__dict__.pop(_STATE))


def live_states() -> list[ShardState]:
    """Returns the states of all sharded models of this process."""
    return list(_states)


def mark_forked() -> None:
    """Tells the engines in a forked process that they have no threads for collectives."""
    for state in list(_states):
        state.engine.mark_forked()


def set_maker(module: nn.Module, make: Callable[[], ShardState]) -> None:
    """Sets ``make``, which makes the state of a module that is sharded already, when needed."""
    module.__dict__[_MAKER] = make


def find_state(module: nn.Module) -> ShardState | None:
    """Returns the state of the ``zerocore.shard`` model that ``module`` is, contains or is in."""
    return next((state for state in _states_in(module) if not state.kind.by_rows), None)


@overload
def is_sharded(value: nn.Module) -> bool: ...


@overload
def is_sharded(value: object) -> TypeIs[Placed]: ...


def is_sharded(value: object) -> bool:
    """Whether ``value`` is a shard that ``zerocore.shard`` made (of a parameter, a gradient, an
    optimizer state), or a module of a sharded model.

    After this test, type checkers know ``local()``, ``shard_range`` and ``full_tensor()``. DTensors
    of :mod:`zerocore.fsdp` are not such shards. A module is sharded if it is, contains or belongs
    to a model of ``shard`` or ``fully_shard``.
    """
    if isinstance(value, nn.Module):
        return next(_states_in(value), None) is not None or _maker_in(value) is not None
    return isinstance(value, Placed)


def _states_in(module: nn.Module) -> Iterator[ShardState]:
    """Yields the states of the modules and parameters in ``module``, some of them repeatedly."""
    for inner in module.modules():
        if _STATE in inner.__dict__:
            yield inner.__dict__[_STATE]
        unit_call = unit_call_of(inner)
        if unit_call is not None:
            yield cast(ShardState, unit_call.state)
    for param in module.parameters():
        shard = shard_of(param)
        state = None if shard is None else shard.state_ref()
        if state is not None:
            yield state


def _maker_in(module: nn.Module) -> Callable[[], ShardState] | None:
    makers = (inner.__dict__.get(_MAKER) for inner in module.modules())
    return next(filter(None, makers), None)


def state_of(module: nn.Module) -> ShardState:
    """Returns the state of the sharded model that ``module`` is, contains or belongs to.

    Raises:
        ValueError: the module is not sharded, or holds several sharded models.
        RuntimeError: this process was forked from the one that sharded it.
    """
    states = dict.fromkeys(_states_in(module))
    name = type(module).__name__
    if not states and _maker_in(module) is not None:
        raise ValueError(
            f"this {name} is sharded by zerocore.fsdp, and its first forward, which makes its "
            "engine, has not run yet; run a forward first"
        )
    if not states:
        raise ValueError(
            f"this {name} is not sharded; call zerocore.shard(model) or "
            "zerocore.fsdp.fully_shard(model) first"
        )
    if len(states) > 1:
        raise ValueError(
            f"this {name} holds {len(states)} separately sharded models; pass one of them, or call "
            f"fully_shard on the {name}, too"
        )
    state = next(iter(states))
    state.engine.check_process()
    return state


def ready_state_of(module: nn.Module) -> ShardState:
    """Returns the state as :func:`state_of`, and makes it first if need be, which is collective.

    Raises:
        ValueError, RuntimeError: as :func:`state_of`, or the state cannot be made.
    """
    make = _maker_in(module)
    if make is not None:
        make()
    return state_of(module)
