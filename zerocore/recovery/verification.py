"""Whether ranks hold the same where they should, and memory what was written: silent corruption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zerocore.checkpoint.training_state import optimizers_of
from zerocore.common.agreement import Groups, checksum, differing, gather_objects, ranks_by_value
from zerocore.common.alarm import operation
from zerocore.hooks.optimizer_states import NUMBERS, options_of, params_of
from zerocore.model.state import ShardState, Unit, ready_state_of
from zerocore.tensor.rows import elements_of


@dataclass(frozen=True)
class Difference:
    """A value that ranks should hold alike, and do not.

    Attributes:
        name: of a parameter, with ``": "`` and the name of an optimizer's state, or of options.
        ranks: numbers in the default group of those that hold the same; most ranks first.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        classes = "; ".join(f"ranks {', '.join(map(str, each))}" for each in self.ranks)
        return f"{self.name} is not the same on {classes}"


@dataclass(frozen=True)
class Verification:
    """The outcome of :func:`verify`, the same on all ranks.

    Attributes:
        num_compared: values of this rank that another rank holds, too.
        num_remembered: values of this rank that nothing has written since they were looked at last.
        differing: of those that ranks hold alike.
        changed: name and rank of those whose memory changed although nothing has written them.
    """

    num_compared: int
    num_remembered: int
    differing: tuple[Difference, ...]
    changed: tuple[tuple[str, int], ...]

    @property
    def is_good(self) -> bool:
        return not self.differing and not self.changed

    def __str__(self) -> str:
        lines = [f"{self.num_compared} values compared with other ranks"]
        lines += [f"{self.num_remembered} values compared with those of the last call"]
        lines += [str(each) for each in self.differing]
        lines += [f"{name} changed on rank {rank}: nothing wrote it" for name, rank in self.changed]
        return "\n".join(lines)


_Seen = dict[str, tuple[tuple[int, ...], int]]
"""Versions and checksums by name."""


@dataclass(frozen=True)
class _Value:
    """Something that this rank holds."""

    name: str
    number: Tensor  # checksum, int64
    holders: Groups  # of the ranks that hold the same
    version: tuple[int, ...] | None = None  # equal while nothing has written it; None: not known


@torch.no_grad()
def verify(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None
) -> Verification:
    """Compares checksums of weights and optimizer states, for corruption that nothing reports.

    Between replicas (stage 0, hybrid sharding, parameters at stages 1 and 2) all ranks should hold
    the same; options and step counts of optimizers should be equal on all ranks. Each value is also
    compared with the last call, if nothing has written it since: a call behind a step and another
    one before the next say whether memory kept its bits in between. Buffers, which ranks may have
    for themselves, are left out. Reads all of the state once; collective, between steps.

    Args:
        model: sharded.
        optimizer: of its parameters, or several.

    Raises:
        ValueError, TypeError: as :class:`Checkpoints`.
    """
    state, optimizers = ready_state_of(model), optimizers_of(optimizer)
    with operation("verify"):
        values = [*_weights(state), *_states(state, optimizers), *_options(state, optimizers)]
        changed, num_remembered = _changed(state, values)
        differing_values, num_compared = _compare(state, values)
        found = gather_objects(state.ranks.groups, [(changed, differing_values)], state.device)
    return Verification(
        num_compared,
        num_remembered,
        tuple(dict.fromkeys(chain.from_iterable(each for _, each in found))),
        tuple(chain.from_iterable(each for each, _ in found)),
    )


def _holders(state: ShardState, unit: Unit) -> Groups:
    """Groups of the ranks with the same elements."""
    ranks = state.meshes[unit.mesh]
    if state.engine.layout(unit.index).num_shards == 1:
        return ranks.groups
    return () if ranks.replicas is None else (ranks.replicas,)


def _weights(state: ShardState) -> Iterator[_Value]:
    """Shards, and the full parameters that stages 1 and 2 keep on each rank."""
    is_kept = state.config.stage in (1, 2) and not state.config.placements.parameters
    for unit in state.units:
        for index, param in enumerate(unit.params):
            number = checksum(elements_of(param.shard, param.shard))
            version = (state.engine.param_version(unit.index, index),)
            yield _Value(f"'{param.fqn}'", number, _holders(state, unit), version)
        if is_kept:
            state.engine.hold_unsharded([unit.index])  # first what has changed is gathered
            groups = state.meshes[unit.mesh].groups
            for param in unit.params:
                yield _Value(f"'{param.fqn}' in full", checksum(param.full), groups)
            state.engine.release_unsharded([unit.index], False)


def _states(state: ShardState, optimizers: Sequence[Optimizer]) -> Iterator[_Value]:
    known = {
        id(param.object): (unit, index, param)
        for unit in state.units
        for index, param in enumerate(unit.params)
    }
    for optimizer in optimizers:
        for given in params_of(optimizer):
            if id(given) not in known:
                continue
            unit, index, param = known[id(given)]
            for key, value in sorted(optimizer.state.get(given, {}).items()):
                name = f"'{param.fqn}': {key}"
                if isinstance(value, Tensor) and key not in NUMBERS:
                    local = elements_of(value, given)
                    written = state.engine.param_version(unit.index, index)
                    version = (written, local._version, local.data_ptr())
                    yield _Value(name, checksum(local), _holders(state, unit), version)
                else:
                    yield _Value(name, _number_of(value), state.meshes[unit.mesh].groups)


def _options(state: ShardState, optimizers: Sequence[Optimizer]) -> Iterator[_Value]:
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            name = f"options of group {place} of optimizer {number}"
            yield _Value(name, _number_of(options_of(group)), state.ranks.groups)


def _number_of(value: Any) -> Tensor:
    """Of plain values and tensors; others, such as functions, look different on each rank."""
    found = [
        each.tolist() if isinstance(each, Tensor) else each
        for each in tree_leaves(value)
        if isinstance(each, Tensor | bool | int | float | complex | str | None)
    ]
    return torch.tensor(crc32(repr(found).encode()), device="cpu")


def _changed(state: ShardState, values: list[_Value]) -> tuple[list[tuple[str, int]], int]:
    """Names, with this rank, of what has other bits than before; how many were looked at."""
    before: _Seen = state.kept.get("verified", {})
    now = {each.name: (each.version, int(each.number)) for each in values if each.version}
    same = [name for name, (version, _) in now.items() if before.get(name, ((),))[0] == version]
    state.kept["verified"] = now
    own = _own_number(state)
    return [(name, own) for name in same if before[name][1] != now[name][1]], len(same)


def _own_number(state: ShardState) -> int:
    """In the default group."""
    members = state.ranks.members
    return members[state.ranks.rank] if members else 0


def _compare(state: ShardState, values: list[_Value]) -> tuple[list[Difference], int]:
    """Values that the ranks of their groups hold in other ways; how many have such ranks."""
    by_groups: dict[tuple[Any, ...], list[_Value]] = {}
    for value in values:
        if value.holders:
            by_groups.setdefault(tuple(value.holders), []).append(value)
    found = []
    for groups, same in by_groups.items():
        numbers = torch.stack([value.number.to(state.device) for value in same])
        if places := differing(groups, numbers):
            own = (_own_number(state), [int(numbers[place]) for place in places])
            table = gather_objects(groups, [own], state.device)
            for i, place in enumerate(places):
                classes = ranks_by_value((rank, row[i]) for rank, row in table)
                ordered = sorted(map(tuple, classes), key=lambda ranks: -len(ranks))
                found.append(Difference(same[place].name, tuple(ordered)))
    return found, sum(map(len, by_groups.values()))
