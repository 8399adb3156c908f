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
from tests.distributed.values import full_of

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
    model: Any = zerocore.shard(
        net(), stage=stage, communication=zerocore.Communication(accumulate="full")
    )
    for _ in range(2):
        for each in (ddp, model):
            assert each.require_backward_grad_sync is True
            each.zero_grad()
            accumulate(each, WAYS[way])
        for param, right in zip(model.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(full_of(param.grad), right.grad)
    with zerocore.reporting.record_events(model) as held, WAYS[way](model):
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
        assert zerocore.is_sharded(model[0])
        assert zerocore.is_sharded(model[0].weight) == (stage > 0)
    assert zerocore.is_sharded(zerocore.fsdp.fully_shard(net()))
    assert not zerocore.is_sharded(plain[0].weight)


def test_a_sharded_model_says_so() -> None:
    run_ranks(ask_models, 2)


class Buffered(nn.Linear):
    """Counts its calls in buffers, by its rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("own", torch.zeros(2))
        self.inner = nn.Module()
        self.inner.register_buffer("own", torch.zeros(2, dtype=torch.bfloat16))
        self._ddp_params_and_buffers_to_ignore = ["own"]

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x) + self.count + self.inner.own.sum()
        for buffer in self.buffers():
            buffer[..., :1].add_(dist.get_rank() + 1) if buffer.dim() else buffer.add_(1)
        return result


def change_buffers(stage: int) -> None:
    ddp, model = DistributedDataParallel(Buffered()), zerocore.shard(Buffered(), stage=stage)
    for number in range(6):
        is_training = number % 3 < 2
        seen = []
        for each in (ddp, model):
            inner = each.module if each is ddp else each
            if number == 3:
                inner.inner.register_buffer("late", torch.full((2,), dist.get_rank()))
            inner.inner.own += dist.get_rank()  # by hand, between calls
            with torch.set_grad_enabled(is_training):
                seen.append(each(sample(number)))
            if is_training:
                seen[-1].sum().backward()
        torch.testing.assert_close(*seen)
        torch.testing.assert_close(dict(model.named_buffers()), dict(ddp.module.named_buffers()))


def test_buffers_follow_rank_0_as_under_ddp(stage: int) -> None:
    run_ranks(change_buffers, 2, stage)


def send_an_expanded_buffer() -> None:
    """DistributedDataParallel refuses one."""
    layer = nn.Linear(4, 3)
    layer.register_buffer("rows", torch.full((2, 1), 1.0 + dist.get_rank()).expand(2, 3))
    model = zerocore.shard(layer)
    model(sample(0))
    assert model.rows.tolist() == [[1.0] * 3] * 2
    assert model.rows.stride() == (1, 0)


def test_an_expanded_buffer() -> None:
    run_ranks(send_an_expanded_buffer, 2)


def count_broadcasts() -> None:
    """A model without buffers sends nothing."""
    model = zerocore.shard(net(), stage=0)
    with torch.profiler.profile() as profile:
        model(sample(0)).sum().backward()
    calls = [event.name for event in profile.events()]
    assert not any("broadcast" in name for name in calls)


def test_nothing_is_sent_without_buffers() -> None:
    run_ranks(count_broadcasts, 2)


def average_by_hand(stage: int) -> None:
    """Another average of the gradients changes none of them, one by one or in a flat tensor."""
    model = zerocore.shard(net(), stage=stage)
    model(sample(0)).square().sum().backward()
    before = [full_of(param.grad) for param in model.parameters()]
    for param in model.parameters():
        dist.all_reduce(param.grad, dist.ReduceOp.AVG)
    flat = torch.cat([param.grad.view(-1) for param in model.parameters()])
    dist.all_reduce(flat)
    torch.testing.assert_close(flat / 2, torch.cat([grad.view(-1) for grad in before]))
    for param, grad in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(full_of(param.grad), grad)


def test_gradients_averaged_by_hand() -> None:
    for stage in (0, 1, 2, 3):
        run_ranks(average_by_hand, 2, stage)


class Named(nn.Linear):
    """Has a method of DDP's name that does something else."""

    def no_sync(self) -> str:
        return "its own"


def test_a_method_of_the_model_stays() -> None:
    assert zerocore.shard(Named(2, 2)).no_sync() == "its own"
