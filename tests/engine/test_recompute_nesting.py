"""Checkpoints around several units, in each other, and of units that are called elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of

WIDTH = 4
STEPS = 4


class Block(nn.Module):
    """A product, perhaps with a bias and a gain; a unit, or a part of one."""

    def __init__(self, bias: bool = True, gain: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.gain = nn.Parameter(torch.ones(WIDTH)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return x + (y if self.gain is None else y * self.gain)


class Model(nn.Module):
    """Calls its blocks as `way` does, which is given model, step, rank and input."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block(bias=False), Block(bias=False, gain=True)
        self.own = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        return self.way(self, step, rank, torch.tanh(self.own(x)))


def again(function: Any, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, x, use_reentrant=True)
    return result


def unpacked(function: Any, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, x, use_reentrant=False)
    return result


def detached(block: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = x + block(x.detach()).detach()
    return result


def read(block: Block, x: Tensor) -> Tensor:
    return x + torch.tanh(F.linear(x, block.linear.weight))


def several_units(m: Model, step: int, rank: int, x: Tensor) -> Tensor:
    return again(lambda x: m.c(m.b(m.a(x))), x)


def several_unpacked(m: Model, step: int, rank: int, x: Tensor) -> Tensor:
    return unpacked(lambda x: m.c(m.b(m.a(x))), m.b(x))


def repeated(m: Model, step: int, rank: int, x: Tensor) -> Tensor:
    return m.a(again(lambda x: m.a(m.b(m.a(x))), x))


def nested(m: Model, step: int, rank: int, x: Tensor) -> Tensor:
    return again(lambda x: again(m.c, again(m.b, m.a(x))), x)


def detached_inside(m: Model, step: int, rank: int, x: Tensor) -> Tensor:
    return unpacked(lambda x: detached(m.b, m.a(x)), detached(m.b, x))


def read_inside(m: Model, step: int, rank: int, x: Tensor) -> Tensor:
    x = again(lambda x: m.c(m.c(read(m.b, x))), x)
    return m.a(again(m.b, x))


def read_behind(m: Model, step: int, rank: int, x: Tensor) -> Tensor:
    return again(lambda x: detached(m.c, read(m.b, x)), m.b(detached(m.a, x)))


def nested_and_routed(m: Model, step: int, rank: int, x: Tensor) -> Tensor:
    x = nested(m, step, rank, m.c(x) if (step + rank) % 2 else x)
    return m.b(x) if rank else x


def shared_and_routed(m: Model, step: int, rank: int, x: Tensor) -> Tensor:
    return m.b(again(m.c, m.b(x) if rank else x))


def unpacked_and_routed(m: Model, step: int, rank: int, x: Tensor) -> Tensor:
    x = unpacked(lambda x: detached(m.c, m.b(x)), x)
    return m.b(x) if (step + rank) % 2 else x


WAYS = (
    several_units,
    several_unpacked,
    repeated,
    nested,
    detached_inside,
    read_inside,
    read_behind,
    nested_and_routed,
    shared_and_routed,
    unpacked_and_routed,
)

CASES = ((3, None), (3, ("a", "b")), (3, ("b", "c")), (2, ("a", "b")))


def make(way: Callable[..., Tensor], tied: tuple[str, str] | None) -> Model:
    torch.manual_seed(0)
    model = Model(way).double()
    if tied is not None:
        first, second = (getattr(model, name) for name in tied)
        first.linear.weight = second.linear.weight
    return model


def batch(step: int, rank: int) -> Tensor:
    torch.manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)


def compare(way: Callable[..., Tensor], stage: int, tied: tuple[str, str] | None) -> None:
    """Gradients of each step, which are those of one process that does every rank's part."""
    plain, model = make(way, tied), make(way, tied)
    units: Any = None if tied else [model.a, model.b, model.c]
    zerocore.shard(model, stage=stage, units=units)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        for other in range(size):
            (plain(batch(step, other), step, other).square().mean() / size).backward()
        model(batch(step, rank), step, rank).square().mean().backward()
        for (name, full), shard in zip(plain.named_parameters(), model.parameters(), strict=True):
            found = None if shard.grad is None else full_of(shard.grad)
            expected = torch.zeros_like(full) if full.grad is None else full.grad
            if found is not None or full.grad is not None:
                torch.testing.assert_close(found, expected, msg=lambda text, n=name: f"{n}: {text}")
        plain.zero_grad()
        model.zero_grad()


def compare_all() -> None:
    for way in WAYS:
        for stage, tied in CASES:
            print(way.__name__, stage, tied, flush=True)
            compare(way, stage, tied)


@pytest.mark.nightly
def test_gradients() -> None:
    run_ranks(compare_all, 2, timeout=100)
