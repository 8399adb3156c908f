"""After an exception in the middle of a step a model does what one without it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerocore
from zerocore.state import state_of

Events = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Words(nn.Module):
    """Its gradient is sparse while asked for, which a reduction refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


def make(stage: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Words(), nn.Linear(8, 8), nn.Linear(8, 8))
    return zerocore.shard(model, stage=stage, units=[Words, nn.Linear], prefetch=2)


def step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Events:
    with zerocore.record_events(model) as events:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(event.op, event.unit) for event in events]


@pytest.mark.parametrize("stage", range(4))
def test_a_backward_that_failed_in_a_reduction_leaves_nothing_behind(stage: int) -> None:
    model = make(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parameter '0.table.weight'.*Use sparse=False"):
            step(model, optimizer)
    model[0].table.sparse = False
    found = [step(model, optimizer) for _ in range(3)]
    untouched = make(stage)
    untouched[0].table.sparse = False
    optimizer = torch.optim.SGD(untouched.parameters(), lr=0.1)
    expected = [step(untouched, optimizer) for _ in range(3)]
    assert found[1:] == expected[1:]
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0
    for a, b in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(a, b)
