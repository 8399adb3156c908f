"""Shows a parameter that tensor parallelism has cut as a DTensor to its module."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def show_dtensor(
    local: Tensor, spec: DTensorSpec, reduced: tuple[int, ...] = (), *, sums: bool = False
) -> Tensor:
    """Returns a DTensor over a local tensor, a view in autograd; each call needs a new one.

    ``local`` is this rank's part, as the engine gathers it. The DTensor has its dtype, and ``spec``
    otherwise. Over dimensions ``reduced`` of the mesh, the engine reduces gradients without a
    redistribution. With ``sums``, it sums them over the mesh, so each rank may return a summand.
    """
    return cast(Tensor, _Shown.apply(local, spec_as(spec, local.dtype), reduced, sums))


def show_summed(local: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    """Returns a view of a local tensor whose gradient is summed over groups of ranks."""
    return cast(Tensor, _Summed.apply(local, groups))


def spec_as(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Returns a spec with another dtype."""
    meta = cast(TensorMeta, spec.tensor_meta)
    meta = TensorMeta(meta.shape, meta.stride, dtype)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


class _Shown(torch.autograd.Function):
    """A DTensor over a local tensor; its gradient is redistributed to the same placements."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, spec: DTensorSpec, reduced: tuple[int, ...], sums: bool
    ) -> DTensor:
        ctx.placements, ctx.reduced, ctx.sums = spec.placements, reduced, sums
        return DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.sums:
            return _summand(grad), None, None, None
        wanted = tuple(
            grad.placements[dim] if dim in ctx.reduced else placement
            for dim, placement in enumerate(ctx.placements)
        )
        if tuple(grad.placements) != wanted:
            grad = grad.redistribute(placements=wanted)
        return _waited(grad._local_tensor), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        ctx.groups = groups
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        for group in ctx.groups:
            grad = _waited(all_reduce(grad, "sum", group))
        return grad, None


def _summand(grad: DTensor) -> Tensor:
    """Returns this rank's term of a sum over the mesh that yields the gradient. If all ranks have
    the gradient itself, only the first returns it, and the sum is exact."""
    if all(placement == Partial() for placement in grad.placements):
        return _waited(grad._local_tensor)
    whole = grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
    full = _waited(whole._local_tensor)
    return full if grad.device_mesh.get_local_rank() == 0 else torch.zeros_like(full)


def _waited(tensor: Any) -> Any:
    """Waits for a functional collective, and returns its result."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
