"""The engine on one rank and on the fake group: hooks, states, memory that is not read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

import zerocore
from tests.distributed.values import own_of
from zerocore.model.state import state_of

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).relu()


def make(num_blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


@pytest.fixture
def fake_group() -> Iterator[None]:
    """A group of 8 whose collectives do nothing: right counts and bytes, no numerics."""
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_computes_what_the_plain_model_does(stage: int) -> None:
    plain, sharded = make(), zerocore.shard(make(), stage=stage)
    x = torch.randn(4, 8)
    for model in (plain, sharded):
        model(x).sum().backward()
    for expected, actual in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(expected.grad.flatten(), own_of(actual.grad))
    assert zerocore.memory_usage(sharded).pool == 0


def test_shards_have_their_place(fake_group: None) -> None:
    model = zerocore.shard(make(), stage=3)
    layout = state_of(model).engine.layout(0)
    for index, param in enumerate(model[0].parameters()):
        assert isinstance(param, zerocore.ShardedParameter | nn.Parameter)
        owned = layout.owned(index, 3)
        assert param.shard_range == (owned.begin, owned.end)
        assert param.local().numel() == param.shard_range[1] - param.shard_range[0]


def test_repr_class_and_names_are_kept(fake_group: None) -> None:
    plain, model = make(), make()
    assert zerocore.shard(model, stage=3) is model
    assert repr(model) == repr(plain)
    assert isinstance(model[0], Block) and isinstance(model, nn.Sequential)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())


def test_modules_show_full_parameters_only_while_they_run(fake_group: None) -> None:
    model = zerocore.shard(make(), stage=3)
    seen = []
    model[1].linear.register_forward_pre_hook(
        lambda module, _: seen.append(isinstance(module.weight, zerocore.ShardedParameter))
    )
    model(torch.randn(2, 8))
    assert seen == [False]
    assert isinstance(model[1].linear.weight, zerocore.ShardedParameter)


@pytest.mark.skipif(TORCH < (2, 13), reason="before torch 2.13 it is a null pointer")
def test_reading_a_released_parameter_is_an_error(fake_group: None) -> None:
    model = zerocore.shard(make(), stage=3)
    kept: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda module, _: kept.append(module.linear.weight.t()))
    model(torch.randn(2, 8))
    with pytest.raises(RuntimeError, match=r"unit '0' were used while they are sharded"):
        kept[0].sum()


def test_saved_views_do_not_keep_the_slot(fake_group: None) -> None:
    model = zerocore.shard(make(6), stage=3)
    engine = state_of(model).engine
    unit = engine.layout(0).nbytes
    loss = model(torch.randn(2, 8)).sum()
    assert engine.pool_stats.in_use_nbytes == unit  # the last unit of the forward
    loss.backward()
    assert engine.pool_stats.in_use_nbytes == 0


def test_no_allocation_after_the_second_step(fake_group: None) -> None:
    model = zerocore.shard(make(6), stage=3)
    counts = []
    for _ in range(4):
        model(torch.randn(2, 8)).sum().backward()
        model.zero_grad()
        counts.append(state_of(model).engine.pool_stats.num_allocations)
    assert counts == [1] * 4  # the arena of the expected step
    for _ in range(5):  # gradients accumulate: what is reduced needs memory before it is added
        model(torch.randn(2, 8)).sum().backward()
        counts.append(state_of(model).engine.pool_stats.num_allocations)
    assert counts[4] == 1  # nothing to add to
    assert counts[-3:] == [counts[5] + 1] * 3  # one block each at first, then another arena


def test_a_model_is_freed() -> None:
    model = zerocore.shard(make(), stage=3)
    model(torch.randn(2, 8)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_moving_a_sharded_model_is_an_error() -> None:
    model = zerocore.shard(make())
    model.float()
    with pytest.raises(TypeError, match=r"torch\.float64.*before zerocore\.shard"):
        model.double()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_an_exception_works(fake_group: None, stage: int, where: str) -> None:
    model = zerocore.shard(make(), stage=stage)
    fail = [True]

    def interrupt(*_: object) -> None:
        if fail[0]:
            raise KeyError("on purpose")

    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        if where == "forward":
            interrupt()
        else:
            output.register_hook(interrupt)

    model[1].linear.register_forward_hook(hook)
    with pytest.raises(KeyError, match="on purpose"):
        model(torch.randn(2, 8)).sum().backward()
    fail[0] = False
    model(torch.randn(2, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    zerocore.reset(model)
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0


class Twice(torch.autograd.Function):
    """Returns the weight's gradient as two tensors, which a reduction refuses."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return TwoTensor(grad, grad)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        weight = Twice.apply(self.table.weight) if self.fails else self.table.weight.clone()
        return nn.functional.embedding(x, weight)


def make_with_words(stage: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Words(), nn.Linear(8, 8), nn.Linear(8, 8))
    return zerocore.shard(
        model,
        stage=stage,
        units=[Words, nn.Linear],
        communication=zerocore.Communication(prefetch=2),
    )


def recorded_step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    with zerocore.reporting.record_events(model) as events:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(event.op, event.unit) for event in events]


@pytest.mark.parametrize("stage", range(4))
def test_a_backward_that_failed_in_a_reduction_leaves_nothing_behind(
    fake_group: None, stage: int
) -> None:
    model = make_with_words(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parameter '0.table.weight'.*is a tensor subclass"):
            recorded_step(model, optimizer)
    model[0].fails = False
    found = [recorded_step(model, optimizer) for _ in range(3)]
    untouched = make_with_words(stage)
    untouched[0].fails = False
    optimizer = torch.optim.SGD(untouched.parameters(), lr=0.1)
    expected = [recorded_step(untouched, optimizer) for _ in range(3)]
    assert found[1:] == expected[1:]
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0
    for a, b in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(a, b)
