"""Defines which part of a parameter a rank owns, and the tensor that the engine shards for it.

The engine takes plain tensors and cuts their first dimension. If a parameter is sharded in another
dimension, the engine's tensor has that dimension first. Of a parameter that tensor parallelism has
cut, the engine gets this rank's part. Modules see a view of the engine's full tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from zerocore._C import counted_view
from zerocore.fsdp.mesh import DataMesh
from zerocore.tensor.dtensors import show_dtensor, waited
from zerocore.tensor.wrapped import own_chunk

LOCAL_TYPE = "_local_type"  # set by spmd_types.assert_type


@dataclass(frozen=True)
class RowPlacement:
    """How one parameter is cut over the ranks."""

    dim: int  # the dimension that is cut; 0 means rows
    whole: DTensorSpec | None  # of the unsharded parameter, if it is a DTensor
    shape: torch.Size  # of the unsharded parameter on this rank
    spec: DTensorSpec  # of the shard
    reduced: tuple[int, ...] = ()  # dimensions of ``whole`` that the engine reduces gradients over
    sums: tuple[dist.ProcessGroup, ...] = ()  # groups that also sum a plain parameter's gradient

    @property
    def is_plain(self) -> bool:
        """Whether modules see the engine's tensor itself."""
        return self.dim == 0 and self.whole is None and not self.sums

    def inward(self, tensor: Tensor) -> Tensor:
        """Returns the engine's view of a local tensor."""
        return tensor.movedim(self.dim, 0) if self.dim else tensor

    def outward(self, tensor: Tensor) -> Tensor:
        """Returns the local view of the engine's tensor."""
        return tensor.movedim(0, self.dim) if self.dim else tensor

    def show(self, full: Tensor) -> Tensor:
        """Returns the tensor that modules see in a call: a new view of the engine's leaf."""
        local = self.outward(full)
        if self.sums:
            return cast(Tensor, _Summed.apply(local, self.sums))
        if self.whole is None:
            return cast(Tensor, _Counted.apply(local, full))
        return show_dtensor(local, self.whole, self.reduced)


class _Counted(torch.autograd.Function):
    """A view of the engine's leaf that shares its version counter and its data counter."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, full: Tensor) -> Tensor:
        return counted_view(full, local)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


class _Summed(torch.autograd.Function):
    """A view of a local tensor; its gradient is summed over groups of ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        ctx.groups = groups
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        for group in ctx.groups:
            grad = waited(functional.all_reduce(grad, "sum", group))
        return grad, None


def shard_rows(
    param: nn.Parameter, name: str, data: DataMesh, placement: Shard | None, device: torch.device
) -> tuple[nn.Parameter, RowPlacement]:
    """Returns a DTensor parameter of the same values and full shape, with this rank's part.

    Communicates nothing: every rank cuts its part from its own values, along the dimension of
    ``placement``, by default the first. The part goes to ``device``, unless it is on meta.

    Raises:
        AssertionError: there is no such dimension.
        NotImplementedError: a dimension other than the first that does not divide evenly.
        ValueError: a DTensor on a mesh of another device, or a parameter that does not fit the
            mesh of all parallelisms.
    """
    rows = _rows(param, name, data, _dim_of(param, placement))
    to = param.device if param.is_meta else device
    count, rank = data.num_shards, data.mesh.get_local_rank(data.mesh.ndim - 1)
    with torch.no_grad():
        full = _local(param)
        if rows.dim > 0 and full.shape[rows.dim] % count != 0:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {rows.dim}: {full.size()} "
                f"(world size: {count})"
            )
        if hasattr(full, "__tensor_flatten__"):
            local = own_chunk(full, count, rank, rows.dim).to(to)
        else:
            chunks = full.chunk(count, rows.dim)
            part = chunks[rank] if rank < len(chunks) else full.narrow(rows.dim, 0, 0)
            local = torch.empty_like(part, device=to, memory_format=torch.contiguous_format)
            local.copy_(part)
        dtensor = DTensor(local, rows.spec, requires_grad=False)
    sharded = nn.Parameter(dtensor, requires_grad=param.requires_grad)
    if param.is_leaf and param.grad_dtype != param.dtype:
        sharded.grad_dtype = param.grad_dtype
    return sharded, rows


def _rows(param: nn.Parameter, name: str, data: DataMesh, dim: int) -> RowPlacement:
    shape = _local(param).shape
    meta = TensorMeta(param.shape, param.stride(), param.dtype)
    if isinstance(param, DTensor):
        whole = param._spec
        reduced = _check_whole(whole, name, data)
        inner = whole if data.spmd is None else _inner(whole, data, reduced)
        return RowPlacement(dim, whole, shape, _spec(meta, data, inner, dim), reduced)
    if getattr(param, LOCAL_TYPE, None):
        from zerocore.fsdp.annotations import annotation_of  # late: few programs have spmd_types

        inner, sums = annotation_of(param, name, data)
        return RowPlacement(dim, None, shape, _spec(meta, data, inner, dim), sums=sums)
    if data.spmd is not None:
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD "
            f"mesh (e.g. via distribute_module). Got plain tensor for parameter '{name}'."
        )
    return RowPlacement(dim, None, shape, _spec(meta, data, None, dim))


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


def _check_whole(whole: DTensorSpec, name: str, data: DataMesh) -> tuple[int, ...]:
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


def _inner(whole: DTensorSpec, data: DataMesh, reduced: tuple[int, ...]) -> DTensorSpec | None:
    """Returns ``whole`` on the dimensions other than data parallelism's."""
    others = data.others
    if others is None:
        return None
    kept = tuple(entry for dim, entry in enumerate(whole.placements) if dim not in reduced)
    return DTensorSpec(others, kept, tensor_meta=whole.tensor_meta)


def _spec(meta: TensorMeta, data: DataMesh, inner: DTensorSpec | None, dim: int) -> DTensorSpec:
    """Returns a shard's spec: data parallelism's dimensions, and those that had cut it before."""
    placements: list[Placement] = [Replicate()] * (data.mesh.ndim - 1)
    if inner is None:
        return DTensorSpec(data.mesh, (*placements, Shard(dim)), tensor_meta=meta)
    meta = cast(TensorMeta, inner.tensor_meta)
    before = data.num_before
    # Shards along ``dim`` by the dimensions after data parallelism's; Shard covers those before.
    factor = inner.num_shards_map[dim]
    for index in range(before):
        if inner.placements[index].is_shard(dim):
            factor //= inner.mesh.size(index)
    data_shard = _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
    placed = (*inner.placements[:before], *placements, data_shard, *inner.placements[before:])
    return DTensorSpec(_whole_mesh(data, inner.mesh), placed, tensor_meta=meta)


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
