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
    reduced = tuple(index for index, dim in enumerate(data.spmd_names) if dim in data.names)
    for index in reduced:
        if not whole.placements[index].is_replicate():
            raise ValueError(
                f"Expected Replicate() on DP dim '{data.spmd_names[index]}' (index {index}) of "
                f"parameter '{name}' but got {whole.placements[index]}"
            )
    return reduced


def spec_beside(whole: DTensorSpec, data: DataMesh, dim: int) -> DTensorSpec:
    """Returns the spec of a DTensor's shard, whose dimension ``dim`` data parallelism cuts, too."""
    if data.spmd is None:
        return spec_with(whole, data, dim)
    if (others := data.others) is None:
        return data.spec(cast(TensorMeta, whole.tensor_meta), dim)
    pairs = zip(data.spmd_names, whole.placements, strict=True)
    kept = tuple(placement for name, placement in pairs if name not in data.names)
    return spec_with(DTensorSpec(others, kept, tensor_meta=whole.tensor_meta), data, dim)


def spec_with(inner: DTensorSpec, data: DataMesh, dim: int) -> DTensorSpec:
    """Returns a shard's spec from the one on the dimensions other than data parallelism's."""
    replicas = [Replicate()] * (data.mesh.ndim - 1)
    before = data.num_before
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
    if len(data.names) == data.mesh.ndim and data.is_in_order:
        return data.spmd
    names = cast("tuple[str, ...]", others.mesh_dim_names)
    meshes = [others[name] for name in names]
    return _joined([*meshes[: data.num_before], data.mesh, *meshes[data.num_before :]])


def _joined(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Joins dimensions of one mesh into one again."""
    join: Any = getattr(DeviceMesh, "_concatenate", None)
    if join is not None:
        return cast(DeviceMesh, join(meshes))
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.12

    resources: Any = _mesh_resources
    names = tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())
    return cast(DeviceMesh, resources.get_root_mesh(meshes[0])[names])
