"""A parameter that tensor parallelism has cut, as its module sees it: a DTensor."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def show_dtensor(
    local: Tensor, spec: DTensorSpec, reduced: tuple[int, ...] = (), *, sums: bool = False
) -> Tensor:
    """The DTensor over a local tensor, a view in autograd; made anew for each call.

    ``local`` is this rank's part, as the engine gathers it; the DTensor has its dtype and the rest
    of ``spec``. The engine reduces gradients as they are over dimensions ``reduced`` of the mesh;
    with ``sums`` they are summed over it later, so that each rank may give a summand.
    """
    return cast(Tensor, _Shown.apply(local, spec_as(spec, local.dtype), reduced, sums))


def spec_as(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The spec of a DTensor of another dtype."""
    meta = cast(TensorMeta, spec.tensor_meta)
    meta = TensorMeta(meta.shape, meta.stride, dtype)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


class _Shown(torch.autograd.Function):
    """The DTensor over a local tensor; its gradient is brought to the same placements."""

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
        return waited(grad._local_tensor), None, None, None


def _summand(grad: DTensor) -> Tensor:
    """This rank's term of a sum over the mesh, which is the gradient. Where all ranks have the
    gradient itself the first one gives it, so that the sum is exact."""
    if all(placement == Partial() for placement in grad.placements):
        return waited(grad._local_tensor)
    whole = grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
    full = waited(whole._local_tensor)
    return full if grad.device_mesh.get_local_rank() == 0 else torch.zeros_like(full)


def waited(tensor: Any) -> Any:
    """The result of a functional collective, once it has arrived."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
