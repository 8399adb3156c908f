"""Fused kernels as autograd.Functions in plain torch, for programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F


class LinearCrossEntropy(Function):
    """Head and loss in chunks; gradients are computed in forward (Liger)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        loss = hidden.new_zeros(())
        for rows in torch.arange(len(hidden)).split(4):
            logits = hidden[rows] @ weight.t()
            loss += F.cross_entropy(logits, target[rows], reduction="sum")
            slope = logits.softmax(-1)
            slope[torch.arange(len(rows)), target[rows]] -= 1
            grad_hidden[rows] = slope @ weight
            grad_weight += slope.t() @ hidden[rows]
        ctx.save_for_backward(grad_hidden / len(hidden), grad_weight / len(hidden))
        return loss / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        return grad * hidden, grad * weight, None


class RmsNorm(Function):
    """Liger's and mamba's norm: the residual is added first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = x + residual
        scale = (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        ctx.save_for_backward(total, weight, scale)
        return total * scale * weight, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> Any:
        total, weight, scale = ctx.saved_tensors
        normed, slope = total * scale, grad * weight
        inner = (slope * normed).mean(-1, keepdim=True)
        grad_in = scale * (slope - normed * inner) + grad_total
        return grad_in, grad_in, (grad * normed).flatten(0, -2).sum(0)


class SwiGlu(Function):
    """A gated layer with the weights of three linear layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate, up, down)
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            x, gate, up, down = inputs
            output = (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
        return torch.autograd.grad(output, inputs, grad)


class LoraLinear(Function):
    """A frozen weight and an adapter in one kernel (Unsloth)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, frozen, a, b)
        return x @ frozen.t() + (x @ a.t()) @ b.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, frozen, a, b = ctx.saved_tensors
        inner = grad @ b
        return grad @ frozen + inner @ a, None, inner.t() @ x, grad.t() @ (x @ a.t())


class Quantise(Function):
    """Rounds, and lets the gradient through."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return (weight * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
