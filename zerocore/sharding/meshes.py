"""Puts parameters on the meshes that share them: experts, and DTensors of tensor parallelism.

The engine shards this rank's local tensor of a DTensor. With a ``Shard`` placement it is a part of
a larger tensor, as an expert is. With ``Replicate`` it is sharded over the data-parallel ranks, and
its gradients are summed over these and the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerocore.common.agreement import gather_objects
from zerocore.layout.place import PartOf, Place
from zerocore.layout.save_ownership import SavedRanges
from zerocore.model.parameter_meshes import ModelPart, PartRanges
from zerocore.model.ranks import Ranks, group_of, members_of, ranks_of, sibling_of
from zerocore.model.state import ShardState
from zerocore.model.units import Param, Unit
from zerocore.options.parameter_mesh import ParameterMesh
from zerocore.sharding.builder import Sharding


def on_meshes(sharding: Sharding, groups: Any) -> Sharding:
    """Adds the meshes of ``groups=`` of :func:`zerocore.shard` and of DTensors, and puts each unit
    on one mesh; communicates nothing."""
    ranks = sharding.ranks
    parts = find_parts(groups, ranks)
    units = assign_parts(sharding.units, [part.pattern for part in parts])
    tensor_ranks = find_tensor_ranks(units, ranks, bool(parts))
    if tensor_ranks is not None:
        units = split_replicated(units, len(parts) + 1)
    for unit in units:
        for param in unit.params:
            param.larger = _larger_tensor(param, unit.mesh, parts)
    meshes = (ranks, *(part.ranks for part in parts))
    return replace(sharding, units=units, meshes=meshes, parts=parts, tensor_ranks=tensor_ranks)


class TensorCut(NamedTuple):
    """How a parameter is spread over the ranks of a mesh."""

    group: dist.ProcessGroup  # the ranks
    dim: int | None  # each rank has a part along it; None if each has all of it


def cut_of(param: Param) -> TensorCut | None:
    """Returns how a DTensor is spread; None for a plain parameter or one rank. Raises ValueError
    for a mesh of several dimensions, or a placement other than Shard and Replicate."""
    spec = param.dtensor_spec
    if spec is None or spec.mesh.size() == 1:
        return None
    placement: Any = spec.placements[0]
    if spec.mesh.ndim != 1:
        raise ValueError(
            f"parameter '{param.fqn}' is a DTensor on the {spec.mesh.ndim}-D {spec.mesh}; "
            "zerocore.shard takes DTensors of tensor parallelism on a 1-D mesh, and group= for "
            "data parallelism. Use zerocore.fsdp for other meshes"
        )
    # A strided shard is a subclass of Shard in some versions of torch.
    if not placement.is_replicate() and type(placement).__name__ != "Shard":
        raise ValueError(
            f"parameter '{param.fqn}' is a DTensor with {placement}; expected Shard(dim) or "
            "Replicate(). Call zerocore.shard after parallelize_module, before anything else that "
            "shards"
        )
    return TensorCut(spec.mesh.get_group(), None if placement.is_replicate() else placement.dim)


def find_tensor_ranks(
    planned: Sequence[Unit], ranks: Ranks, has_parts: bool
) -> dist.ProcessGroup | None:
    """Returns the tensor-parallel ranks, which hold other parts of the model; None without any.
    ``ranks`` are the data-parallel ranks; ``has_parts`` says that ``groups=`` was passed. Raises
    ValueError, with a parameter's name, for DTensors on several meshes or on ``ranks``."""
    by_members: dict[tuple[int, ...], tuple[str, dist.ProcessGroup]] = {}
    for unit in planned:
        for param in unit.params:
            cut = cut_of(param)
            if cut is not None and unit.mesh == 0:
                members = tuple(dist.get_process_group_ranks(cut.group))
                by_members.setdefault(members, (param.fqn, cut.group))
    if not by_members:
        return None
    if len(by_members) > 1:
        meshes = (f"'{name}' over ranks {list(key)}" for key, (name, _) in by_members.items())
        texts = " and ".join(meshes)
        raise ValueError(f"DTensors are on several meshes: {texts}; use zerocore.fsdp")
    name, group = next(iter(by_members.values()))
    tensor_ranks = members_of(group)
    if len(both := tensor_ranks & set(ranks.members)) > 1:
        raise ValueError(
            f"parameter '{name}' is a DTensor over ranks {sorted(tensor_ranks)}, of which "
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
    """Adds the tensor-parallel ranks to the data-parallel ``ranks``, as replicas; collective."""
    members, num = ranks.members, ranks.num_shards
    replica_rows = [members[first : first + num] for first in range(0, len(members), num)]
    rows = list(chain.from_iterable(gather_objects([group], [replica_rows], device)))
    rows.sort(key=lambda row: row[ranks.shard_rank])
    replicas = group
    if ranks.replicas is not None:
        column = [row[ranks.shard_rank] for row in rows]
        replicas = sibling_of(group, device, column, "zerocore_replicas")
    return replace(ranks, replicas=replicas, members=tuple(chain.from_iterable(rows)))


def split_replicated(planned: Sequence[Unit], mesh: int) -> list[Unit]:
    """Puts replicated DTensors into units of their own, on ``mesh``, at the same calls."""

    def mesh_of(param: Param, now: int) -> int:
        cut = cut_of(param)
        return mesh if now == 0 and cut is not None and cut.dim is None else now

    return split_units(planned, mesh_of, lambda _: "replicated")


def split_units(
    planned: Sequence[Unit],
    mesh_of: Callable[[Param, int], int],
    name_of: Callable[[int], str],
) -> list[Unit]:
    """Splits units with parameters on several meshes, at the same calls. ``mesh_of`` returns a
    parameter's mesh, given its unit's mesh so far; ``name_of`` names a mesh in split units."""
    units = []
    for unit in planned:
        by_mesh: dict[int, list[Param]] = {unit.mesh: []} if unit.several else {}
        for param in unit.params:
            by_mesh.setdefault(mesh_of(param, unit.mesh), []).append(param)
        for mesh, params in sorted(by_mesh.items()):
            is_split = len(by_mesh) > 1 and mesh != unit.mesh
            name = f"{unit.name} ({name_of(mesh)})" if is_split else unit.name
            several = unit.several if mesh == unit.mesh else []
            units.append(replace(unit, name=name, params=params, several=several, mesh=mesh))
    return units


def find_parts(groups: Any, model_ranks: Ranks) -> tuple[ModelPart, ...]:
    """Returns the parts that ``groups=`` of :func:`zerocore.shard` names; communicates nothing.
    Raises TypeError if it does not map patterns to meshes, ValueError for ranks outside the model
    or meshes that overlap."""
    if groups is None:
        return ()
    if not isinstance(groups, Mapping):
        raise TypeError(
            "groups: expected a dict such as {'*.experts.*': zerocore.ParameterMesh(mesh['edp'], "
            f"of=mesh['ep'])}}, got {type(groups)}"
        )
    return tuple(_find_part(pattern, part, model_ranks) for pattern, part in groups.items())


def _find_part(pattern: str, mesh: Any, model_ranks: Ranks) -> ModelPart:
    part = mesh if isinstance(mesh, ParameterMesh) else ParameterMesh(mesh)
    what = f"groups['{pattern}']"
    ranks = ranks_of(part.mesh, what)
    others = None if part.of is None else group_of(part.of, f"{what}: of")
    all_ranks, sharing = set(model_ranks.members), set(ranks.members)
    holders = set() if others is None else members_of(others)  # of one part each
    if strangers := (sharing | holders) - all_ranks:
        raise ValueError(
            f"{what}: ranks {sorted(strangers)} are not among the model's ranks "
            f"{sorted(all_ranks)}; pass dimensions of a mesh that covers group="
        )
    if others is not None and len(sharing & holders) != 1:
        raise ValueError(
            f"{what}: ranks {sorted(sharing & holders)} are in mesh and in of=; expected one rank "
            "in both: mesh has the ranks that share a part, of= the ranks with the other parts"
        )
    if others is not None and len(sharing) * len(holders) != len(all_ranks):
        raise ValueError(
            f"{what}: {len(holders)} parts on {len(sharing)} ranks each are "
            f"{len(holders) * len(sharing)} ranks, and the model has {len(all_ranks)}"
        )
    return ModelPart(pattern, ranks, others, part.dim)


def assign_parts(planned: Sequence[Unit], patterns: Sequence[str]) -> list[Unit]:
    """Splits units with parameters on several meshes, at the same calls. Raises ValueError for a
    pattern that matches no parameter, or a parameter on several meshes."""
    names = [fqn for unit in planned for param in unit.params for fqn in param.fqns]
    for pattern in patterns:
        if not any(fnmatchcase(fqn, pattern) for fqn in names):
            raise ValueError(
                f"groups: '{pattern}' matches no parameter of the model, such as "
                f"{', '.join(repr(name) for name in names[:3])}"
            )
    return split_units(
        planned, lambda param, _: _mesh_of(param, patterns), lambda mesh: patterns[mesh - 1]
    )


def _mesh_of(param: Param, patterns: Sequence[str]) -> int:
    meshes: set[int] = set()
    for fqn in param.fqns:
        meshes |= {i for i, pattern in enumerate(patterns, 1) if fnmatchcase(fqn, pattern)} or {0}
    if len(meshes) > 1:
        raise ValueError(
            f"groups: parameter '{' = '.join(param.fqns)}' is on several meshes; let one pattern "
            "match all of its names, and no other pattern match any"
        )
    return meshes.pop()


def _larger_tensor(
    param: Param, mesh: int, parts: Sequence[ModelPart]
) -> tuple[dist.ProcessGroup, int] | None:
    """Returns :attr:`Param.larger`. Raises ValueError for a DTensor whose ranks differ from
    ``of=``."""
    part = parts[mesh - 1] if 0 < mesh <= len(parts) else None
    cut = cut_of(param)
    if cut is None:
        return None if part is None or part.others is None else (part.others, part.dim)
    if part is not None and part.others is not None:
        members = members_of(cut.group)
        if (members_of(part.others), part.dim) != (members, cut.dim):
            raise ValueError(
                f"groups['{part.pattern}']: parameter '{param.fqn}' is a DTensor with "
                f"{param.dtensor_spec.placements} over ranks {sorted(members)}, but of= and dim= "
                "say otherwise; leave of= and dim= out for DTensors"
            )
    return None if cut.dim is None else (cut.group, cut.dim)


def find_sizes(planned: Sequence[Unit], device: torch.device) -> None:
    """Sets ``part`` of each parameter that is a part of a larger tensor; collective."""
    by_group: dict[dist.ProcessGroup, list[tuple[Param, int]]] = {}
    for unit in planned:
        for param in unit.params:
            if param.larger is not None:
                group, dim = param.larger
                by_group.setdefault(group, []).append((param, dim))
    for group, params in by_group.items():
        local_sizes = [param.tensor.shape[dim] for param, dim in params]
        sizes = gather_objects([group], [local_sizes], device)
        for number, (param, dim) in enumerate(params):
            all_sizes = [rank_sizes[number] for rank_sizes in sizes]
            shape = list(param.tensor.shape)
            shape[dim] = sum(all_sizes)
            begin = sum(all_sizes[: group.rank()])
            param.part = PartOf(group, torch.Size(shape), dim, begin)


def find_ranges(state: ShardState) -> dict[str, list[PartRanges]]:
    """Returns, by FQN, the ranks that save each part of the larger tensors; collective."""
    by_group: dict[dist.ProcessGroup, dict[str, PartRanges]] = {}
    for unit in state.units:
        for position, param in enumerate(unit.params):
            part = param.shard.place.part
            if part is not None:
                ranges = _own_ranges(state, unit.index, position)
                by_group.setdefault(part.group, {})[param.fqn] = ranges
    by_fqn: dict[str, list[PartRanges]] = {}
    for group, own_ranges in by_group.items():
        for rank_ranges in gather_objects([group], [own_ranges], state.device):
            for fqn, ranges in rank_ranges.items():
                by_fqn.setdefault(fqn, []).append(ranges)
    return by_fqn


def _own_ranges(state: ShardState, unit: int, position: int) -> PartRanges:
    ranks = state.ranks_of(unit)
    place: Place = state.units[unit].params[position].shard.place
    members = tuple(state.ranks.members.index(member) for member in ranks.members) or (0,)
    assert place.part is not None
    saved = SavedRanges.on(ranks, place)
    return PartRanges(place.part.origin, tuple(place.global_shape), replace(saved, members=members))
