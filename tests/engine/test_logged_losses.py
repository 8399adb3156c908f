"""A loss that is summed over the ranks between forward and backward, on routes that differ."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.distributed.harness import run_ranks, run_to_end
from zerocore.common.alarm import STALL_SECONDS


class Routes(nn.Module):
    """Each call goes through some of the experts, in an order that is this rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, route: tuple[int, ...]) -> Tensor:
        x = self.inp(x)
        for number in route:
            x = torch.tanh(self.experts[number](x))
        return x.square().mean()


def routes_of(step: int, rank: int, is_new: bool) -> tuple[int, ...]:
    """In each step one rank goes as all did in the first one; the others skip, or make calls that
    are new, several in a pass."""
    if step == 0 or rank == step % dist.get_world_size():
        return (0, 1) if is_new else (0, 1, 2, 3)
    if is_new:
        rng = random.Random(100 * step + rank)
        return tuple(rng.choices(range(4), k=rng.randrange(1, 6)))
    return [(0,), (1, 3), (2,), (0, 1, 2)][(rank + step) % 4]


def log(value: Tensor, number: int) -> float:
    """The mean over the ranks, by one collective or another."""
    value = value.detach().clone()
    if number % 3 == 0:
        dist.all_reduce(value)
        return value.item()
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    if number % 3 == 1:
        dist.all_gather(parts, value)
    else:
        dist.all_gather_object(parts, value)
    return torch.stack(parts).mean().item()


def train(model: Any, is_new: bool = False, logs: int = 1) -> list[float]:
    """In each step other collectives of the program's own follow the forward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(6):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(x, routes_of(step, dist.get_rank(), is_new))
        seen += [log(loss + more, more + step) for more in range(logs)]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def log_losses(is_new: bool, logs: int) -> None:
    os.environ[STALL_SECONDS] = "10"
    ddp = DistributedDataParallel(Routes(), find_unused_parameters=True)
    model = zerocore.shard(Routes(), stage=0, units=[nn.Linear])
    results = [train(each, is_new, logs) for each in (model, ddp)]
    torch.testing.assert_close(*results)
    found = zerocore.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(found, ddp.module.state_dict())


@pytest.mark.parametrize(("is_new", "logs"), [(False, 1), (True, 1), (True, 5)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_losses_are_logged_at_stage_0(world_size: int, is_new: bool, logs: int) -> None:
    run_ranks(log_losses, world_size, is_new, logs)


def log_too_early(stage: int, logs: int) -> None:
    os.environ[STALL_SECONDS] = "2"
    train(zerocore.shard(Routes(), stage=stage, units=[nn.Linear]), is_new=True, logs=logs)


@pytest.mark.parametrize(("stage", "world_size", "logs"), [(1, 2, 1), (3, 2, 3), (3, 4, 3)])
def test_the_alarm_names_a_log_that_comes_too_early(stage: int, world_size: int, logs: int) -> None:
    outcomes = run_to_end(log_too_early, world_size, stage, logs)
    errors = [outcome.error for outcome in outcomes]
    assert any("sum of a loss for the log" in (error or "") for error in errors), errors


def evaluate_alone() -> None:
    """At stage 0 an evaluation sends nothing."""
    plain, model = Routes(), zerocore.shard(Routes(), stage=0, units=[nn.Linear])
    x = torch.ones(1, 4)
    model(x, (0, 1)).backward()
    if dist.get_rank() == 0:
        with torch.no_grad():
            for route in ((0, 1), (3,), (2, 2)):
                torch.testing.assert_close(model(x, route), plain(x, route))
    dist.barrier()
    model(x, (0, 1)).backward()


def test_rank_0_evaluates_alone_at_stage_0() -> None:
    run_ranks(evaluate_alone, 2)
