"""The mesh that parameters are sharded over, and the rows of a parameter that a rank owns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


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


def placements_on(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Those of parameters on a mesh that :func:`check_mesh` has passed."""
    return (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))


def own_rows(param: Tensor, mesh: DeviceMesh) -> Tensor:
    """The rows of ``param`` that torch.chunk gives this rank, a view; there may be none."""
    count, rank = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
    size = -(-param.shape[0] // count)
    begin = min(rank * size, param.shape[0])
    return param.narrow(0, begin, min(size, param.shape[0] - begin))


def as_dtensor(local: Tensor, like: Any) -> DTensor:
    """A DTensor over ``local`` (this rank's rows), which is not copied.

    Args:
        local: a dense tensor without a gradient.
        like: a DTensor whose shape, mesh and placements are taken.
    """
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def shard_rows(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """A parameter of the same values and the full shape, of which each rank holds its rows.

    Nothing is communicated: every rank takes its rows of its own values.
    """
    device = param.device if param.is_meta else device_of(mesh)
    with torch.no_grad():
        rows = own_rows(param, mesh)
        local = torch.empty_like(rows, device=device, memory_format=torch.contiguous_format)
        local.copy_(rows)
        sharded = DTensor.from_local(
            local,
            mesh,
            placements_on(mesh),
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    return nn.Parameter(sharded, requires_grad=param.requires_grad)
