"""The state of a sharded model: its engine, group, units and parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast, overload
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import TypeIs

from zerocore._C import Engine, ParamSpec
from zerocore.common.eager import eager
from zerocore.model.meters import Meters
from zerocore.model.parameter_meshes import PartRanges
from zerocore.model.ranks import Ranks
from zerocore.model.traced import TracedParam
from zerocore.model.unit_call import unit_call_of
from zerocore.options.config import ShardConfig
from zerocore.options.precision import BYTES, ParamTypes
from zerocore.tensor.placed import Placed
from zerocore.tensor.rows import shard_of

_STATE = "_zerocore_state"
_MAKER = "_zerocore_state_maker"


@dataclass(eq=False)
class Param:
    """One parameter: its names, its places in modules, its two objects."""

    fqns: list[str]
    owners: list[tuple[nn.Module, str]]
    object: Any  # that of programs
    hidden: Any  # the other one
    spec: ParamSpec
    types: ParamTypes

    @property
    def fqn(self) -> str:
        return self.fqns[0]

    @property
    def is_full(self) -> bool:
        """Whether programs see the full parameter in its object."""
        return not (isinstance(self.object, Placed) or hasattr(self.object, "_spec"))

    @property
    def shard(self) -> Any:
        """A ShardedParameter; a DTensor, if shards are rows."""
        return self.hidden if self.is_full else self.object

    @property
    def whole_shape(self) -> torch.Size:
        """Its shape in ``state_dict()`` before sharding."""
        shard = self.shard
        return shard.shape if hasattr(shard, "_spec") else shard.place.whole_shape

    @property
    def full(self) -> Any:
        """The full parameter, which layers compute with."""
        return self.object if self.is_full else self.hidden

    def make_like(self) -> Tensor:
        """A tensor like the full parameter, without its values."""
        like = self.full
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


class Encoded(NamedTuple):
    """Bytes that are gathered in the place of a parameter, which says what they are."""

    spec: ParamSpec
    dtype: torch.dtype | None  # None: of what they make, which is not gathered
    types: ParamTypes = BYTES  # in the engine


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered together."""

    index: int
    name: str
    params: list[Param] = field(default_factory=list)
    stays: bool = False  # unsharded from forward to backward
    near: bool = True  # gathers again from near ranks, where there are some
    mesh: int = 0  # of the state
    encoded: list[Encoded] = field(default_factory=list)  # behind the parameters
    extensions: list[Any] = field(default_factory=list)  # parameters that gather themselves
    views: list[Any] = field(default_factory=list)  # of parameters that are no plain tensors

    @property
    def laid_out(self) -> list[Param | Encoded]:
        """All that has a place in the unit's layout, in order."""
        return [*self.params, *self.encoded]


class ShardKind(ABC):
    """Functions of a sharded model that differ between ``shard`` and ``fully_shard``."""

    face: ClassVar[str]  # the module whose function has sharded the model
    by_rows: ClassVar[bool]  # a shard is some rows of each parameter, a DTensor
    has_all: ClassVar[bool]  # all parameters of the model, unless a program has made a mistake

    @abstractmethod
    def full_values(self, state: ShardState, unit: Unit) -> tuple[list[Tensor], list[Tensor]]:
        """The unit's full parameters, and what is gathered behind them; collective."""

    @abstractmethod
    def load(
        self, state: ShardState, unit: Unit, given: Mapping[int, Tensor | None], broadcast: bool
    ) -> None:
        """Sets parameters of the unit, by their positions, to full values; collective. With
        ``broadcast`` rank 0's values are taken, and the other ranks may give None."""

    @abstractmethod
    def wrap_method(self, module: nn.Module, name: str) -> None:
        """Makes ``module.name(...)`` gather parameters as its call does."""


@dataclass(eq=False)
class ShardState:
    """Everything that belongs to one sharded model."""

    num_made: ClassVar[int] = 0  # in this process

    engine: Engine
    kind: ShardKind
    config: ShardConfig
    ranks: Ranks  # all of the model, those of tensor parallelism as replicas
    meshes: tuple[Ranks, ...]  # of data parallelism, and those of units on others
    device: torch.device
    tensor_ranks: ProcessGroup | None = None  # of tensor parallelism
    part_ranges: dict[str, list[PartRanges]] = field(default_factory=dict)  # by FQN
    units: list[Unit] = field(default_factory=list)
    meters: Meters = field(init=False)
    shown_full: Counter[int] = field(default_factory=Counter)  # units inside of unsharded()
    # Each returns when it does not read weights and optimizer states any more.
    readers: list[Callable[[], None]] = field(default_factory=list)
    # Values of packages over this one, kept as long as the model is there, by names of their own.
    kept: dict[str, Any] = field(default_factory=dict)
    given_units: Sequence[Any] | None = None  # of zerocore.shard
    given_ranks: Ranks = field(default_factory=Ranks)
    model: Callable[[], nn.Module | None] = lambda: None  # the root
    modules: list[tuple[str, ref[nn.Module]]] = field(default_factory=list)  # by their names

    def __post_init__(self) -> None:
        self.meters = Meters(self.engine, self.device)

    def ranks_of(self, unit: int) -> Ranks:
        """The ranks that share a unit."""
        return self.meshes[self.units[unit].mesh]

    def ranks_holding(self, fqn: str) -> Ranks:
        """The ranks that share a parameter."""
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
        """A forward of the whole model begins."""
        self.meters.begin_pass()

    def traced_params(self) -> list[TracedParam]:
        """All parameters, for a call that is traced."""
        return [
            TracedParam(
                p.fqn, p.owners, p.object, p.is_full, None if p.shard.make_view else p.make_like
            )
            for unit in self.units
            for p in unit.params
        ]

    def finish_reads(self) -> None:
        """Called before weights or optimizer states change."""
        while self.readers:
            self.readers.pop(0)()

    @property
    def extensions(self) -> list[Any]:
        """Parameters that gather themselves."""
        return [each for unit in self.units for each in unit.extensions]

    def encode(self) -> None:
        """Asks parameters that gather themselves and have changed what is gathered of them; raises
        what a parameter does, and on the other ranks a RuntimeError that names it."""
        stale = [each for each in self.extensions if each.is_stale()]
        if not stale:
            return
        errors: dict[str, Exception] = {}
        for each in stale:
            try:
                each.encode()
            except Exception as error:
                errors[each.fqn] = error
        failed = self.engine.any_rank([each.fqn in errors for each in stale])
        for each in stale if any(failed) else ():
            each.encoded_version = -1  # on all ranks
        for own in errors.values():
            raise own
        for each in (each for each, any_failed in zip(stale, failed, strict=True) if any_failed):
            raise RuntimeError(
                f"parameter '{each.fqn}': another rank could not say what is gathered of it; its "
                "error says why"
            )

    def several(self) -> list[str]:
        """Names of frozen parameters that consist of several tensors, and are no shards."""
        return [each.fqn for each in self.extensions if each.version is None]

    def params(self) -> list[Param]:
        """All parameters, in the order of the units."""
        return [param for unit in self.units for param in unit.params]

    def units_of(self, module: nn.Module) -> list[Unit]:
        """Units with a parameter that is registered in ``module`` or below."""
        inside = set(module.modules())
        return [
            unit
            for unit in self.units
            if any(
                owner in inside
                for param in (*unit.params, *unit.extensions)
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
    """Detaches the state, whose engine is gone."""
    _states.discard(model.__dict__.pop(_STATE))


def live_states() -> list[ShardState]:
    """Those of all sharded models of this process."""
    return list(_states)


def mark_forked() -> None:
    """Tells a forked process that it has no threads which carry out its parent's collectives."""
    for state in list(_states):
        state.engine.mark_forked()


def set_maker(module: nn.Module, make: Callable[[], ShardState]) -> None:
    """``module`` is sharded, and its state is made late: ``make`` makes it, if need be."""
    module.__dict__[_MAKER] = make


def find_state(module: nn.Module) -> ShardState | None:
    """The state of the model of ``zerocore.shard`` that ``module`` is, contains or belongs to."""
    return next((state for state in _states_in(module) if not state.kind.by_rows), None)


@overload
def is_sharded(value: nn.Module) -> bool: ...


@overload
def is_sharded(value: object) -> TypeIs[Placed]: ...


def is_sharded(value: object) -> bool:
    """Whether ``value`` is a shard that ``zerocore.shard`` made (of a parameter, a gradient, an
    optimizer state), or a module of a sharded model.

    Behind it type checkers know ``local()``, ``shard_range`` and ``full_tensor()``. DTensors of
    :mod:`zerocore.fsdp` are none. A module is sharded if it is, contains or belongs to a model of
    ``shard`` or of ``fully_shard``.
    """
    if isinstance(value, nn.Module):
        return next(_states_in(value), None) is not None or _maker_in(value) is not None
    return isinstance(value, Placed)


def _states_in(module: nn.Module) -> Iterator[ShardState]:
    """Those of the modules in ``module``, one of them several times, and of its parameters."""
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
    """The state of the sharded model that ``module`` is, contains or belongs to.

    Raises:
        ValueError: the module is not sharded, or holds several sharded models.
        RuntimeError: this process was forked from the one that sharded it.
    """
    states = dict.fromkeys(_states_in(module))
    name = type(module).__name__
    if not states and _maker_in(module) is not None:
        raise ValueError(
            f"this {name} is sharded by zerocore.fsdp and has run no forward yet, in which its "
            "engine is made; run a forward first"
        )
    if not states:
        raise ValueError(
            f"this {name} is not sharded; call zerocore.shard(model) or "
            "zerocore.fsdp.fully_shard(model) first"
        )
    if len(states) > 1:
        raise ValueError(
            f"this {name} holds {len(states)} models that are sharded by themselves; call "
            "fully_shard for what holds them, too, or pass one of them"
        )
    state = next(iter(states))
    state.engine.check_process()
    return state


def ready_state_of(module: nn.Module) -> ShardState:
    """As :func:`state_of`; makes a state that is made late, which is collective.

    Raises:
        ValueError, RuntimeError: as :func:`state_of`, or the state cannot be made.
    """
    make = _maker_in(module)
    if make is not None:
        make()
    return state_of(module)
