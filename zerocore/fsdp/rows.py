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
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from zerocore._C import counted_view
from zerocore.fsdp.mesh import DataMesh
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
        if self.whole is None and not self.sums:
            return cast(Tensor, _Counted.apply(local, full))
        from zerocore.tensor.dtensors import show_dtensor, show_summed  # late: tensor parallelism

        if self.whole is None:
            return show_summed(local, self.sums)
        return show_dtensor(local, self.whole, self.reduced)


class _Counted(torch.autograd.Function):
    """A view of the engine's leaf that shares its version counter and its data counter."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, full: Tensor) -> Tensor:
        return counted_view(full, local)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
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
    if isinstance(param, DTensor):
        from zerocore.fsdp.tensor_parallel import check_whole, spec_beside  # late: most are plain

        reduced = check_whole(param._spec, name, data)
        return RowPlacement(dim, param._spec, shape, spec_beside(param._spec, data, dim), reduced)
    spec = data.spec(TensorMeta(param.shape, param.stride(), param.dtype), dim)
    sums: tuple[dist.ProcessGroup, ...] = ()
    if getattr(param, LOCAL_TYPE, None):
        from zerocore.fsdp.annotations import annotation_of  # late: few programs have spmd_types
        from zerocore.fsdp.tensor_parallel import spec_with

        inner, sums = annotation_of(param, name, data)
        spec = spec if inner is None else spec_with(inner, data, dim)
    elif data.spmd is not None:
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD "
            f"mesh (e.g. via distribute_module). Got plain tensor for parameter '{name}'."
        )
    return RowPlacement(dim, None, shape, spec, sums=sums)


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
