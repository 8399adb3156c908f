"""Backwards with create_graph: second and third derivatives are those of plain replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocore
import zerocore.fsdp as zerocore_fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of

WIDTH = 6


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Block(nn.Module):
    """An outer unit that reads its own parameter before and after its inner unit."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.inner = Inner()
        self.checkpoints = checkpoints

    def compute(self, x: Tensor) -> Tensor:
        return x + self.inner(x * self.gain) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)


class Net(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpoints) for _ in range(2))
        self.table = nn.Embedding(5, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inp(x)) + self.table(torch.arange(len(x)) % 5)
        for block in (*self.blocks, self.blocks[0]):  # one block twice
            x = block(x)
        return self.out(x)


def slope(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    return output, torch.autograd.grad(output.square().sum(), x, create_graph=True)[0]


def penalty(model: Any, x: Tensor) -> Tensor:
    output, first = slope(model, x)
    return output.mean() + (first.norm(dim=1) - 1).square().mean()


def between(model: Any, x: Tensor) -> Tensor:
    """Other passes between the forward and the second backward."""
    fake = model(x * 0.5).mean()
    loss = penalty(model, x)
    with torch.no_grad():
        model(x)
    return loss - fake + model(x + 1).mean()


def of_weights(model: Any, x: Tensor) -> Tensor:
    """Penalizes the norms of the parameters' gradients."""
    params = [p for p in model.parameters() if p.requires_grad]
    loss = model(x).square().mean()
    grads = torch.autograd.grad(loss, params, create_graph=True)
    return loss + sum(grad.square().sum() for grad in grads)


def thrice(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    value = model(x).square().sum()
    for _ in range(2):
        value = torch.autograd.grad(value, x, create_graph=True)[0].square().sum()
    return value * 1e-3


def kept(model: Any, x: Tensor) -> Tensor:
    """Two second backwards through the graph of one first backward."""
    _, first = slope(model, x)
    (other,) = torch.autograd.grad(first[0].sum(), model.blocks[1].gain, retain_graph=True)
    return first[1:].square().mean() + other.detach().norm() * 0


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "penalty": penalty,
    "between": between,
    "of_weights": of_weights,
    "thrice": thrice,
    "kept": kept,
}


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, loss_of: Callable[[Any, Tensor], Tensor], ranks: range) -> None:
    """Three steps, the second one of another loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(3):
        for rank in ranks:
            x = batch(step, rank)
            loss = model(x).mean() if step == 1 else loss_of(model, x)
            (loss / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(system: Any, checkpoints: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, loss_of in LOSSES.items():
        if system == "fsdp" and name in ("of_weights", "kept"):
            continue  # as FSDP2's, parameters of fully_shard are not in the graph
        print(name, flush=True)
        plain: Any = Net(checkpoints)
        model: Any = Net(checkpoints)
        if system == "fsdp":
            for block in model.blocks:
                zerocore_fsdp.fully_shard(block.inner)
                zerocore_fsdp.fully_shard(block)
            zerocore_fsdp.fully_shard(model)
        else:
            zerocore.shard(model, stage=system, units=[Block, Inner])
        train(plain, loss_of, range(size))
        train(model, loss_of, range(rank, rank + 1))
        for (key, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full_of(param), other, msg=lambda text, k=key: k + text)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("system", [1, 3, "fsdp"])
def test_second_derivatives(system: Any, world_size: int) -> None:
    run_ranks(compare, world_size, system, False)


@pytest.mark.parametrize("system", [3, "fsdp"])
def test_second_derivatives_through_checkpoints(system: Any) -> None:
    run_ranks(compare, 2, system, True)
