"""Parameters that only some of a model's ranks share, and the ranks that save their elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zerocore.layout.save_ownership import SavedRanges
from zerocore.model.ranks import Ranks
from zerocore.model.units import Param, Unit
from zerocore.tensor.rows import cuts_of


@dataclass(frozen=True)
class ModelPart:
    """A part of a model, with its ranks."""

    pattern: str  # matches the names of its parameters
    ranks: Ranks  # the ranks that share it
    others: dist.ProcessGroup | None  # ranks with other parts of the same tensors
    dim: int  # the dimension along which the parts are concatenated


@dataclass(frozen=True)
class PartRanges:
    """The ranks that save the elements of one part of a tensor."""

    origin: tuple[int, ...]  # index of its first element in the tensor
    shape: tuple[int, ...]  # of the part
    ranges: SavedRanges  # its elements, by rank of the model


def params_on(planned: Sequence[Unit], mesh: int) -> list[Param]:
    """Returns the parameters of a mesh."""
    return [param for unit in planned if unit.mesh == mesh for param in unit.params]


def check_has_places(state: Any) -> None:
    """Rejects parameters of one name on different ranks that are not parts of one tensor."""
    for unit in state.units:
        ranks = state.ranks_of(unit.index)
        if unit.mesh == 0 or set(ranks.members) == set(state.ranks.members):
            continue  # all ranks share it
        if lacking := [param.fqn for param in unit.params if not cuts_of(param.shard)]:
            raise ValueError(
                f"'{lacking[0]}': only some ranks of the model share it, and the others have a "
                "parameter of the same name. A checkpoint or export cannot hold both: say in "
                "groups= of zerocore.shard which ranks have the other parts, "
                "zerocore.ParameterMesh(mesh, of=...), or for zerocore.fsdp make it a DTensor on "
                "the mesh of those ranks, too"
            )
