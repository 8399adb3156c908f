"""Long runs in which every rank routes as it likes: nothing grows, and agreed steps cost nothing.

`python -m tests.distributed.test_long_runs [STEPS]` runs 2,000 steps; the gate does fewer.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of

NUM_EXPERTS = 6
MEMORY_NBYTES = 8 << 20  # what allocators may take after the first third


class Routed(nn.Module):
    """Experts that are called in any order, any number of times, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(NUM_EXPERTS))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, way: list[int]) -> Tensor:
        for index in way:
            x = x + torch.tanh(self.experts[index](x))
        return self.head(x)


def sharded(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zerocore.shard(Routed(), stage=stage, units=["Linear"])
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, way: list[int]) -> None:
    model(torch.randn(2, 8), way).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def random_way(rng: random.Random) -> list[int]:
    """Mostly a subset in order; now and then any sequence."""
    if rng.random() < 0.8:
        return sorted(rng.sample(range(NUM_EXPERTS), rng.randint(0, NUM_EXPERTS)))
    return rng.choices(range(NUM_EXPERTS), k=rng.randint(0, NUM_EXPERTS))


def usage() -> dict[str, int]:
    """Resident bytes, threads and open files of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def route(stage: int, num_steps: int) -> list[dict[str, int]]:
    """Usage and what ranks have agreed on, after a third of the steps and after all of them."""
    model, optimizer = sharded(stage)
    rng = random.Random(dist.get_rank())
    found = []
    for number in range(1, num_steps + 1):
        step(model, optimizer, random_way(rng))
        if number in (num_steps // 3, num_steps):
            found.append(usage() | state_of(model).engine.agreed)
    return found


def check_growth(before: dict[str, int], after: dict[str, int], world_size: int) -> None:
    assert after["resident"] - before["resident"] < MEMORY_NBYTES
    assert (after["threads"], after["files"]) == (before["threads"], before["files"])
    # Each rank calls at most NUM_EXPERTS experts; the merged order has room for all of them.
    assert after["num_calls"] <= world_size * (NUM_EXPERTS + 1) + NUM_EXPERTS
    assert after["num_shapes"] <= 4096
    assert after["num_points"] <= 2 << 15


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "world_size"), [*by_night((0, 2)), (3, 3)])
def test_random_routing_does_not_grow(stage: int, world_size: int) -> None:
    for before, after in run_ranks(route, world_size, stage, 90, timeout=120, fresh=True):
        check_growth(before, after, world_size)


def steady(stage: int, leaves_out: bool, num_steps: int) -> list[int]:
    """How many collectives were compared after each step."""
    model, optimizer = sharded(stage)
    rng = random.Random(dist.get_rank())
    compared = []
    for _ in range(num_steps):
        some = sorted(rng.sample(range(NUM_EXPERTS), rng.randint(0, NUM_EXPERTS)))
        step(model, optimizer, some if leaves_out else [0, 3, 1, 3])
        compared.append(state_of(model).engine.agreed["num_compared"])
    return compared


def test_steady_training_compares_nothing(stage: int) -> None:
    """From the 18th step on: a point is known when the last 16 collectives have been seen."""
    for compared in run_ranks(steady, 2, stage, False, 30, fresh=True):
        assert 0 < compared[0] < compared[16]
        assert set(compared[17:]) == {compared[17]}


@pytest.mark.one_by_day
def test_layers_that_ranks_leave_out_are_not_compared(stage: int) -> None:
    for compared in run_ranks(steady, 3, stage, True, 40, fresh=True):
        assert set(compared[20:]) == {compared[20]}


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for at_stage in (3, 0):
        for first, last in run_ranks(route, 3, at_stage, number, timeout=500):
            print(f"stage {at_stage}, after {number // 3} and {number} steps: {first} {last}")
            check_growth(first, last, 3)
