"""The state of a sharded model: its engine, group, units and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakSet

import torch
from torch import nn

from zerocore._C import Engine, ParamSpec
from zerocore.model.config import ShardConfig
from zerocore.model.meters import Meters
from zerocore.model.precision import ParamTypes
from zerocore.model.ranks import Ranks
from zerocore.model.unit_call import unit_call_of
from zerocore.tensor.parameter import ShardedParameter

_STATE = "_zerocore_state"
Explain = Callable[[BaseException, "ShardState"], BaseException | None]


@dataclass(eq=False)
class Param:
    """One parameter: its names, its places in modules, its two faces."""

    fqns: list[str]
    owners: list[tuple[nn.Module, str]]
    full: nn.Parameter
    shard: ShardedParameter
    spec: ParamSpec
    types: ParamTypes
    written_version: int = -1  # of ``full`` when it was written back to the shards last

    @property
    def fqn(self) -> str:
        return self.fqns[0]


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered together."""

    index: int
    name: str
    params: list[Param] = field(default_factory=list)


@dataclass(eq=False)
class ShardState:
    """Everything that belongs to one sharded model."""

    engine: Engine
    config: ShardConfig
    ranks: Ranks
    device: torch.device
    units: list[Unit] = field(default_factory=list)
    meters: Meters = field(init=False)
    shown_full: Counter[int] = field(default_factory=Counter)  # units inside of unsharded()
    # Each returns when it does not read weights and optimizer states any more.
    readers: list[Callable[[], None]] = field(default_factory=list)
    # Returns the error to raise in the place of one of a backward, or None.
    explain_backward: Explain = lambda error, state: None

    def __post_init__(self) -> None:
        self.meters = Meters(self.engine, self.device)

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def finish_reads(self) -> None:
        """Called before weights or optimizer states change."""
        while self.readers:
            self.readers.pop(0)()

    def begin_load(self) -> None:
        """Called before values are loaded, on all ranks."""
        self.finish_reads()
        self.engine.drop_first_gather()

    def params(self) -> list[Param]:
        """All parameters, in the order of the units."""
        return [param for unit in self.units for param in unit.params]

    def units_of(self, module: nn.Module) -> list[Unit]:
        """Units with a parameter that is registered in ``module`` or below."""
        inside = set(module.modules())
        return [
            unit
            for unit in self.units
            if any(owner in inside for param in unit.params for owner, _ in param.owners)
        ]


_states: WeakSet[ShardState] = WeakSet()


def set_state(model: nn.Module, state: ShardState) -> None:
    """Attaches the state to the model."""
    model.__dict__[_STATE] = state
    _states.add(state)


def live_states() -> list[ShardState]:
    """Those of all sharded models of this process."""
    return list(_states)


def mark_forked() -> None:
    """Tells a forked process that it has no threads which carry out its parent's collectives."""
    for state in list(_states):
        state.engine.mark_forked()


def find_state(module: nn.Module) -> ShardState | None:
    """The state of the sharded model that ``module`` is, contains or belongs to."""
    for inner in module.modules():
        if _STATE in inner.__dict__:
            return inner.__dict__[_STATE]
        unit_call = unit_call_of(inner)
        if unit_call is not None:
            return cast(ShardState, unit_call.state)
    for param in module.parameters():
        if isinstance(param, ShardedParameter):
            return param.state_ref()
    return None


def state_of(module: nn.Module) -> ShardState:
    """As :func:`find_state`.

    Raises:
        ValueError: the module is not sharded.
        RuntimeError: this process was forked from the one that sharded it.
    """
    state = find_state(module)
    if state is None:
        raise ValueError(
            f"this {type(module).__name__} is not sharded; call zerocore.shard(model) first"
        )
    state.engine.check_process()
    return state
