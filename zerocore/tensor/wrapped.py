"""Tensor classes around other tensors: classes of quantization libraries, and classes with
FSDP2's two all-gather functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


@dataclass(frozen=True)
class Wrapper:
    """A class around one plain tensor of the same shape and dtype."""

    kind: Any  # the class
    name: str  # its attribute with the tensor
    context: Any  # its other contents, from ``__tensor_flatten__``

    def around(self, plain: Tensor) -> Tensor:
        """Makes a tensor of the class around ``plain``, on its memory, without a gradient."""
        inner = {self.name: plain.detach()}
        wrapped: Tensor = self.kind.__tensor_unflatten__(
            inner, self.context, plain.shape, plain.stride()
        )
        return wrapped


def is_wrapped(tensor: Tensor) -> bool:
    """Whether the tensor's class is around other tensors."""
    return is_traceable_wrapper_subclass(tensor)


def wrapper_of(tensor: Tensor) -> Wrapper | None:
    """Returns the class around one plain tensor; None for several tensors, or a plain one."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    inner = getattr(tensor, names[0])
    alone = len(names) == 1 and (inner.shape, inner.dtype) == (tensor.shape, tensor.dtype)
    return Wrapper(type(tensor), names[0], context) if alone else None


def plain_part(tensor: Tensor) -> Tensor:
    """Returns the one tensor that the class is around; any other tensor unchanged."""
    wrapper = wrapper_of(tensor)
    return tensor if wrapper is None else getattr(tensor, wrapper.name)


def gathers_itself(fqn: str, tensor: Any) -> bool:
    """Whether a parameter gathers itself; AssertionError if it has only one of two functions."""
    defined = [hasattr(tensor, name) for name in (PRE, POST)]
    if any(defined) and not all(defined):
        raise AssertionError(
            f"parameter '{fqn}': both {PRE} and {POST} should be defined if using all-gather "
            f"extensions; {type(tensor).__name__} has one of them"
        )
    return all(defined)


def show_made(leaf: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns ``make(leaf)``, which modules see instead of the leaf; its gradient is the leaf's."""
    if leaf.requires_grad:
        shown: Tensor = _Made.apply(leaf, make)
        return shown
    with torch.no_grad():
        return nn.Parameter(make(leaf), requires_grad=False)


class _Made(torch.autograd.Function):
    """A tensor made from a leaf; its gradient goes to the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        return make(leaf)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if type(grad) is not Tensor:  # the parameter's class
            grad = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad)
        return grad, None


def own_chunk(full: Tensor, num_parts: int, part: int, dim: int = 0) -> Tensor:
    """Returns a copy of a rank's ``torch.chunk``, made with the operators that FSDP2 requires of a
    class around other tensors."""
    chunks = full.chunk(num_parts, dim)
    copied = full.new_zeros(chunks[0].shape)
    if part >= len(chunks):
        return copied.narrow(dim, 0, 0)
    chunk = chunks[part]
    if chunk.shape != copied.shape:
        copied = copied.narrow(dim, 0, chunk.shape[dim])
    copied.copy_(chunk)
    return copied
