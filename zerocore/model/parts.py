"""Parameters that only some of a model's ranks share, such as experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist

from zerocore.checkpoint.slices.save_ownership import ranges_on
from zerocore.common.agreement import gather_objects
from zerocore.model.ranks import Ranks, group_of, members_of, ranks_of
from zerocore.model.units import ParamChoice, UnitPlanned
from zerocore.tensor.place import PartOf, Place


@dataclass(frozen=True)
class Part:
    """The ranks of parameters that not all ranks of a model share.

    Their gradients are summed over ``mesh`` and divided as those of all other parameters are: by
    the number of the model's ranks, whose tokens reach them.

    Attributes:
        mesh: ranks that hold the same values: as ``group=`` of :func:`zerocore.shard`.
        of: ranks that hold the other parts of the same tensors: a process group or 1-D DeviceMesh.
            A norm of gradients counts all parts. None where the ranks outside of ``mesh`` hold
            the same tensor, so that a norm counts it once.
        dim: dimension along which the parts follow each other, in the order of ``of``.
    """

    mesh: Any
    of: Any = None
    dim: int = 0


@dataclass(frozen=True)
class ModelPart:
    """A part of a model, with its ranks.

    Attributes:
        pattern: its parameters' names match it.
        ranks: of the part.
        others: ranks with other parts of the same tensors; None where there are none.
        dim: along which parts follow each other.
    """

    pattern: str
    ranks: Ranks
    others: dist.ProcessGroup | None
    dim: int


@dataclass(frozen=True)
class PartRanges:
    """The ranks that save the elements of one part of a tensor.

    Attributes:
        origin: the place of its first element in the tensor.
        shape: of the part.
        ranges: ``(rank, begin, end)`` of its elements, by the ranks of the model.
    """

    origin: tuple[int, ...]
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int, int], ...]


def find_parts(groups: Any, model_ranks: Ranks) -> tuple[ModelPart, ...]:
    """The parts that ``groups=`` of :func:`zerocore.shard` names; communicates nothing.

    Raises:
        TypeError: no mapping of patterns to meshes.
        ValueError: ranks that are not the model's, or that overlap.
    """
    if groups is None:
        return ()
    if not isinstance(groups, Mapping):
        raise TypeError(
            "groups: expected a dict such as {'*.experts.*': zerocore.Part(mesh['edp'], "
            f"of=mesh['ep'])}}, got {type(groups)}"
        )
    return tuple(_find_part(pattern, part, model_ranks) for pattern, part in groups.items())


def _find_part(pattern: str, given: Any, model_ranks: Ranks) -> ModelPart:
    part = given if isinstance(given, Part) else Part(given)
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


def assign_parts(planned: Sequence[UnitPlanned], parts: Sequence[ModelPart]) -> list[UnitPlanned]:
    """The units by mesh: one with parameters on several becomes several, at the same calls.

    Raises:
        ValueError: a pattern that matches no parameter, or a parameter on several meshes.
    """
    names = [fqn for unit in planned for choice in unit.params for fqn in choice.fqns]
    for part in parts:
        if not any(fnmatchcase(fqn, part.pattern) for fqn in names):
            raise ValueError(
                f"groups: '{part.pattern}' matches no parameter of the model, such as "
                f"{', '.join(repr(name) for name in names[:3])}"
            )
    return [own for unit in planned for own in _by_mesh(unit, parts)]


def _by_mesh(unit: UnitPlanned, parts: Sequence[ModelPart]) -> list[UnitPlanned]:
    by_mesh: dict[int, list[ParamChoice]] = {}
    for choice in unit.params:
        by_mesh.setdefault(_mesh_of(choice, parts), []).append(choice)
    if by_mesh.keys() == {0}:
        return [unit]
    several = len(by_mesh) > 1
    return [
        replace(
            unit,
            name=f"{unit.name} ({parts[mesh - 1].pattern})" if mesh and several else unit.name,
            params=params,
            mesh=mesh,
        )
        for mesh, params in sorted(by_mesh.items())
    ]


def _mesh_of(choice: ParamChoice, parts: Sequence[ModelPart]) -> int:
    found: set[int] = set()
    for fqn in choice.fqns:
        found |= {i for i, part in enumerate(parts, 1) if fnmatchcase(fqn, part.pattern)} or {0}
    if len(found) > 1:
        raise ValueError(
            f"groups: parameter '{' = '.join(choice.fqns)}' is on several meshes; let one pattern "
            "match all of its names, and no other one match any"
        )
    return found.pop()


def choices_on(planned: Sequence[UnitPlanned], mesh: int) -> list[ParamChoice]:
    """The parameters of a mesh."""
    return [choice for unit in planned if unit.mesh == mesh for choice in unit.params]


def find_sizes(
    planned: Sequence[UnitPlanned], parts: Sequence[ModelPart], device: torch.device
) -> dict[str, PartOf]:
    """The larger tensors that parameters are parts of, by FQN; collective."""
    found = {}
    for mesh, part in enumerate(parts, 1):
        choices = choices_on(planned, mesh)
        if part.others is None or not choices:
            continue
        sizes = gather_objects([part.others], [[c.param.shape[part.dim] for c in choices]], device)
        for number, choice in enumerate(choices):
            all_sizes = [of_rank[number] for of_rank in sizes]
            shape = list(choice.param.shape)
            shape[part.dim] = sum(all_sizes)
            begin = sum(all_sizes[: part.others.rank()])
            found[choice.fqns[0]] = PartOf(part.others, torch.Size(shape), part.dim, begin)
    return found


def find_ranges(state: Any) -> dict[str, list[PartRanges]]:
    """The ranks that save each part of the tensors that parameters are parts of; collective.

    Args:
        state: a :class:`zerocore.model.state.ShardState` with all units.
    """
    found: dict[str, list[PartRanges]] = {}
    for mesh, part in enumerate(state.parts, 1):
        if part.others is None:
            continue
        own = {
            param.fqn: _own_ranges(state, unit.index, position, part.ranks)
            for unit in state.units
            if unit.mesh == mesh
            for position, param in enumerate(unit.params)
        }
        for ranges in gather_objects([part.others], [own], state.device):
            for fqn, each in ranges.items():
                found.setdefault(fqn, []).append(each)
    return found


def _own_ranges(state: Any, unit: int, position: int, ranks: Ranks) -> PartRanges:
    place: Place = state.units[unit].params[position].shard.place
    layout = None if place.group is None else (state.engine.layout(unit), position)
    numbers = [state.ranks.members.index(member) for member in ranks.members] or [0]
    assert place.part is not None
    ranges = ranges_on(ranks, place.global_shape.numel(), layout)
    return PartRanges(
        place.part.origin,
        tuple(place.global_shape),
        tuple((numbers[rank], begin, end) for rank, begin, end in ranges),
    )


def check_has_places(state: Any) -> None:
    """Raises ValueError if ranks hold parameters of one name that are no parts of one tensor."""
    for unit in state.units:
        part = state.parts[unit.mesh - 1] if unit.mesh and state.parts else None
        if unit.mesh and (part is None or part.others is None):
            name = unit.params[0].fqn
            raise ValueError(
                f"'{name}': only some ranks of the model share it, and the others have a parameter "
                "of the same name. A checkpoint cannot hold both: say in groups= of "
                "zerocore.shard which ranks have the other parts, zerocore.Part(mesh, of=...)"
            )
