"""Programs whose parameters and gradients are views of larger tensors of their own.

Where shards copy the views, such a program is as in plain torch, or gets an error on each rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of, views_of
from zerocore.tensor.noted_writes import copied_views

MIXED = zerocore.MixedPrecision(torch.bfloat16)
KINDS: dict[str, dict[str, Any]] = {
    "0 with main weights": {"stage": 0, "mixed_precision": MIXED},
    "0 with offload": {"stage": 0, "offload": zerocore.Offload()},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3 with offload": {"stage": 3, "offload": zerocore.Offload()},
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def batch(step: int) -> Tensor:
    torch.manual_seed(step + 1)
    return torch.randn(4, 5)


def set_weights(params: list[Any], flat: Tensor) -> None:
    for p, view in zip(params, views_of(flat, params), strict=True):
        p.data = view


def set_grads(params: list[Any], flat: Tensor) -> None:
    for p, view in zip(params, views_of(flat, params), strict=True):
        p.grad = view


def flat_of(model: nn.Module) -> Tensor:
    full = zerocore.full_state_dict(model, rank0_only=False)
    return torch.cat([value.flatten() for value in full.values()])


def train(model: nn.Module) -> Tensor:
    loss = model(batch(0)).float().square().mean()
    loss.backward()
    return loss.detach()


def refused(kind: str) -> None:
    model = zerocore.shard(net(), **KINDS[kind])
    params: list[Any] = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    weights = flat_of(model)

    set_weights(params, weights)
    train(model)  # nothing has changed yet
    weights.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was set to a view .* stage=0"):
        model(batch(0))
    set_weights(params, weights)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"'0\.weight' .* one of the two has changed since"):
        model(batch(0))
    set_weights(params, weights.clone())

    optimizer.zero_grad()
    grads = torch.zeros_like(weights)
    set_grads(params, grads)
    loss = model(batch(0)).float().mean()
    with pytest.raises(RuntimeError, match=r"\.grad of parameter '0\.weight' .* zero_grad"):
        loss.backward()
    optimizer.zero_grad()
    train(model)
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_train_wrong_is_refused(kind: str) -> None:
    run_ranks(refused, 3, kind)


def refused_rows() -> None:
    model = net()
    zerocore.fsdp.fully_shard(model)
    params: list[Any] = list(model.parameters())
    weights = torch.randn(
        sum(p.numel() for p in params), generator=torch.Generator().manual_seed(0)
    )
    set_weights(params, weights)
    train(model)
    weights.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was set to a view of a larger tensor"):
        model(batch(0))
    set_weights(params, weights)
    with torch.no_grad():
        params[0].mul_(2)
    with pytest.raises(RuntimeError, match=r"'0\.weight' .* one of the two has changed since"):
        model(batch(0))


def test_rows_that_would_train_wrong_are_refused() -> None:
    run_ranks(refused_rows, 3)


def copied(kind: str) -> None:
    """Programs that use the larger tensor no more, or set the views again, are as under DDP."""
    model = zerocore.shard(net(), **KINDS[kind])
    plain = net()
    found: list[list[Any]] = [[], []]
    for losses, each in zip(found, (model, DistributedDataParallel(plain)), strict=True):
        params: list[Any] = list(each.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1)
        for _ in range(2):
            losses.append(train(each))
            flat = torch.cat([full_of(p.grad).flatten() for p in params])
            flat /= flat.norm()
            set_grads(params, flat)  # clipped by hand, all at once
            optimizer.step()
            optimizer.zero_grad()
        vector = parameters_to_vector(params).detach()
        for scale in (0.9, 0.8):  # a search along a line
            vector_to_parameters(vector * scale, params)
            losses.append(each(batch(1)).float().mean().detach())
        best = vector * 0.7
        vector_to_parameters(best, params)
        losses.append(each(batch(1)).float().mean().detach())
        best += 0.1
        vector_to_parameters(best, params)
        losses.append(each(batch(1)).float().mean().detach())
        del best, vector, flat
        losses.append(train(each))
        optimizer.step()
        losses.append(train(each))
    torch.testing.assert_close(*found)
    assert not copied_views  # no later pass looks at parameters again


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "main" not in kind])
def test_what_trains_right_is_not_refused(kind: str) -> None:
    run_ranks(copied, 2, kind)


def kept(kind: str) -> None:
    """A best vector that is restored, and flat gradients that zero_grad() drops, as under DDP."""
    model = zerocore.shard(net(), **KINDS[kind])
    found: list[list[Any]] = [[], []]
    for losses, each in zip(found, (model, DistributedDataParallel(net())), strict=True):
        params: list[Any] = list(each.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        best = parameters_to_vector(params).detach().clone()
        flat = torch.zeros_like(best)
        for _ in range(3):
            set_grads(params, flat)
            optimizer.zero_grad()
            losses.append(train(each))
            optimizer.step()
        vector_to_parameters(best, params)
        with torch.no_grad():
            losses += [each(batch(step)).float().mean() for step in range(2)]
        losses += [best, flat]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "main" not in kind])
def test_what_is_kept_and_not_worked_through(kind: str) -> None:
    run_ranks(kept, 2, kind)


def beside() -> None:
    """A backward of another model is not refused, while the gradient of this one is a view."""
    model, other = (zerocore.shard(torch.nn.Linear(4, 4), stage=2) for _ in range(2))
    flat = torch.zeros(20)
    model.weight.grad = flat[:16].view(4, 4)
    other(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"\.grad of parameter 'weight' was set to a view"):
        model(torch.ones(2, 4)).sum().backward()


def test_a_backward_of_another_model() -> None:
    run_ranks(beside, 2)
