"""A sharded model has the methods of DistributedDataParallel, and says that it is sharded."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks

REDUCTIONS = ("reduce_scatter", "all_reduce")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def sample(number: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


@contextmanager
def by_flag(model: Any) -> Any:
    model.require_backward_grad_sync = False
    yield
    model.require_backward_grad_sync = True


WAYS = {"method": lambda model: model.no_sync(), "flag": by_flag}


def accumulate(model: Any, way: Any) -> None:
    """Three micro-batches, the last of which reduces."""
    for number in range(3):
        with way(model) if number < 2 else nullcontext():
            model(sample(number)).square().sum().backward()


def accumulate_as_ddp(stage: int, way: str) -> None:
    ddp = DistributedDataParallel(net())
    model: Any = zerocore.shard(net(), stage=stage, accumulate="full")
    for _ in range(2):
        for each in (ddp, model):
            assert each.require_backward_grad_sync is True
            each.zero_grad()
            accumulate(each, WAYS[way])
        for param, right in zip(model.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), right.grad)
    with zerocore.record_events(model) as held, WAYS[way](model):
        model(sample(0)).sum().backward()
        assert model.require_backward_grad_sync is False
    assert not any(event.op in REDUCTIONS for event in held)
    assert model.require_backward_grad_sync is True


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_held_back_as_by_ddp(stage: int, way: str) -> None:
    run_ranks(accumulate_as_ddp, 2, stage, way)


def ask_models() -> None:
    plain = net()
    assert not zerocore.is_sharded(plain)
    for stage in range(4):
        model = zerocore.shard(net(), stage=stage)
        holder = nn.ModuleList([model])
        assert zerocore.is_sharded(model) and zerocore.is_sharded(holder)
        assert zerocore.is_sharded(model[0]) and zerocore.is_sharded(model[0].weight)
    assert zerocore.is_sharded(zerocore.fsdp.fully_shard(net()))
    assert not zerocore.is_sharded(plain[0].weight)


def test_a_sharded_model_says_so() -> None:
    run_ranks(ask_models, 2)


class Named(nn.Linear):
    """Has a method of DDP's name that does something else."""

    def no_sync(self) -> str:
        return "its own"


def test_a_method_of_the_model_stays() -> None:
    assert zerocore.shard(Named(2, 2)).no_sync() == "its own"
