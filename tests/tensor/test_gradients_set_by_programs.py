"""Full gradients that a program sets are the same on all ranks, element by element, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from zerocore.common.agreement import ordered_sum


class Table(nn.Module):
    """A matrix of rows that only some tokens use, and vectors of one and of several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(64, 4))
        self.bias = nn.Parameter(torch.ones(2))
        self.scales = nn.Parameter(torch.ones(500))

    def forward(self, x: Tensor) -> Tensor:
        return (self.rows @ x).sum() + self.bias.sum() + self.scales.sum()


def rows_of(tokens: list[int]) -> Tensor:
    grad = torch.zeros(64, 4)
    grad[tokens] = 1.0
    return grad


def set_gradients(stage: int) -> None:
    rank = dist.get_rank()
    model: Any = zerocore.shard(Table(), stage=stage)
    others = [[0, 3], [1, 2], [3, 0], [2, 1]]  # with equal sums, of positions as well
    wrong = {
        "rows": rows_of(others[rank]),
        "bias": torch.tensor([1.0, 2.0]) if rank == 0 else torch.tensor([2.0, 1.0]),
        "scales": torch.arange(500.0).roll(rank),
    }
    right = {"rows": rows_of([1, 2]), "bias": torch.ones(2), "scales": torch.arange(500.0)}
    for name, param in model.named_parameters():
        with pytest.raises(ValueError, match=f"'{name}' was set to full gradients that differ"):
            param.grad = wrong[name]
        assert param.grad is None
        param.grad = right[name]
        assert torch.equal(full_of(param.grad), right[name]), name
        with pytest.raises(ValueError, match=f"'{name}' was set to full gradients that differ"):
            param.grad.data = wrong[name]
        assert torch.equal(full_of(param.grad), right[name]), name
        param.grad = torch.full_like(param.local(), 3.0)  # this rank's elements
        assert torch.equal(full_of(param.grad), torch.full_like(right[name], 3.0)), name


def full_of(shard: Any) -> Tensor:
    full: Tensor = shard.full_tensor()
    return full


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_that_differ_in_order(stage: int, world_size: int) -> None:
    run_ranks(set_gradients, world_size, stage)


def test_sums_know_positions() -> None:
    torch.manual_seed(0)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        bits = torch.zeros(3_000_000, dtype=dtype)
        seen = {int(ordered_sum(bits))}
        for pair in [(0, 3), (1, 2), (0, 2_999_999), (2**20, 5), (0, 2**20 + 5), (4096, 0)]:
            moved = bits.clone()
            moved[list(pair)] = torch.tensor(1.0, dtype=torch.float64).view(torch.int64).to(dtype)
            moved[list(pair)] += 1 if dtype != torch.int64 else 0
            seen.add(int(ordered_sum(moved)))
        assert len(seen) == 7, dtype
        numbers = torch.randint(-100, 100, (5000,)).to(dtype)
        assert int(ordered_sum(numbers)) == int(ordered_sum(numbers.clone()))
        assert int(ordered_sum(numbers)) != int(ordered_sum(numbers[torch.randperm(5000)]))
    assert int(ordered_sum(torch.zeros(0, dtype=torch.int32))) == int(
        ordered_sum(torch.zeros(0, dtype=torch.int8))
    )
