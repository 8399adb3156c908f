"""Types of spmd_types on a plain parameter say how the other parallelisms have cut it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zerocore.fsdp.mesh import DataMesh

_LOCAL_TYPE = "_local_type"  # set by spmd_types.assert_type


@dataclass(frozen=True)
class Annotation:
    """Of one parameter.

    Attributes:
        spec: of the parameter as a DTensor on the dimensions that are not data parallelism's;
            None if there are none.
        sums: groups of those whose ranks hold the same values and have parts of the gradient.
    """

    spec: DTensorSpec | None
    sums: tuple[dist.ProcessGroup, ...]


def annotation_of(param: nn.Parameter, name: str, data: DataMesh) -> Annotation | None:
    """The one of ``param``; None for a parameter that has none.

    Raises:
        ValueError: a mesh without dp_mesh_dims, a dimension of the mesh without a type, a
            dimension of data parallelism that is not R, or one that the mesh does not have.
    """
    if isinstance(param, DTensor) or not getattr(param, _LOCAL_TYPE, None):
        return None
    import spmd_types as spmd

    types = dict(spmd.get_local_type(param))
    if data.spmd is None:
        raise ValueError(
            f"parameter '{name}' has a type of spmd_types on {tuple(types)}: pass the mesh of all "
            "parallelisms and dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)"
        )
    others = data.others
    axes = [] if others is None else [spmd.MeshAxis.of(group) for group in others.get_all_groups()]
    _check_axes(types, axes, name, data)
    for dim, entry in enumerate(spmd.get_partition_spec(param) or ()):
        for axis in entry if isinstance(entry, tuple) else (entry,):
            if axis is not None:
                types[axis] = spmd.S(dim)
    if others is None:
        return Annotation(None, ())
    placements = [spmd.spmd_type_to_dtensor_placement(types[axis]) for axis in axes]
    whole: Any = DTensor.from_local(param.detach(), others, placements, run_check=False)
    groups = zip(axes, others.get_all_groups(), strict=True)
    sums = tuple(group for axis, group in groups if types[axis] is spmd.R and group.size() > 1)
    return Annotation(whole._spec, sums)


def _check_axes(types: dict[Any, Any], axes: list[Any], name: str, data: DataMesh) -> None:
    import spmd_types as spmd

    ranks = data.mesh.mesh.flatten().tolist()
    own = {rank - min(ranks) for rank in ranks}
    for axis, kind in types.items():
        if axis in axes:
            continue
        if not set(axis.layout.all_ranks_from_zero()) <= own:
            raise ValueError(
                f"parameter '{name}' has a type of spmd_types on {axis}, which is no dimension of "
                f"{data.spmd} and not within {data.mesh}"
            )
        if kind is not spmd.R:
            raise ValueError(
                f"parameter '{name}' has the type {kind} on {axis}, which is data parallelism's; "
                "expected spmd.R there, as fully_shard reduces its gradient"
            )
    missing = [axis for axis in axes if axis not in types]
    if missing:
        raise ValueError(
            f"parameter '{name}' has types of spmd_types on {tuple(types)}; {tuple(missing)} of "
            f"{data.spmd} are missing"
        )
