"""Backwards that come into a unit by another way than its outputs, or that never come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks

STEPS = 5
Loss = Callable[[Any, Tensor, int, int], Tensor]


class Router(nn.Module):
    """A block that keeps a loss as an attribute, made after its output."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.gate, self.score = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.main(x))
        self.aux = self.score(torch.tanh(self.gate(x))).square().mean()
        return y


class Routers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Router() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """Calls all experts and uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor, k: int) -> Tensor:
        h = self.inp(x)
        return self.out([expert(h) for expert in self.experts][k])


def auxiliary(model: Any, x: Tensor, step: int, rank: int) -> Tensor:
    return model(x).square().mean() + sum(block.aux for block in model.blocks)


def auxiliary_now_and_then(model: Any, x: Tensor, step: int, rank: int) -> Tensor:
    loss = model(x).square().mean()
    return loss + sum(block.aux for block in model.blocks) if step == 3 else loss


def auxiliary_instead(model: Any, x: Tensor, step: int, rank: int) -> Tensor:
    loss = model(x).square().mean()
    return model.blocks[1].aux if step == 3 else loss


def features(model: Any, x: Tensor, step: int, rank: int) -> Tensor:
    found: list[Tensor] = []
    handles = [
        block.gate.register_forward_hook(lambda module, args, out: found.append(out))
        for block in model.blocks
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return sum((feature.square().mean() for feature in found), torch.zeros(()))


def target_before(model: Any, x: Tensor, step: int, rank: int) -> Tensor:
    k = (rank + step) % 2
    target = model(x + 1, k).detach()
    return (model(x, k) - target).square().mean()


def target_after(model: Any, x: Tensor, step: int, rank: int) -> Tensor:
    k = (rank + step) % 2
    output = model(x, k)
    return (output - model(x + 1, k).detach()).square().mean()


LOSSES: dict[str, tuple[type[nn.Module], Loss]] = {
    "auxiliary": (Routers, auxiliary),
    "auxiliary_now_and_then": (Routers, auxiliary_now_and_then),
    "auxiliary_instead": (Routers, auxiliary_instead),
    "features": (Routers, features),
    "target_before": (Experts, target_before),
    "target_after": (Experts, target_after),
}


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def train_plain(name: str) -> dict[str, Tensor]:
    make, loss = LOSSES[name]
    torch.manual_seed(0)
    model, world_size = make(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(world_size):
            (loss(model, batch(step, rank), step, rank) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train_sharded(name: str, stage: int, prefetch: int) -> dict[str, Tensor]:
    make, loss = LOSSES[name]
    torch.manual_seed(0)
    model = zerocore.shard(
        make(), stage=stage, communication=zerocore.Communication(prefetch=prefetch)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss(model, batch(step, dist.get_rank()), step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zerocore.full_state_dict(model, rank0_only=False)


def compare(name: str) -> None:
    """Stage 3 always as it is by default, the rest on every other number of ranks."""
    expected = train_plain(name)
    others = ((0, 1), (2, 1), (3, 0)) if dist.get_world_size() % 2 else ((1, 1), (2, 1), (3, 3))
    for stage, prefetch in (*others, (3, 1)):
        print(f"{name} at stage {stage}, prefetch {prefetch}", flush=True)
        torch.testing.assert_close(
            train_sharded(name, stage, prefetch), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_one_process(name: str, world_size: int) -> None:
    run_ranks(compare, world_size, name, timeout=120)


def fail_in_backward(stage: int) -> None:
    """After it, `model.zero_grad()` clears the gradients that the optimizer sees."""
    torch.manual_seed(0)
    model = zerocore.shard(Routers(), stage=stage)
    x = batch(0, dist.get_rank())
    model(x).sum().backward()
    output = model(x)

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("planted")

    model.get_parameter("blocks.0.main.weight").register_hook(fail)
    with pytest.raises(ArithmeticError, match="planted"):
        output.sum().backward()
    assert all(zerocore.is_sharded(p) == (stage > 0) for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_failed_backward_leaves_shards_in_the_modules(stage: int) -> None:
    run_ranks(fail_in_backward, 2, stage)


def create_graph(unshards: bool) -> None:
    x = batch(0, dist.get_rank()).requires_grad_()
    torch.manual_seed(0)
    plain = Routers()
    torch.manual_seed(0)
    model = zerocore.shard(Routers(), stage=3)
    with zerocore.unsharded(model) if unshards else nullcontext():
        for each in (model, plain):
            (grad,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
    expected = plain.get_parameter("inp.weight").grad
    assert expected is not None
    dist.all_reduce(expected, dist.ReduceOp.SUM)
    found = model.get_parameter("inp.weight").grad
    assert isinstance(found, zerocore.tensor.ShardedGrad)
    torch.testing.assert_close(found.full_tensor(), expected / dist.get_world_size())


@pytest.mark.parametrize("unshards", [True, False])
def test_double_backward_at_stage_3(unshards: bool) -> None:
    run_ranks(create_graph, 2, unshards)
