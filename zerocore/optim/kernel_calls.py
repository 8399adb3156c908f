"""The kernel calls of an optimizer step, kept while the same parameters have gradients."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore.optim.flat_states import State
from zerocore.tensor.parameter import ShardedParameter

_HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass
class Batch:
    """Tensors that one call of the kernel updates: one group, device, and dtype of each kind."""

    group: dict[str, Any]
    device: torch.device
    indices: list[int] = field(default_factory=list)  # among all parameters
    weights: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    model_weights: list[Tensor] = field(default_factory=list)
    # Those that are written by a pass of their own: not a half type beside float32.
    other_casts: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, index: int, param: Tensor, state: State, model_weight: Tensor | None) -> None:
        self.indices.append(index)
        self.weights.append(param)
        self.exp_avgs.append(state["exp_avg"])
        self.exp_avg_sqs.append(state["exp_avg_sq"])
        self.steps.append(state["step"])
        if model_weight is None:
            return
        if param.dtype == torch.float32 and model_weight.dtype in _HALF_TYPES:
            self.model_weights.append(model_weight)
        else:
            self.other_casts.append((model_weight, param.detach().view(model_weight.shape)))

    def run(
        self, grads: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """One step; ``grads`` are those of all parameters."""
        group = self.group
        lr, lr_tensor = group["lr"], None
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            lr, lr_tensor = 0.0, _scalar_on(self.device, lr)
        beta1, beta2 = group["betas"]
        torch.ops.zerocore.adamw(
            self.weights,
            [grads[index] for index in self.indices],
            self.exp_avgs,
            self.exp_avg_sqs,
            self.steps,
            self.model_weights,
            lr=float(lr),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            lr_tensor=lr_tensor,
            grad_scale=_scalar_on(self.device, grad_scale),
            found_inf=_scalar_on(self.device, found_inf),
        )
        for model_weight, weight in self.other_casts:
            model_weight.copy_(weight)


# Gradients on a device whose squares are summed over the ranks of a group (None: each rank has
# all). A group is here without gradients too: other ranks may have some, and would wait.
Squares = dict[tuple[dist.ProcessGroup | None, torch.device], list[int]]


@dataclass
class UpdatePlan:
    """The calls of a step, and what else it needs to know."""

    kinds: list[torch.dtype | None]  # of all parameters' gradients
    num_states: int  # of the optimizer, when the plan was made
    batches: list[Batch]
    squares: Squares


def make_plan(
    groups: Sequence[dict[str, Any]],
    grads: Sequence[Any],
    kinds: list[torch.dtype | None],
    states: Mapping[Any, State],
) -> UpdatePlan:
    """The plan for the gradients of all parameters, in order; None where there is no gradient."""
    batches: dict[Hashable, Batch] = {}
    places = [(param, group) for group in groups for param in group["params"]]
    squares = squares_of([param for param, _ in places], grads)
    for index, ((param, group), grad) in enumerate(zip(places, grads, strict=True)):
        if grad is None:
            continue
        model_weight = getattr(param, "model_weight", None)
        model_dtype = None if model_weight is None else model_weight.dtype
        key = (id(group), param.device, param.dtype, kinds[index], model_dtype)
        batch = batches.setdefault(key, Batch(group, param.device))
        batch.add(index, param, states[param], model_weight)
    return UpdatePlan(kinds, len(states), list(batches.values()), squares)


def squares_of(params: Sequence[Tensor], grads: Sequence[Any]) -> Squares:
    """Which gradients' squares are summed where, by their numbers."""
    squares: Squares = {}
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        group = param.place.group if isinstance(param, ShardedParameter) else None
        found = squares.setdefault((group, param.device), [])
        if grad is not None:
            found.append(index)
    return squares


def _scalar_on(device: torch.device, number: Any) -> Tensor | None:
    """A tensor as float32 on the device, without waiting for it; None stays."""
    return None if number is None else number.to(device, torch.float32, non_blocking=True)


def global_norm(squares: Squares, grads: Sequence[Any]) -> Tensor:
    """2-norm of all gradients, float64; one all-reduce for each process group."""
    sums: list[Tensor] = []
    for (group, device), indices in squares.items():
        square = torch.zeros(2, dtype=torch.float64, device=device)
        torch.ops.zerocore.sum_of_squares(square, [grads[index] for index in indices])
        if group is not None:
            dist.all_reduce(square[:1], group=group)
        sums.append(square[0])
    return torch.stack([square.to(sums[0].device) for square in sums]).sum().sqrt()
