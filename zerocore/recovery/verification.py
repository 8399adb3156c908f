"""Finds silent corruption: replicas that differ, and memory that changed without a write."""

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
from zerocore.model.state import ShardState, ready_state_of
from zerocore.model.units import Unit
from zerocore.tensor.rows import elements_of


@dataclass(frozen=True)
class Difference:
    """A value that should be equal on several ranks and is not.

    Attributes:
        name: the parameter, with ``": "`` and the optimizer's state if it is one, or the options.
        ranks: the ranks, in the default group, by the value they hold; most ranks first.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        classes = "; ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in self.ranks)
        return f"{self.name} is not the same on {classes}"


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`; ``differing`` and ``changed`` are the same on all ranks.

    Attributes:
        num_compared: this rank's values that other ranks hold, too.
        num_remembered: this rank's values that nothing has written since the last call.
        differing: values that differ between ranks that should hold the same.
        changed: name and rank of values whose memory changed although nothing wrote to it.
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
        lines += [f"{self.num_remembered} values compared with the last call"]
        lines += [str(difference) for difference in self.differing]
        lines += [f"{name} changed on rank {rank}: nothing wrote it" for name, rank in self.changed]
        return "\n".join(lines)


_Seen = dict[str, tuple[tuple[int, ...], int]]
"""Versions and checksums by name."""


@dataclass(frozen=True)
class _Value:
    """A value of this rank and its checksum."""

    name: str
    number: Tensor  # checksum, int64
    holders: Groups  # groups of ranks that hold the same value
    version: tuple[int, ...] | None = None  # changes with each write; None if unknown


@torch.no_grad()
def verify(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None
) -> Verification:
    """Compares checksums of weights and optimizer states, for corruption that nothing reports.

    Replicas (stage 0, hybrid sharding, parameters at stages 1 and 2) should hold the same values;
    options and step counts of optimizers should be equal on all ranks. If nothing has written a
    value since the last call, its checksum must be the same: call it after a step and before the
    next to see whether memory kept its bits. Buffers, which may differ between ranks, are left out.
    Reads all of the state once; collective, between steps.

    Args:
        model: a sharded model.
        optimizer: the optimizer of its parameters, or several.

    Raises:
        ValueError, TypeError: as :class:`Checkpoints`.
    """
    state, optimizers = ready_state_of(model), optimizers_of(optimizer)
    with operation("verify"):
        values = [*_weights(state), *_states(state, optimizers), *_options(state, optimizers)]
        changed, num_remembered = _changed(state, values)
        differing_values, num_compared = _compare(state, values)
        by_rank = gather_objects(state.ranks.groups, [(changed, differing_values)], state.device)
    return Verification(
        num_compared,
        num_remembered,
        tuple(dict.fromkeys(chain.from_iterable(part for _, part in by_rank))),
        tuple(chain.from_iterable(part for part, _ in by_rank)),
    )


def _holders(state: ShardState, unit: Unit) -> Groups:
    """Returns groups of ranks with the same elements."""
    ranks = state.meshes[unit.mesh]
    if state.engine.layout(unit.index).num_shards == 1:
        return ranks.groups
    return () if ranks.replicas is None else (ranks.replicas,)


def _weights(state: ShardState) -> Iterator[_Value]:
    """Yields shards, and the full parameters that stages 1 and 2 keep on each rank."""
    is_kept = state.config.stage in (1, 2) and not state.config.placements.parameters
    for unit in state.units:
        for index, param in enumerate(unit.params):
            number = checksum(elements_of(param.shard, param.shard))
            version = (state.engine.param_version(unit.index, index),)
            yield _Value(f"'{param.fqn}'", number, _holders(state, unit), version)
        if is_kept:
            state.engine.hold_unsharded([unit.index])  # gathers changed shards first
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
        for held in params_of(optimizer):
            if id(held) not in known:
                continue
            unit, index, param = known[id(held)]
            for key, value in sorted(optimizer.state.get(held, {}).items()):
                name = f"'{param.fqn}': {key}"
                if isinstance(value, Tensor) and key not in NUMBERS:
                    local = elements_of(value, held)
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
    """Returns a checksum of tensors and plain values; skips others, whose repr ranks differ in."""
    plain = [
        leaf.tolist() if isinstance(leaf, Tensor) else leaf
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor | bool | int | float | complex | str | None)
    ]
    return torch.tensor(crc32(repr(plain).encode()), device="cpu")


def _changed(state: ShardState, values: list[_Value]) -> tuple[list[tuple[str, int]], int]:
    """Returns values that changed without a write, with this rank, and the number compared."""
    before: _Seen = state.kept.get("verified", {})
    now = {value.name: (value.version, int(value.number)) for value in values if value.version}
    same = [name for name, (version, _) in now.items() if before.get(name, ((),))[0] == version]
    state.kept["verified"] = now
    rank = _own_number(state)
    return [(name, rank) for name in same if before[name][1] != now[name][1]], len(same)


def _own_number(state: ShardState) -> int:
    """Returns this rank in the default group."""
    members = state.ranks.members
    return members[state.ranks.rank] if members else 0


def _compare(state: ShardState, values: list[_Value]) -> tuple[list[Difference], int]:
    """Returns values that differ within their groups, and the number of values compared."""
    by_groups: dict[tuple[Any, ...], list[_Value]] = {}
    for value in values:
        if value.holders:
            by_groups.setdefault(tuple(value.holders), []).append(value)
    differences = []
    for groups, same in by_groups.items():
        numbers = torch.stack([value.number.to(state.device) for value in same])
        if places := differing(groups, numbers):
            own_row = (_own_number(state), [int(numbers[place]) for place in places])
            table = gather_objects(groups, [own_row], state.device)
            for i, place in enumerate(places):
                classes = ranks_by_value((rank, row[i]) for rank, row in table)
                ordered = sorted(map(tuple, classes), key=lambda ranks: -len(ranks))
                differences.append(Difference(same[place].name, tuple(ordered)))
    return differences, sum(map(len, by_groups.values()))
