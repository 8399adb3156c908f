"""Optimizers that are no loops over elements, and mistakes with optimizers of shards."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zerocore
from tests.checkpoint.test_shard_files import parts_of
from tests.distributed.harness import run_ranks
from tests.distributed.training import compare_with_one_process
from tests.distributed.values import full_of


class Lamb(Optimizer):
    """With norms of parameters and updates, as published; states made by zeros_like."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                update = state["m"] / (state["v"].sqrt() + 1e-3) + 0.1 * p
                weight_norm, update_norm = p.norm(), update.norm()
                ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm, 1.0)
                p.add_(update * ratio / update_norm.clamp(min=1e-6), alpha=-group["lr"])


class Lion(Optimizer):
    """Through ``.data``, with state in plain tensors of the shape that it finds."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.003})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad.data
                    m = self.state[p].setdefault("m", torch.zeros(p.shape, dtype=p.dtype))
                    sign = (m * 0.9 + grad * 0.1).sign()
                    p.data.mul_(1 - group["lr"] * 0.1).add_(sign, alpha=-group["lr"])
                    m.mul_(0.99).add_(grad, alpha=0.01)


class Centred(torch.optim.SGD):
    """A subclass of an elementwise optimizer that is none."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sub_(p.grad.mean())
        return super().step(closure)


class Prodigy(Optimizer):
    """As prodigyopt: the step size is a quotient of sums over all parameters, read as numbers."""

    def __init__(self, params: Iterable[nn.Parameter], slice_p: int = 1) -> None:
        super().__init__(params, {"d": 1e-3, "numerator": 0.0, "slice_p": slice_p})

    def _observe(self, p: nn.Parameter, d: float, every: int) -> tuple[float, float]:
        grad, state = p.grad.data, self.state[p]  # type: ignore[union-attr]
        if not state:
            state["s"] = torch.zeros_like(p.data.flatten()[::every]).detach()
            state["p0"] = p.flatten()[::every].detach().clone()
            state["m"], state["v"] = (torch.zeros_like(p.data).detach() for _ in range(2))
        sliced = grad.flatten()[::every]
        gain = torch.dot(sliced, state["p0"].data - p.data.flatten()[::every]).item()
        state["m"].mul_(0.9).add_(grad, alpha=0.1 * d)
        state["v"].mul_(0.99).addcmul_(grad, grad, value=0.01 * d * d)
        state["s"].mul_(0.99).add_(sliced, alpha=1e3 * d * d)
        return 1e3 * d * d * gain, state["s"].abs().sum().item()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        d, params = group["d"], [p for p in group["params"] if p.grad is not None]
        sums = [self._observe(p, d, group["slice_p"]) for p in params]
        group["numerator"] = 0.99 * group["numerator"] + sum(gain for gain, _ in sums)
        group["d"] = max(d, group["numerator"] / sum(size for _, size in sums))
        for p in params:
            state = self.state[p]
            p.data.addcdiv_(state["m"], state["v"].sqrt().add_(d * 1e-3), value=-d)


def sliced_prodigy(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Prodigy(parameters, slice_p=11)


def centred(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Centred(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("make", [Lamb, Lion, centred, Prodigy, sliced_prodigy])
def test_other_optimizers_are_exact(stage: int, make: Callable[..., Optimizer]) -> None:
    run_ranks(compare_with_one_process, 3, "plain", stage, make)


def decayed_by_dim(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The filter that most training scripts have."""
    params = list(parameters)
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    assert all(group["params"] for group in groups)
    return torch.optim.AdamW(groups, lr=0.01)


def test_weight_decay_by_dimension(stage: int) -> None:
    run_ranks(compare_with_one_process, 3, "plain", stage, decayed_by_dim)


def model_with_gradients(stage: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = zerocore.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), stage=stage)
    model(torch.ones(2, 8)).square().sum().backward()
    return model


def refuse(stage: int) -> None:
    model = model_with_gradients(stage)
    with pytest.raises(ValueError, match=r"SparseAdam cannot update '0\.weight'.*AdamW"):
        torch.optim.SparseAdam(model.parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sparse_adam_is_refused_by_name(stage: int) -> None:
    run_ranks(refuse, 2, stage)


def fail_in_step(stage: int) -> None:
    """A step that raises leaves the rules of shards as they were."""
    model = model_with_gradients(stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(3, 3, 3)
    with pytest.raises(RuntimeError):
        optimizer.step()
    full = full_of(model[0].weight)
    with torch.no_grad():
        torch.testing.assert_close(model[0].weight.sum(), full.sum())


def test_a_step_that_raised(stage: int) -> None:
    run_ranks(fail_in_step, 2, stage)


def close(optimizer_name: str, stage: int) -> None:
    """A closure runs the model and reads parameters."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = zerocore.shard(copy.deepcopy(plain), stage=stage)
    x = torch.randn(6, 8)
    for each in (plain, model):
        optimizer: Any = getattr(torch.optim, optimizer_name)(each.parameters(), lr=0.1)

        def closure(each: nn.Module = each, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            penalty = sum(p.square().sum() for p in each.parameters())
            loss = each(x).square().mean() + 0.1 * penalty
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    state = zerocore.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


def test_closures(stage: int) -> None:
    run_ranks(close, 2, "SGD", stage)


def test_lbfgs(stage: int) -> None:
    run_ranks(close, 2, "LBFGS", stage)


def exchange_states(stage: int) -> None:
    """Each rank loads its own state; another rank's is refused, though it has the same size."""
    model = model_with_gradients(stage)
    for make in (torch.optim.AdamW, zerocore.optim.AdamW, Lamb):
        optimizer: Any = make(model.parameters())
        optimizer.step()
        file = io.BytesIO()
        torch.save(parts_of(optimizer.state_dict()), file)
        files: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(files, file.getvalue())
        own, other = dist.get_rank(), 1 - dist.get_rank()
        fresh: Any = make(model.parameters())
        fresh.load_state_dict(torch.load(io.BytesIO(files[own])))
        fresh.step()
        states = torch.load(io.BytesIO(files[other]))
        if stage == 0:
            fresh.load_state_dict(states)
        else:
            with pytest.raises(ValueError, match=r"'0\.weight', elements \d+:\d+"):
                fresh.load_state_dict(states)
        if stage == 0:
            continue
        reordered = make(reversed(list(model.parameters())))
        with pytest.raises(ValueError, match=r"'0\.weight'.*'1\.bias'"):
            reordered.load_state_dict(torch.load(io.BytesIO(files[own])))


def test_states_of_other_ranks(stage: int) -> None:
    run_ranks(exchange_states, 2, stage)
