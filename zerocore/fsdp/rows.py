"""Which part of a parameter a rank owns, and how the parameter looks in the engine.

The engine knows plain tensors and cuts their first dimension. A parameter that is sharded in
another dimension is given to it with that dimension first, one that tensor parallelism has cut
already is given by this rank's part; what modules see is a view of what the engine gathers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from zerocore.tensor.dtensors import show_dtensor


@dataclass(frozen=True)
class Rows:
    """Of one parameter.

    Attributes:
        dim: the dimension that is cut; rows, if it is the first.
        whole: of the unsharded value if that is a DTensor itself, else None.
        shape: of the unsharded value on this rank.
        spec: of the shard.
    """

    dim: int
    whole: DTensorSpec | None
    shape: torch.Size
    spec: DTensorSpec

    @property
    def is_plain(self) -> bool:
        """Whether modules see the engine's tensor itself."""
        return self.dim == 0 and self.whole is None

    def inward(self, tensor: Tensor) -> Tensor:
        """A view of a local tensor as the engine has it."""
        return tensor.movedim(self.dim, 0) if self.dim else tensor

    def outward(self, tensor: Tensor) -> Tensor:
        """A view of the engine's tensor as it is locally."""
        return tensor.movedim(0, self.dim) if self.dim else tensor

    def show(self, full: Tensor) -> Tensor:
        """The tensor of the modules: a view of the engine's leaf, made anew for each call."""
        local = self.outward(full)
        return local if self.whole is None else show_dtensor(local, self.whole)


def shard_rows(
    param: nn.Parameter, mesh: DeviceMesh, placement: Shard | None, device: torch.device
) -> tuple[nn.Parameter, Rows]:
    """A parameter of the same values and the full shape, of which each rank holds its part.

    Nothing is communicated: every rank takes its part of its own values.

    Args:
        placement: the dimension to cut; the first by default.
        device: of the part; a parameter on the meta device stays there.

    Raises:
        AssertionError: there is no such dimension.
        NotImplementedError: a dimension that is not the first and does not divide evenly.
        ValueError: a DTensor on a mesh of another device.
    """
    dim = _dim_of(param, placement)
    rows = Rows(dim, _whole(param, mesh), _local(param).shape, _spec(param, mesh, dim))
    part = _own_part(_local(param), mesh, dim)
    kept = param.device if param.is_meta else device
    with torch.no_grad():
        local = torch.empty_like(part, device=kept, memory_format=torch.contiguous_format)
        local.copy_(part)
        sharded = DTensor(local, rows.spec, requires_grad=False)
    return nn.Parameter(sharded, requires_grad=param.requires_grad), rows


def _local(param: Tensor) -> Tensor:
    return param._local_tensor.detach() if isinstance(param, DTensor) else param.detach()


def _dim_of(param: nn.Parameter, placement: Shard | None) -> int:
    dim = 0 if placement is None else placement.dim
    dim = dim + param.dim() if dim < 0 else dim
    if not 0 <= dim < param.dim():
        raise AssertionError(
            f"Shard dim {dim} is invalid for {param.dim()}D tensor: {list(param.shape)}"
        )
    return dim


def _own_part(full: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The part that torch.chunk gives this rank, a view; there may be none."""
    count, rank = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
    length = full.shape[dim]
    if dim > 0 and length % count != 0:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {full.size()} "
            f"(world size: {count})"
        )
    size = -(-length // count)
    begin = min(rank * size, length)
    return full.narrow(dim, begin, min(size, length - begin))


def _whole(param: nn.Parameter, mesh: DeviceMesh) -> DTensorSpec | None:
    if not isinstance(param, DTensor):
        return None
    theirs = param.device_mesh.device_type
    if theirs != mesh.device_type:
        raise ValueError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"{theirs} for DTensor and {mesh.device_type} for FSDP"
        )
    return param._spec


def _spec(param: nn.Parameter, mesh: DeviceMesh, dim: int) -> DTensorSpec:
    """Data parallelism's dimensions of the mesh, then those that the parameter has already."""
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    meta = TensorMeta(param.shape, param.stride(), param.dtype)
    whole = _whole(param, mesh)
    if whole is None:
        return DTensorSpec(mesh, (*placements, Shard(dim)), tensor_meta=meta)
    factor = whole.num_shards_map[dim]
    own = _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
    combined = _joined(mesh, whole.mesh)
    return DTensorSpec(combined, (*placements, own, *whole.placements), tensor_meta=meta)


def _joined(mesh: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Both meshes as one, as they were cut from it."""
    join: Any = getattr(DeviceMesh, "_concatenate", None)
    if join is not None:
        return cast(DeviceMesh, join([mesh, inner]))
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.12

    resources: Any = _mesh_resources
    names = (*(mesh.mesh_dim_names or ()), *(inner.mesh_dim_names or ()))
    return cast(DeviceMesh, resources.get_root_mesh(mesh)[names])
