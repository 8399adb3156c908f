"""Hooks of parameters, and gradients that are assigned by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of as whole
from tests.tensor.test_reads import Net, full_gradients_of, make, seeded

F = nn.functional


def hook(stage: int) -> None:
    """A hook sees this rank's own full gradient before it is averaged, as under DDP."""
    model, plain = make(stage)
    seen: list[Tensor] = []
    model.blocks[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
    model.blocks[1].weight.register_hook(lambda grad: grad * 2)
    x = torch.randn(4, 6, generator=seeded(dist.get_rank()))
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(seen, [plain.blocks[0].weight.grad])
    mean = plain.blocks[1].weight.grad * 2
    dist.all_reduce(mean)
    found = full_gradients_of(model)["blocks.1.weight"]
    torch.testing.assert_close(found, mean / dist.get_world_size())


def test_hooks_of_parameters(stage: int) -> None:
    run_ranks(hook, 2, stage)


Change = Callable[[Tensor, Any, Tensor], Any]
MASKED: list[Change] = [
    lambda grad, shard, full: grad * full,
    lambda grad, shard, full: grad * shard,
    lambda grad, shard, full: shard * grad,
    lambda grad, shard, full: torch.where(shard, grad, 0.5),
    lambda grad, shard, full: grad.mul_(shard),
    lambda grad, shard, full: grad.masked_fill_(shard, 0.25),
    lambda grad, shard, full: grad.addcmul(shard.float(), grad * 2),
]


def mask(stage: int) -> None:
    """A mask of a shard, or of the full value, masks this rank's own full gradient."""
    torch.manual_seed(1)
    x = torch.randn(4, 6)
    for change in MASKED:
        model, plain = make(stage)
        for each in (model, plain):
            weight = each.blocks[0].weight
            positive = weight.detach() > 0
            full = whole(weight.detach()) > 0
            weight.register_hook(lambda grad, a=positive, b=full, c=change: c(grad, a, b))
            for _ in range(2):
                each(x).square().sum().backward()
        found = full_gradients_of(model)["blocks.0.weight"]
        torch.testing.assert_close(found, plain.blocks[0].weight.grad)


@pytest.mark.parametrize("world_size", [2, 3])
def test_masks_in_hooks(stage: int, world_size: int) -> None:
    run_ranks(mask, world_size, stage)


def return_a_shard() -> None:
    model, _ = make(3)
    weight = model.blocks[0].weight
    positive = weight.detach() > 0
    weight.register_hook(lambda grad: positive)
    with pytest.raises(TypeError, match=r"'blocks\.0\.weight'.*returned a shard"):
        model(torch.randn(4, 6)).square().sum().backward()


def test_a_hook_returns_a_full_gradient() -> None:
    run_ranks(return_a_shard, 2)


def hook_before(stage: int) -> None:
    """Hooks of the plain parameters are those of the sharded ones."""
    torch.manual_seed(0)
    plain = Net()
    model: Any = copy.deepcopy(plain)
    x = torch.randn(4, 6)
    fired: list[Any] = []
    for each in (plain, model):
        each.blocks[0].weight.register_hook(lambda grad: grad * 3)
        seen: list[Tensor] = []
        handle = each.head.weight.register_hook(lambda grad, seen=seen: seen.append(grad))
        after = each.blocks[1].weight.register_post_accumulate_grad_hook(fired.append)
        if each is model:
            zerocore.shard(model, stage=stage)
        for step in range(2):
            each.zero_grad()
            F.linear(each(x), each.head.weight).square().sum().backward()
            if step == 0:
                handle.remove()
                after.remove()
        assert len(seen) == 1
    assert len(fired) == 2 and fired[0] is plain.blocks[1].weight
    assert fired[1] is model.blocks[1].weight
    expected = {key: p.grad for key, p in plain.named_parameters()}
    torch.testing.assert_close(full_gradients_of(model), expected)


def test_hooks_registered_before_shard(stage: int) -> None:
    run_ranks(hook_before, 2, stage)


def assign(stage: int) -> None:
    """Gradients of torch.autograd.grad, averaged by hand, become those of the parameters."""
    model, plain = make(stage)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    xs = [torch.randn(4, 6, generator=seeded(1, r)) for r in range(world_size)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            params = list(each.parameters())
            losses = [each(x).square().mean() for x in (xs if each is plain else [xs[rank]])]
            loss = torch.stack(losses).mean()
            for p, g in zip(
                params, torch.autograd.grad(loss, params, allow_unused=True), strict=True
            ):
                g = torch.zeros(p.shape) if g is None else g
                if each is model:
                    dist.all_reduce(g)
                    g /= world_size
                p.grad = g
            optimizer.step()
            optimizer.zero_grad()
    state = zerocore.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
    (own,) = torch.autograd.grad(model(xs[rank]).square().mean(), [model.blocks[0].weight])
    if stage == 0:
        return  # the next pass compares it: tests/tensor/test_whole.py
    with pytest.raises(ValueError, match=r"'blocks\.0\.weight'.*differ.*dist\.all_reduce"):
        model.blocks[0].weight.grad = own


def test_assigned_gradients(stage: int) -> None:
    run_ranks(assign, 3, stage)
