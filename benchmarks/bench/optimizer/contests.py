"""Contests of AdamW on large tensors: zerocore, torch, DeepSpeed and copies of as many bytes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import zerocore
from bench.kernels.contests import BF16, F32, OWN, Contest, plain_copies
from bench.lib.systems import is_installed
from bench.lib.timing import Call

LR = 1e-3
NUM_LARGE = 8


class Weights:
    """`NUM_LARGE` parameters with gradients, and model weights of dtype `model` if given."""

    def __init__(
        self, numel: int, device: str, grad: torch.dtype = F32, model: torch.dtype | None = None
    ) -> None:
        each = numel // NUM_LARGE
        self.params = [nn.Parameter(torch.randn(each, device=device)) for _ in range(NUM_LARGE)]
        self.model_weights: list[Tensor] = []
        for param in self.params:
            param.grad_dtype = None  # allows any dtype
            param.grad = torch.randn(each, device=device).to(grad)
            if model is not None:
                self.model_weights.append(torch.zeros(each, dtype=model, device=device))

    def zerocore_step(self) -> Call:
        """Returns a step in one pass, which also writes the model weights."""
        for param, model_weight in zip(self.params, self.model_weights, strict=False):
            param.model_weight = model_weight
        return zerocore.optim.AdamW(self.params, lr=LR).step

    def torch_step(self) -> Call:
        """Returns torch's fused step, with the casts that it needs before and after."""
        narrow = [param.grad for param in self.params]
        wide = [grad.to(F32) for grad in narrow]
        for param, grad in zip(self.params, wide, strict=True):
            param.grad = grad
        on_gpu = self.params[0].is_cuda
        optimizer = torch.optim.AdamW(self.params, lr=LR, fused=True, capturable=on_gpu)
        weights = [param.detach() for param in self.params]

        def step() -> None:
            if narrow[0].dtype != F32:
                torch._foreach_copy_(wide, narrow)
            optimizer.step()
            if self.model_weights:
                torch._foreach_copy_(self.model_weights, weights)

        return step

    def deepspeed_step(self) -> Call:
        """Returns DeepSpeed's fused Adam for GPUs or its vectorised one for CPUs, as AdamW."""
        adam: Any = importlib.import_module("deepspeed.ops.adam")
        make = adam.FusedAdam if self.params[0].is_cuda else adam.DeepSpeedCPUAdam
        return make(self.params, lr=LR, weight_decay=0.01, adamw_mode=True).step


def large_tensors(numel: int, device: str) -> Iterator[Contest]:
    """Yields contests of steps of `numel` parameters; bytes count one pass over them."""
    calls = {OWN: Weights(numel, device).zerocore_step()}
    calls["torch fused"] = Weights(numel, device).torch_step()
    if is_installed("deepspeed"):
        name = "DeepSpeed FusedAdam" if device == "cuda" else "DeepSpeedCPUAdam"
        calls[name] = Weights(numel, device).deepspeed_step()
    yield _contest("fp32", 28 * numel, calls, device)
    calls = {
        OWN: Weights(numel, device, model=BF16).zerocore_step(),
        "torch fused + cast": Weights(numel, device, model=BF16).torch_step(),
    }
    yield _contest("bf16 model weight", 30 * numel, calls, device)
    calls = {
        OWN: Weights(numel, device, grad=BF16, model=BF16).zerocore_step(),
        "cast + torch fused + cast": Weights(numel, device, grad=BF16, model=BF16).torch_step(),
    }
    yield _contest("bf16 grad, model weight", 28 * numel, calls, device)


def _contest(name: str, nbytes: int, calls: dict[str, Call], device: str) -> Contest:
    return Contest(name, NUM_LARGE, nbytes, calls | plain_copies(nbytes, device))
