"""Searches for other ways to shard a model: stages, replicas, ranks, dtypes and offloads.

The error for an exceeded memory budget names the candidates that would fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import torch
from torch import nn

from zerocore.common.memory_bytes import MemoryBytes
from zerocore.common.quantities import format_nbytes
from zerocore.model.ranks import Ranks
from zerocore.model.units import Unit
from zerocore.options.config import Communication, ShardConfig
from zerocore.options.offload import FIRST_STAGE, Offload
from zerocore.options.stages import HIGHEST_STAGE, placements_of, stages_above
from zerocore.planning.division import Division, parts_of
from zerocore.planning.planner import Planner, make_planner

MAX_RANKS = 65536  # the search for enough ranks ends here
NUM_CHANGES = 3  # the error names so many candidates


@dataclass(frozen=True)
class Candidate:
    """One way to shard a model.

    Attributes:
        planner: plans the model.
        division: how the state is divided over ranks.
        text: the change that leads to it.
        search: a common name of similar candidates, if one of them that fits is enough.
    """

    planner: Planner
    division: Division
    text: str = ""
    search: str = ""

    @cached_property
    def memory(self) -> MemoryBytes:
        """Bytes without activations."""
        return self.planner.memory(self.division)

    @property
    def nbytes(self) -> int:
        """Bytes to reserve on the device, without activations."""
        return self.memory.reserved

    def at(self, text: str = "", **options: Any) -> Candidate:
        """Returns a candidate with other attributes of :class:`Division` and as many parts."""
        old = self.division
        more = options.get("world_size", old.world_size) // old.world_size
        parts = tuple((shards * more, *rest) for shards, *rest in old.parts)
        division = replace(old, **{"parts": parts, **options})
        return replace(self, division=division, text=text)


def candidates(now: Candidate, narrow: Planner | None = None) -> Iterator[Candidate]:
    """Yields other ways to shard: stages, prefetch, replicas, then bfloat16, ranks and offloads.

    Args:
        now: how the model is sharded.
        narrow: plans the model in bfloat16; None skips that candidate.
    """
    rows, is_highest = now.planner.by_rows, not stages_above(now.division.stage)
    if not rows:
        yield from _stages(now)
    elif any(unit.stays for unit in now.planner.units):
        units = tuple(replace(unit, stays=False) for unit in now.planner.units)
        text = "reshard_after_forward=True for every module (the backward gathers them again)"
        yield replace(now, planner=replace(now.planner, units=units), text=text)
    yield from _fewer_replicas(now)
    if narrow is not None:
        text = "parameters in bfloat16"
        narrowed = replace(now, planner=narrow, text=f"{text}, model.bfloat16() before shard")
        yield narrowed
        if not is_highest:
            yield narrowed.at(f"stage={HIGHEST_STAGE} with {text}", stage=HIGHEST_STAGE)
    yield from _more_ranks(now)
    if not is_highest:
        yield from _more_ranks(now.at(stage=HIGHEST_STAGE), f" at stage={HIGHEST_STAGE}")
    if now.division.offload is None and not rows:
        yield from _offloads(now, "cpu", "updates on the host")
        yield from _offloads(now, "disk", "each step reads and writes a file", "...")


def _stages(now: Candidate) -> Iterator[Candidate]:
    higher = stages_above(now.division.stage)
    for stage in higher:
        traffic = "half as much again" if placements_of(stage).parameters else "as much"
        yield now.at(f"stage={stage} (communicates {traffic})", stage=stage)
    if now.division.communication.prefetch == 0:
        return
    alone = replace(now.division.communication, prefetch=0)
    text = call_of(alone, always="prefetch")
    if higher:
        text = f"stage={HIGHEST_STAGE}, {text} (nor are gathers hidden)"
        yield now.at(text, stage=HIGHEST_STAGE, communication=alone)
    else:
        yield now.at(f"{text} (gathers are not hidden)", communication=alone)


def _fewer_replicas(now: Candidate) -> Iterator[Candidate]:
    """Yields divisions of the same ranks into fewer replicas, the most replicas first."""
    name = "mesh" if now.planner.by_rows else "group"
    for number in range(now.division.num_replicas - 1, 0, -1):
        if now.division.world_size % number == 0:
            fewer = now.at(num_replicas=number)
            text = f"{name}= a {fewer.division.mesh} (gathers reach further)"
            yield replace(fewer, text=text, search="replicas")


def _more_ranks(now: Candidate, where: str = "") -> Iterator[Candidate]:
    """Yields doublings of the ranks up to :data:`MAX_RANKS`, if ranks share any state."""
    while any(now.division.placements) and now.division.world_size <= MAX_RANKS // 2:
        now = now.at(world_size=2 * now.division.world_size)
        yield replace(now, text=f"{now.division.ranks}{where}", search=f"ranks{where}")


def _offloads(
    now: Candidate, place: str, remark: str, path: str | None = None
) -> Iterator[Candidate]:
    """Yields offloads to ``place`` (``"cpu"`` or ``"disk"``) for the stage of ``now`` and those
    above it, each stage's least first; gradients always go to the host."""
    for stage in (now.division.stage, *stages_above(now.division.stage)):
        places: dict[str, Any] = {"path": path}
        for part, where in (("states", place), ("gradients", "cpu"), ("parameters", place)):
            if stage >= FIRST_STAGE[part]:
                places[part] = where
                offload = Offload(**places)
                at = "" if stage == now.division.stage else f"stage={stage}, "
                way = now.at(f"{at}{call_of(offload)} ({remark})", stage=stage, offload=offload)
                yield replace(way, search="offload")


def call_of(options: Offload | Communication, always: str = "states") -> str:
    """Returns an argument of ``shard`` as text: options other than the default, and ``always``."""
    kind = type(options)
    default, parts = kind(), []
    for name in (field.name for field in fields(options)):
        value = getattr(options, name)
        by_all = name == "regather" and value == 1  # plans have the number of ranks here
        if (value != getattr(default, name) and not by_all) or name == always:
            parts.append(f"{name}={value!r}")
    return f"{kind.__name__.lower()}=zerocore.{kind.__name__}({', '.join(parts)})"


def fitting(choices: Iterator[Candidate], fits: Callable[[int], bool]) -> Iterator[Candidate]:
    """Yields the first candidate of each search that fits, and the last offload that fits."""
    for search, group in groupby(choices, lambda candidate: candidate.search or candidate.text):
        enough = (candidate for candidate in group if fits(candidate.nbytes))
        yield from islice(enough, 1)
        if search == "offload":
            yield from deque(enough, maxlen=1)


def check_budget(
    model: nn.Module,
    planned: list[Unit],
    config: ShardConfig,
    meshes: Sequence[Ranks],
    budget: int,
) -> None:
    """Raises ValueError if zerocore and Adam would allocate more than ``budget`` bytes on rank 0.

    Counts parameters, gradients, two optimizer states and the bucket pool, but no activations,
    which are unknown before a forward. Rank 0 owns the most, so all ranks decide alike.
    """
    ranks = meshes[0]
    division = Division(
        config.stage,
        ranks.world_size,
        ranks.num_replicas,
        config.communication,
        backend=ranks.backend,
        offload=config.offload,
        parts=parts_of(meshes[1:]),
    )
    now = Candidate(make_planner(model, planned, mixed=config.mixed_precision), division)
    needed = now.nbytes
    if needed <= budget:
        return
    narrow = make_planner(model, planned, dtype=torch.bfloat16)
    changes = fitting(candidates(now, narrow), lambda nbytes: nbytes <= budget)
    lines = [
        f"- {change.text}: saves {format_nbytes(needed - change.nbytes)} "
        f"({needed - change.nbytes:,} bytes)"
        for change in islice(changes, NUM_CHANGES)
    ]
    message = (
        f"memory_budget: stage {config.stage} on {division.ranks} needs {format_nbytes(needed)} "
        f"({needed:,} bytes) for parameters, gradients, the states of Adam and the bucket pool; "
        f"the budget is {format_nbytes(budget)} ({budget:,} bytes)."
    )
    if lines:
        remedy = "The cheapest changes that would fit:"
    else:
        remedy = "No change of stage, prefetch, dtype or ranks would fit; use smaller units."
    raise ValueError("\n".join([message, remedy, *lines]))
