"""Other ways to shard a model that take less memory; the only place that looks for them.

A model whose plan exceeds a memory budget is refused with those that would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from zerocore.common.quantities import format_nbytes
from zerocore.model.ranks import Ranks
from zerocore.model.units import UnitPlanned
from zerocore.options.config import ShardConfig
from zerocore.options.offload import Offload
from zerocore.options.stages import HIGHEST_STAGE, placements_of, stages_above
from zerocore.planning.division import Division, parts_of
from zerocore.planning.offloading import call_of, offloads_at
from zerocore.planning.planner import Planner, Precision, make_planner

MAX_RANKS = 65536  # where a search for enough ranks gives up
Fits = Callable[[int], bool]
"""Whether so many bytes are few enough."""


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
class Candidate:
    """A model divided in one way."""

    planner: Planner
    division: Division

    @property
    def nbytes(self) -> int:
        """Bytes that it takes from the device's allocator, without activations."""
        return self.planner.memory(self.division).reserved

    def at(self, **options: Any) -> Candidate:
        """The same model with other attributes of :class:`Division`; parts stay as many."""
        old = self.division
        more = options.get("world_size", old.world_size) // old.world_size
        parts = tuple((shards * more, *rest) for shards, *rest in old.parts)
        return replace(self, division=replace(old, **{"parts": parts, **options}))


def changes(now: Candidate, fits: Fits, narrow: Planner | None = None) -> Iterator[Change]:
    """Changes, cheapest first: no extra traffic, then more, precision, ranks, the host's memory.

    Args:
        now: how the model is sharded.
        fits: how few bytes a search for other ranks stops at.
        narrow: plans the model with parameters in bfloat16; without it that is not proposed.
    """
    rows = now.planner.by_rows
    if not rows:
        yield from _higher_stages(now)
    elif any(unit.stays for unit in now.planner.units):
        units = tuple(replace(unit, stays=False) for unit in now.planner.units)
        resharded = replace(now, planner=replace(now.planner, units=units))
        text = "reshard_after_forward=True for every module (the backward gathers them again)"
        yield Change(text, resharded.nbytes)
    fewer = with_fewer_replicas(now, fits)
    if fewer is not None:
        name = "mesh" if rows else "group"
        yield Change(f"{name}= a {fewer.division.mesh} (gathers reach further)", fewer.nbytes)
    if narrow is not None:
        narrowed = replace(now, planner=narrow)
        yield Change("parameters in bfloat16, model.bfloat16() before shard", narrowed.nbytes)
        if stages_above(now.division.stage):
            nbytes = narrowed.at(stage=HIGHEST_STAGE).nbytes
            yield Change(f"stage={HIGHEST_STAGE} with parameters in bfloat16", nbytes)
    for stage in sorted({now.division.stage, HIGHEST_STAGE}):
        more = with_more_ranks(now.at(stage=stage), fits)
        if more is not None:
            text = "" if stage == now.division.stage else f" at stage={stage}"
            yield Change(f"{more.division.ranks}{text}", more.nbytes)
    if now.division.offload is None and not rows:
        away = now.at(offload=Offload(states="cpu"))
        yield Change("offload=zerocore.Offload(states='cpu') (updates on the host)", away.nbytes)
        *_, everything = offloads_at(HIGHEST_STAGE, "disk")
        away = now.at(stage=HIGHEST_STAGE, offload=everything)
        text = f"stage={HIGHEST_STAGE}, {call_of(everything)} (each step reads and writes a file)"
        yield Change(text, away.nbytes)


def _higher_stages(now: Candidate) -> Iterator[Change]:
    higher = stages_above(now.division.stage)
    for stage in higher:
        traffic = "half as much again" if placements_of(stage).parameters else "as much"
        yield Change(f"stage={stage} (communicates {traffic})", now.at(stage=stage).nbytes)
    if now.division.communication.prefetch == 0:
        return
    communication = replace(now.division.communication, prefetch=0)
    alone, text = now.at(communication=communication), call_of(communication, always="prefetch")
    if higher:
        nbytes = alone.at(stage=HIGHEST_STAGE).nbytes
        yield Change(f"stage={HIGHEST_STAGE}, {text} (nor are gathers hidden)", nbytes)
    else:
        yield Change(f"{text} (gathers are not hidden)", alone.nbytes)


def with_fewer_replicas(now: Candidate, fits: Fits) -> Candidate | None:
    """The most replicas of the same ranks, fewer than now, that fit; None if there are none."""
    world_size, num_replicas = now.division.world_size, now.division.num_replicas
    numbers = (fewer for fewer in range(num_replicas - 1, 0, -1) if world_size % fewer == 0)
    shapes = (now.at(num_replicas=number) for number in numbers)
    return next((shape for shape in shapes if fits(shape.nbytes)), None)


def with_more_ranks(now: Candidate, fits: Fits) -> Candidate | None:
    """The first doubling of the ranks that fits, None if none up to :data:`MAX_RANKS`."""
    if not any(now.division.placements):
        return None
    while now.division.world_size <= MAX_RANKS // 2:
        now = now.at(world_size=2 * now.division.world_size)
        if fits(now.nbytes):
            return now
    return None


NUM_CHANGES = 3


def check_budget(
    model: nn.Module,
    planned: list[UnitPlanned],
    config: ShardConfig,
    meshes: Sequence[Ranks],
    budget: int,
) -> None:
    """Raises ValueError if what zerocore and Adam would allocate on rank 0 exceeds ``budget``.

    Parameters, gradients, two optimizer states and the bucket pool, bytes; activations are not
    known before a forward and not counted. Rank 0 owns the most, so all ranks decide alike.
    """
    ranks = meshes[0]
    planner = make_planner(model, planned, Precision(mixed=config.mixed_precision))
    division = Division(
        config.stage,
        ranks.world_size,
        ranks.num_replicas,
        config.communication,
        backend=ranks.backend,
        offload=config.offload,
        parts=parts_of(meshes[1:]),
    )
    candidate = Candidate(planner, division)
    needed = candidate.nbytes
    if needed <= budget:
        return
    narrow = make_planner(model, planned, Precision(torch.bfloat16))
    less = changes(candidate, lambda nbytes: nbytes <= budget, narrow)
    fitting = list(islice((change for change in less if change.nbytes <= budget), NUM_CHANGES))
    lines = [
        f"memory_budget: stage {config.stage} on {division.ranks} needs {format_nbytes(needed)} "
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
