"""DTensors that tensor parallelism has made of a model's parameters, for ``shard``.

The engine knows this rank's local tensors. One that is cut is a part of a larger tensor, as an
expert is; one that all ranks of the mesh have is sharded within data parallelism, and its gradients
are summed over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from zerocore.common.agreement import gather_objects
from zerocore.model.ranks import Ranks, members_of, sibling_of
from zerocore.model.units import ParamChoice, UnitPlanned, split_units


@dataclass(frozen=True)
class Cut:
    """How a parameter is spread over the ranks of a mesh.

    Attributes:
        group: these ranks.
        dim: along which each has a part; None where each has all of it.
    """

    group: dist.ProcessGroup
    dim: int | None


def cut_of(choice: ParamChoice) -> Cut | None:
    """How a DTensor is spread; None for a plain parameter, and over one rank.

    Raises:
        ValueError: a mesh of several dimensions, or a placement that is neither Shard nor
            Replicate.
    """
    spec = choice.spec
    if spec is None or spec.mesh.size() == 1:
        return None
    placement: Any = spec.placements[0]
    if spec.mesh.ndim != 1:
        raise ValueError(
            f"parameter '{choice.fqns[0]}' is a DTensor on the {spec.mesh.ndim}-D {spec.mesh}; "
            "zerocore.shard takes DTensors of tensor parallelism on a 1-D mesh, and group= for "
            "data parallelism. Use zerocore.fsdp for others"
        )
    # A strided shard is a subclass of Shard in some versions of torch.
    if not placement.is_replicate() and type(placement).__name__ != "Shard":
        raise ValueError(
            f"parameter '{choice.fqns[0]}' is a DTensor with {placement}; expected Shard(dim) or "
            "Replicate(). Call zerocore.shard after parallelize_module, before anything else that "
            "shards"
        )
    return Cut(spec.mesh.get_group(), None if placement.is_replicate() else placement.dim)


def find_tensor_ranks(
    planned: Sequence[UnitPlanned], ranks: Ranks, has_parts: bool
) -> dist.ProcessGroup | None:
    """The ranks of tensor parallelism, which hold other parts of the model; None without.

    Args:
        ranks: of data parallelism.
        has_parts: ``groups=`` names parameters with ranks of their own.

    Raises:
        ValueError: DTensors on several meshes, or on ranks of ``ranks``; names a parameter.
    """
    found: dict[tuple[int, ...], tuple[str, dist.ProcessGroup]] = {}
    for unit in planned:
        for choice in unit.params:
            cut = cut_of(choice)
            if cut is not None and unit.mesh == 0:
                members = tuple(dist.get_process_group_ranks(cut.group))
                found.setdefault(members, (choice.fqns[0], cut.group))
    if not found:
        return None
    if len(found) > 1:
        texts = " and ".join(f"'{name}' over ranks {list(key)}" for key, (name, _) in found.items())
        raise ValueError(f"DTensors are on several meshes: {texts}; use zerocore.fsdp")
    name, group = next(iter(found.values()))
    others = members_of(group)
    if len(both := others & set(ranks.members)) > 1:
        raise ValueError(
            f"parameter '{name}' is a DTensor over ranks {sorted(others)}, of which "
            f"{sorted(both)} are in group=, too; pass the ranks of data parallelism, such as "
            "group=mesh['dp']"
        )
    if has_parts:
        raise ValueError(
            f"parameter '{name}' is a DTensor of tensor parallelism, and groups= names ranks of "
            "experts; zerocore.shard takes one of the two, zerocore.fsdp takes both"
        )
    return group


def with_tensor_ranks(ranks: Ranks, group: dist.ProcessGroup, device: torch.device) -> Ranks:
    """The ranks of data and of tensor parallelism, the latter as more replicas; collective."""
    members, num = ranks.members, ranks.num_shards
    own = [members[first : first + num] for first in range(0, len(members), num)]
    rows = list(chain.from_iterable(gather_objects([group], [own], device)))
    rows.sort(key=lambda row: row[ranks.shard_rank])
    replicas = group
    if ranks.replicas is not None:
        column = [row[ranks.shard_rank] for row in rows]
        replicas = sibling_of(group, device, column, "zerocore_replicas")
    return replace(ranks, replicas=replicas, members=tuple(chain.from_iterable(rows)))


def split_replicated(planned: Sequence[UnitPlanned], mesh: int) -> list[UnitPlanned]:
    """The units with DTensors that all ranks of their mesh have as units of their own, on ``mesh``,
    at the same calls."""

    def mesh_of(choice: ParamChoice, now: int) -> int:
        cut = cut_of(choice)
        return mesh if now == 0 and cut is not None and cut.dim is None else now

    return split_units(planned, mesh_of, lambda _: "replicated")
