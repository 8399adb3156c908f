"""Steps of the AdamW kernel, and what torch's fused one makes of the same tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kernels.cases import LARGE_SIZES, NARROW, SIZES, filled, ops

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
# (weight, gradient, model weight)
KINDS: list[tuple[torch.dtype, torch.dtype, torch.dtype | None]] = [
    *((F32, grad, model) for grad in NARROW for model in (None, BF16, F16)),
    *((weight, grad, None) for weight in (BF16, F16) for grad in NARROW),
    (F64, F64, None),
]
OPTIONS: list[dict[str, Any]] = [
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
    {"lr": 1e-2, "beta1": 0.3, "beta2": 0.95, "eps": 1e-5, "weight_decay": 0.0, "maximize": True},
]


@dataclass
class Lists:
    """The kernel's arguments."""

    weights: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    model_weights: list[Tensor]

    def all(self) -> list[list[Tensor]]:
        return [
            self.weights,
            self.grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.steps,
            self.model_weights,
        ]

    def clone(self) -> Lists:
        return Lists(*([tensor.clone() for tensor in tensors] for tensors in self.all()))

    def step(self, **options: Any) -> None:
        ops.adamw(*self.all(), **options)

    def step_of_torch(self, **options: Any) -> None:
        """Gradients are in the weights' dtype there, and casts are a pass of their own."""
        options = {"maximize": False, **options}
        grads = [g.to(w.dtype) for g, w in zip(self.grads, self.weights, strict=True)]
        for step in self.steps:
            step += 1
        moments = (self.exp_avgs, self.exp_avg_sqs)
        torch._fused_adamw_(self.weights, grads, *moments, [], self.steps, amsgrad=False, **options)
        for model, weight in zip(self.model_weights, self.weights, strict=False):
            model.copy_(weight)


def make_lists(
    count: int,
    device: str,
    weight: torch.dtype = F32,
    grad: torch.dtype = F32,
    model: torch.dtype | None = None,
) -> Lists:
    """`count` tensors of odd sizes at aligned and odd addresses, after some steps."""
    torch.manual_seed(count)
    rng = random.Random(count)
    lists = Lists([], [], [], [], [], [])
    for index in range(count):
        numel = rng.choice(LARGE_SIZES if index % 40 == 1 else SIZES)
        # All aligned, all shifted alike, or each in its own way.
        start = rng.choice((0, 1, 4, None))
        starts = [rng.choice((0, 1, 3, 8)) if start is None else start for _ in range(5)]
        lists.weights.append(filled(numel, weight, device, starts[0]))
        # Of 7 bits, so that torch's gradients in the weights' dtype are the same.
        lists.grads.append(filled(numel, grad, device, starts[1]).mul_(16).round_().div_(16))
        lists.exp_avgs.append(filled(numel, weight, device, starts[2]))
        lists.exp_avg_sqs.append(filled(numel, weight, device, starts[3]).square_().add_(0.01))
        lists.steps.append(torch.tensor(float(index % 3), device=device))
        if model is not None:
            lists.model_weights.append(filled(numel, model, device, starts[4]))
    return lists


def check_adamw(
    device: str,
    weight: torch.dtype,
    grad: torch.dtype,
    model: torch.dtype | None,
    count: int,
) -> None:
    """Two steps of either set of options agree with torch, to the last bits of the type."""
    for options in OPTIONS:
        own = make_lists(count, device, weight, grad, model)
        torchs = own.clone()
        for _ in range(2):
            own.step(**options)
            torchs.step_of_torch(**options)
        # Of model weights an ulp is much: they are compared with the weights.
        for found, expected in zip(own.all()[:-1], torchs.all()[:-1], strict=True):
            rtol = tolerance(weight)
            # Moments that were near 1 may nearly cancel: their last bits count, too.
            torch.testing.assert_close(found, expected, rtol=rtol, atol=max(1e-6, rtol / 8))
        for found, value in zip(own.model_weights, own.weights, strict=False):
            assert model is not None and torch.equal(found, value.to(model))


def tolerance(dtype: torch.dtype) -> float:
    """Some units in the last place, for devices that round in another order."""
    return 4 * torch.finfo(dtype).eps
