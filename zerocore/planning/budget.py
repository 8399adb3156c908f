"""Refuses a model whose plan exceeds a memory budget, and names the changes that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zerocore.common.quantities import format_nbytes
from zerocore.model.config import ShardConfig
from zerocore.model.ranks import Ranks
from zerocore.model.units import UnitPlanned
from zerocore.planning.planner import MAX_RANKS, Planner, Precision, fewer_replicas, make_planner

NUM_CHANGES = 3


@dataclass(frozen=True)
class Change:
    """A change of how a model is sharded.

    Attributes:
        text: what to do.
        nbytes: planned bytes with it.
    """

    text: str
    nbytes: int


@dataclass(frozen=True)
class _Candidate:
    """A plan's inputs; ``nbytes`` are what it takes on rank 0."""

    planner: Planner
    config: ShardConfig
    world_size: int
    num_replicas: int
    exchanges: bool

    @property
    def mesh(self) -> str:
        """Replicas by shards."""
        return f"({self.num_replicas}, {self.world_size // self.num_replicas}) mesh"

    @property
    def ranks(self) -> str:
        """How many ranks, and of several replicas the mesh."""
        in_mesh = f" in a {self.mesh}" if self.num_replicas > 1 else ""
        return f"{self.world_size} ranks{in_mesh}"

    @property
    def nbytes(self) -> int:
        memory = self.planner.memory(
            self.config.stage,
            self.world_size,
            self.num_replicas,
            prefetch=self.config.prefetch,
            exchanges=self.exchanges,
        )
        return memory.total


def check_budget(
    model: nn.Module,
    planned: list[UnitPlanned],
    config: ShardConfig,
    ranks: Ranks,
    budget: int,
) -> None:
    """Raises ValueError if what zerocore and Adam would allocate on rank 0 exceeds ``budget``.

    Parameters, gradients, two optimizer states and the bucket pool, bytes; activations are not
    known before a forward and not counted. Rank 0 owns the most, so all ranks decide alike.
    """
    planner = make_planner(model, planned, Precision(mixed=config.mixed_precision))
    candidate = _Candidate(planner, config, ranks.world_size, ranks.num_replicas, ranks.exchanges)
    needed = candidate.nbytes
    if needed <= budget:
        return
    narrow = make_planner(model, planned, Precision(torch.bfloat16))
    fitting = [change for change in _changes(candidate, narrow, budget) if change.nbytes <= budget][
        :NUM_CHANGES
    ]
    lines = [
        f"memory_budget: stage {config.stage} on {candidate.ranks} needs {format_nbytes(needed)} "
        f"({needed:,} bytes) for parameters, gradients, the states of Adam and the bucket pool; "
        f"the budget is {format_nbytes(budget)} ({budget:,} bytes)."
    ]
    if fitting:
        lines.append("The cheapest changes that would fit:")
    else:
        lines.append("No change of stage, prefetch, dtype or ranks would fit; use smaller units.")
    lines += [
        f"- {change.text}: saves {format_nbytes(needed - change.nbytes)} "
        f"({needed - change.nbytes:,} bytes)"
        for change in fitting
    ]
    raise ValueError("\n".join(lines))


def _changes(now: _Candidate, narrow: Planner, budget: int) -> Iterator[Change]:
    """Changes, cheapest first: no extra traffic, then more, then precision, then ranks."""
    stage, prefetch = now.config.stage, now.config.prefetch

    def at(text: str, **options: Any) -> Change:
        return Change(text, replace(now, config=replace(now.config, **options)).nbytes)

    for higher in range(stage + 1, 3):
        yield at(f"stage={higher} (communicates as much)", stage=higher)
    if prefetch > 0 and stage == 3:
        yield at("prefetch=0 (gathers are not hidden)", prefetch=0)
    if stage < 3:
        yield at("stage=3 (communicates half as much again)", stage=3)
        if prefetch > 0:
            yield at("stage=3, prefetch=0 (nor are gathers hidden)", stage=3, prefetch=0)
    fewer = _fewer_replicas(now, budget)
    if fewer is not None:
        yield Change(f"group= a {fewer.mesh} (gathers reach further)", fewer.nbytes)
    in_bf16 = replace(now, planner=narrow)
    yield Change("parameters in bfloat16, model.bfloat16() before shard", in_bf16.nbytes)
    if stage < 3:
        highest = replace(in_bf16, config=replace(now.config, stage=3))
        yield Change("stage=3 with parameters in bfloat16", highest.nbytes)
    for wanted in sorted({stage, 3}):
        more = _more_ranks(replace(now, config=replace(now.config, stage=wanted)), budget)
        if more is not None:
            text = "" if wanted == stage else f" at stage={wanted}"
            yield Change(f"{more.ranks}{text}", more.nbytes)


def _fewer_replicas(candidate: _Candidate, budget: int) -> _Candidate | None:
    """The most replicas of the same ranks that fit; None if there are none."""
    numbers = fewer_replicas(candidate.world_size, candidate.num_replicas)
    shapes = (replace(candidate, num_replicas=number) for number in numbers)
    return next((shape for shape in shapes if shape.nbytes <= budget), None)


def _more_ranks(candidate: _Candidate, budget: int) -> _Candidate | None:
    """The first doubling of the ranks that fits, None if none up to :data:`MAX_RANKS`."""
    if candidate.config.stage == 0:
        return None
    while candidate.world_size <= MAX_RANKS // 2:
        candidate = replace(candidate, world_size=2 * candidate.world_size)
        if candidate.nbytes <= budget:
            return candidate
    return None
