"""Specs of shards of parameters that tensor parallelism has cut before ``fully_shard``."""

from __future__ import annotations

from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from zerocore.fsdp.mesh import DataMesh


def check_whole(whole: DTensorSpec, name: str, data: DataMesh) -> tuple[int, ...]:
    """Checks a DTensor's mesh; returns its data-parallel dimensions."""
    device_type = whole.mesh.device_type
    if device_type != data.mesh.device_type:
        raise ValueError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"{device_type} for DTensor and {data.mesh.device_type} for FSDP"
        )
    if data.spmd is None:
        return ()
    if whole.mesh != data.spmd:
        raise ValueError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got "
            f"{whole.mesh} for '{name}' and {data.spmd}"
        )
    reduced = tuple(index for index, dim in enumerate(_all_names(data)) if dim in data.names)
    for index in reduced:
        if not whole.placements[index].is_replicate():
            raise ValueError(
                f"Expected Replicate() on DP dim '{_all_names(data)[index]}' (index {index}) of "
                f"parameter '{name}' but got {whole.placements[index]}"
            )
    return reduced


def _all_names(data: DataMesh) -> tuple[str, ...]:
    """Returns the dimensions of the mesh of all parallelisms."""
    return () if data.spmd is None else cast("tuple[str, ...]", data.spmd.mesh_dim_names)


def others_of(data: DataMesh) -> DeviceMesh | None:
    """Returns the dimensions other than the data-parallel ones; None without any."""
    others = tuple(name for name in _all_names(data) if name not in data.names)
    return data.spmd[others] if data.spmd is not None and others else None


def _num_before(data: DataMesh) -> int:
    """Returns the number of other dimensions before the first data-parallel one."""
    return next((i for i, name in enumerate(_all_names(data)) if name in data.names), 0)


def spec_beside(whole: DTensorSpec, data: DataMesh, dim: int) -> DTensorSpec:
    """Returns the spec of a DTensor's shard, whose dimension ``dim`` data parallelism cuts, too."""
    if data.spmd is None:
        return spec_with(whole, data, dim)
    if (others := others_of(data)) is None:
        return data.spec(cast(TensorMeta, whole.tensor_meta), dim)
    pairs = zip(_all_names(data), whole.placements, strict=True)
    kept = tuple(placement for name, placement in pairs if name not in data.names)
    return spec_with(DTensorSpec(others, kept, tensor_meta=whole.tensor_meta), data, dim)


def spec_with(inner: DTensorSpec, data: DataMesh, dim: int) -> DTensorSpec:
    """Returns a shard's spec from the one on the dimensions other than data parallelism's."""
    replicas = [Replicate()] * (data.mesh.ndim - 1)
    before = _num_before(data)
    # Shards along ``dim`` by the dimensions after data parallelism's; Shard covers those before.
    factor = inner.num_shards_map[dim]
    for index in range(before):
        if inner.placements[index].is_shard(dim):
            factor //= inner.mesh.size(index)
    data_shard = _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
    placed = (*inner.placements[:before], *replicas, data_shard, *inner.placements[before:])
    return DTensorSpec(_whole_mesh(data, inner.mesh), placed, tensor_meta=inner.tensor_meta)


def _whole_mesh(data: DataMesh, others: DeviceMesh) -> DeviceMesh:
    if data.spmd is None:
        return _joined([data.mesh, others])
    before = _num_before(data)
    is_in_order = _all_names(data)[before : before + len(data.names)] == data.names
    if len(data.names) == data.mesh.ndim and is_in_order:  # consecutive, replicas first
        return data.spmd
    names = cast("tuple[str, ...]", others.mesh_dim_names)
    meshes = [others[name] for name in names]
    return _joined([*meshes[:before], data.mesh, *meshes[before:]])


def _joined(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Joins dimensions of one mesh into one again."""
    join: Any = getattr(DeviceMesh, "_concatenate", None)
    if join is not None:
        return cast(DeviceMesh, join(meshes))
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.12

    resources: Any = _mesh_resources
    names = tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())
    return cast(DeviceMesh, resources.get_root_mesh(meshes[0])[names])
