"""Types of spmd_types, which say how tensor parallelism has cut a plain parameter."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zerocore.fsdp.mesh import DataMesh
from zerocore.fsdp.tensor_parallel import others_of


def annotation_of(
    param: nn.Parameter, name: str, data: DataMesh
) -> tuple[DTensorSpec | None, tuple[dist.ProcessGroup, ...]]:
    """Returns a parameter's spec as a DTensor on the dimensions other than data parallelism's (None
    if there are none), and the groups of these whose ranks hold the same values, and each a part of
    the gradient.

    Raises:
        ValueError: a mesh without dp_mesh_dims, a dimension of the mesh without a type, a
            data-parallel dimension whose type is not R, or a dimension that the mesh lacks.
    """
    types = dict(spmd.get_local_type(param))
    if data.spmd is None:
        raise ValueError(
            f"parameter '{name}' has a type of spmd_types on {tuple(types)}: pass the mesh of all "
            "parallelisms and dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)"
        )
    others = others_of(data)
    axes = [] if others is None else [spmd.MeshAxis.of(group) for group in others.get_all_groups()]
    _check_axes(types, axes, name, data)
    for dim, entry in enumerate(spmd.get_partition_spec(param) or ()):
        for axis in entry if isinstance(entry, tuple) else (entry,):
            if axis is not None:
                types[axis] = spmd.S(dim)
    if others is None:
        return None, ()
    placements = [spmd.spmd_type_to_dtensor_placement(types[axis]) for axis in axes]
    whole: Any = DTensor.from_local(param.detach(), others, placements, run_check=False)
    groups = zip(axes, others.get_all_groups(), strict=True)
    sums = tuple(group for axis, group in groups if types[axis] is spmd.R and group.size() > 1)
    return whole._spec, sums


def _check_axes(types: dict[Any, Any], axes: list[Any], name: str, data: DataMesh) -> None:
    ranks = data.mesh.mesh.flatten().tolist()
    from_zero = {rank - min(ranks) for rank in ranks}
    for axis, kind in types.items():
        if axis in axes:
            continue
        if not set(axis.layout.all_ranks_from_zero()) <= from_zero:
            raise ValueError(
                f"parameter '{name}' has a type of spmd_types on {axis}, which is neither a "
                f"dimension of {data.spmd} nor within {data.mesh}"
            )
        if kind is not spmd.R:
            raise ValueError(
                f"parameter '{name}' has the type {kind} on {axis}, a data-parallel dimension; "
                "expected spmd.R, because fully_shard reduces its gradient there"
            )
    missing = [axis for axis in axes if axis not in types]
    if missing:
        raise ValueError(
            f"parameter '{name}' has types of spmd_types on {tuple(types)}; {tuple(missing)} of "
            f"{data.spmd} are missing"
        )
