"""Parameters that only some of a model's ranks share, such as experts, and DTensors of tensor
parallelism.

The engine knows this rank's local tensor of a DTensor. One that is cut is a part of a larger
tensor, as an expert is; one that all ranks of the mesh have is sharded within data parallelism, and
its gradients are summed over both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerocore.common.agreement import gather_objects
from zerocore.layout.place import PartOf, Place
from zerocore.layout.save_ownership import SavedRanges
from zerocore.model.ranks import Ranks, group_of, members_of, ranks_of, sibling_of
from zerocore.model.units import ParamChoice, UnitPlanned, split_units
from zerocore.options.parameter_mesh import ParameterMesh
from zerocore.tensor.rows import cuts_of


class Cut(NamedTuple):
    """How a parameter is spread over the ranks of a mesh."""

    group: dist.ProcessGroup  # these ranks
    dim: int | None  # along which each has a part; None where each has all of it


def cut_of(choice: ParamChoice) -> Cut | None:
    """How a DTensor is spread; None for a plain parameter, and over one rank. Raises ValueError for
    a mesh of several dimensions, or a placement that is neither Shard nor Replicate."""
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
    """The ranks of tensor parallelism, which hold other parts of the model; None without. ``ranks``
    are those of data parallelism, and with ``has_parts`` ``groups=`` names parameters with ranks of
    their own. Raises ValueError for DTensors on several meshes, or on ranks of ``ranks``; names a
    parameter."""
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


@dataclass(frozen=True)
class ModelPart:
    """A part of a model, with its ranks."""

    pattern: str  # its parameters' names match it
    ranks: Ranks  # of the part
    others: dist.ProcessGroup | None  # ranks with other parts of the same tensors
    dim: int  # along which parts follow each other


@dataclass(frozen=True)
class PartRanges:
    """The ranks that save the elements of one part of a tensor."""

    origin: tuple[int, ...]  # the place of its first element in the tensor
    shape: tuple[int, ...]  # of the part
    ranges: SavedRanges  # of its elements, by the ranks of the model


def find_parts(groups: Any, model_ranks: Ranks) -> tuple[ModelPart, ...]:
    """The parts that ``groups=`` of :func:`zerocore.shard` names; communicates nothing. Raises
    TypeError if it maps no patterns to meshes, ValueError for ranks that are not the model's, or
    that overlap."""
    if groups is None:
        return ()
    if not isinstance(groups, Mapping):
        raise TypeError(
            "groups: expected a dict such as {'*.experts.*': zerocore.ParameterMesh(mesh['edp'], "
            f"of=mesh['ep'])}}, got {type(groups)}"
        )
    return tuple(_find_part(pattern, part, model_ranks) for pattern, part in groups.items())


def _find_part(pattern: str, given: Any, model_ranks: Ranks) -> ModelPart:
    part = given if isinstance(given, ParameterMesh) else ParameterMesh(given)
    what = f"groups['{pattern}']"
    ranks = ranks_of(part.mesh, what)
    others = None if part.of is None else group_of(part.of, f"{what}: of")
    whole, own = set(model_ranks.members), set(ranks.members)
    rest = set() if others is None else members_of(others)
    if strangers := (own | rest) - whole:
        raise ValueError(
            f"{what}: ranks {sorted(strangers)} are none of the model's, which are "
            f"{sorted(whole)}; pass dimensions of a mesh that covers group="
        )
    if others is not None and len(own & rest) != 1:
        raise ValueError(
            f"{what}: ranks {sorted(own & rest)} are in mesh and in of=; ranks that hold the same "
            "values have the same part, so the two meet in one rank"
        )
    if others is not None and len(own) * len(rest) != len(whole):
        raise ValueError(
            f"{what}: {len(rest)} parts on {len(own)} ranks each are not the {len(whole)} ranks of "
            "the model"
        )
    return ModelPart(pattern, ranks, others, part.dim)


def assign_parts(planned: Sequence[UnitPlanned], patterns: Sequence[str]) -> list[UnitPlanned]:
    """The units by mesh: one with parameters on several becomes several, at the same calls. Raises
    ValueError for a pattern that matches no parameter, or a parameter on several meshes."""
    names = [fqn for unit in planned for choice in unit.params for fqn in choice.fqns]
    for pattern in patterns:
        if not any(fnmatchcase(fqn, pattern) for fqn in names):
            raise ValueError(
                f"groups: '{pattern}' matches no parameter of the model, such as "
                f"{', '.join(repr(name) for name in names[:3])}"
            )
    return split_units(
        planned, lambda choice, _: _mesh_of(choice, patterns), lambda mesh: patterns[mesh - 1]
    )


def _mesh_of(choice: ParamChoice, patterns: Sequence[str]) -> int:
    found: set[int] = set()
    for fqn in choice.fqns:
        found |= {i for i, pattern in enumerate(patterns, 1) if fnmatchcase(fqn, pattern)} or {0}
    if len(found) > 1:
        raise ValueError(
            f"groups: parameter '{' = '.join(choice.fqns)}' is on several meshes; let one pattern "
            "match all of its names, and no other one match any"
        )
    return found.pop()


def choices_on(planned: Sequence[UnitPlanned], mesh: int) -> list[ParamChoice]:
    """The parameters of a mesh."""
    return [choice for unit in planned if unit.mesh == mesh for choice in unit.params]


def larger_tensor(
    choice: ParamChoice, mesh: int, parts: Sequence[ModelPart]
) -> tuple[dist.ProcessGroup, int] | None:
    """The ranks that have the parts of the tensor that a parameter is a part of, and the dimension
    along which they follow each other; None of a parameter that is no part. Raises ValueError for a
    DTensor that is spread over other ranks than ``of=`` says."""
    part = parts[mesh - 1] if 0 < mesh <= len(parts) else None
    cut = cut_of(choice)
    if cut is None:
        return None if part is None or part.others is None else (part.others, part.dim)
    if part is not None and part.others is not None:
        members = members_of(cut.group)
        if (members_of(part.others), part.dim) != (members, cut.dim):
            raise ValueError(
                f"groups['{part.pattern}']: parameter '{choice.fqns[0]}' is a DTensor with "
                f"{choice.spec.placements} over ranks {sorted(members)}, and of= says "
                "otherwise; leave of= and dim= out for DTensors"
            )
    return None if cut.dim is None else (cut.group, cut.dim)


def find_sizes(
    planned: Sequence[UnitPlanned], parts: Sequence[ModelPart], device: torch.device
) -> None:
    """Notes the larger tensors that parameters are parts of; collective."""
    by_group: dict[dist.ProcessGroup, list[tuple[ParamChoice, int]]] = {}
    for unit in planned:
        for choice in unit.params:
            if (larger := larger_tensor(choice, unit.mesh, parts)) is not None:
                by_group.setdefault(larger[0], []).append((choice, larger[1]))
    for group, choices in by_group.items():
        own = [choice.tensor.shape[dim] for choice, dim in choices]
        sizes = gather_objects([group], [own], device)
        for number, (choice, dim) in enumerate(choices):
            all_sizes = [of_rank[number] for of_rank in sizes]
            shape = list(choice.tensor.shape)
            shape[dim] = sum(all_sizes)
            begin = sum(all_sizes[: group.rank()])
            choice.part = PartOf(group, torch.Size(shape), dim, begin)


def find_ranges(state: Any) -> dict[str, list[PartRanges]]:
    """The ranks that save each part of the tensors that parameters are parts of; collective.
    ``state``: a :class:`zerocore.model.state.ShardState` with all units."""
    by_group: dict[dist.ProcessGroup, dict[str, PartRanges]] = {}
    for unit in state.units:
        for position, param in enumerate(unit.params):
            part = param.shard.place.part
            if part is not None:
                own = _own_ranges(state, unit.index, position)
                by_group.setdefault(part.group, {})[param.fqn] = own
    found: dict[str, list[PartRanges]] = {}
    for group, own_ranges in by_group.items():
        for ranges in gather_objects([group], [own_ranges], state.device):
            for fqn, each in ranges.items():
                found.setdefault(fqn, []).append(each)
    return found


def _own_ranges(state: Any, unit: int, position: int) -> PartRanges:
    ranks = state.ranks_of(unit)
    place: Place = state.units[unit].params[position].shard.place
    layout = None if place.group is None else (state.engine.layout(unit), position)
    members = tuple(state.ranks.members.index(member) for member in ranks.members) or (0,)
    assert place.part is not None
    saved = SavedRanges.on(ranks, place.global_shape.numel(), layout)
    return PartRanges(place.part.origin, tuple(place.global_shape), replace(saved, members=members))


def check_has_places(state: Any) -> None:
    """Raises ValueError if ranks hold parameters of one name that are no parts of one tensor."""
    for unit in state.units:
        ranks = state.ranks_of(unit.index)
        if unit.mesh == 0 or set(ranks.members) == set(state.ranks.members):
            continue  # all ranks have the same
        if lacking := [each.fqn for each in unit.params if not cuts_of(each.shard)]:
            raise ValueError(
                f"'{lacking[0]}': only some ranks of the model share it, and the others have a "
                "parameter of the same name. A checkpoint or export cannot hold both: say in "
                "groups= of zerocore.shard which ranks have the other parts, "
                "zerocore.ParameterMesh(mesh, of=...), or for zerocore.fsdp make it a DTensor on "
                "the mesh of those ranks, too"
            )
