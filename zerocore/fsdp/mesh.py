"""The mesh that parameters are sharded over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


@dataclass(frozen=True)
class DataMesh:
    """The data-parallel ranks, and the mesh of all parallelisms that has them as dimensions."""

    mesh: DeviceMesh  # 1-D, or 2-D of replicas by shards
    spmd: DeviceMesh | None = None  # of all parallelisms; None if the caller passed only ``mesh``
    names: tuple[str, ...] = ()  # the data-parallel dimensions of ``spmd``

    @property
    def num_shards(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1)

    def spec(self, meta: TensorMeta, dim: int) -> DTensorSpec:
        """Returns the spec of a tensor that only data parallelism cuts, along ``dim``."""
        replicas = [Replicate()] * (self.mesh.ndim - 1)
        return DTensorSpec(self.mesh, (*replicas, Shard(dim)), tensor_meta=meta)


def data_mesh(mesh: DeviceMesh | None, dims: Any) -> DataMesh:
    """Returns the data mesh: ``mesh``, by default of all ranks, or its ``DataParallelMeshDims``.

    Raises ValueError unless the mesh is 1-D or a named 2-D one of replicas by shards, or if
    ``dims`` name no dimension of it, NotImplementedError for ``dims`` without a shard dimension.
    """
    if mesh is None:
        mesh = _default_mesh()
    if dims is None:
        return DataMesh(_checked(mesh))
    from torch.distributed.fsdp._fully_shard import _fsdp_init as torch_init

    init: Any = torch_init
    init._validate_mesh(mesh, dims)
    return data_mesh_of(init._get_mesh_info(mesh, dims))


def data_mesh_of(info: Any) -> DataMesh:
    """Returns the data mesh of an FSDPMeshInfo or HSDPMeshInfo; raises NotImplementedError for
    another class, which has no dimension to shard over."""
    if getattr(info, "shard_mesh_dim", None) is None:
        raise NotImplementedError(
            f"{type(info).__name__}: zerocore.fsdp needs a mesh dimension to shard over; "
            "for replicas alone use DistributedDataParallel, or shard over a dimension of size 1"
        )
    dims = info.dp_mesh_dims
    if dims is None:
        return DataMesh(_checked(info.mesh))
    names = (*dims.replicate_names, *dims.shard_names)
    return DataMesh(info.mesh, info.spmd_mesh, names)


def _checked(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified: the first dimension "
            "has the replicas, the second the shards"
        )
    return mesh


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns this rank's device of a mesh's parameters."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )
