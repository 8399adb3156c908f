"""The mesh that parameters are sharded over."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def check_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """``mesh``, or that of all ranks.

    Raises:
        ValueError: a mesh that is neither 1-D nor a named 2-D one of replicas by shards.
    """
    if mesh is None:
        return _default_mesh()
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified: the first dimension "
            "are replicas, over the second parameters are sharded"
        )
    return mesh


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where parameters of the mesh lie on this rank."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )
