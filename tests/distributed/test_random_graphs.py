"""Random models train as in one process that does every rank's part.

`python -m tests.distributed.test_random_graphs FIRST COUNT [RANKS]` tries more than the gate does.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import RanksFailed, run_ranks
from tests.distributed.random_graphs import WIDTH, build, choose_units, total_loss

NUM_GRAPHS = 40
NUM_STEPS = 4


def batch(seed: int, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)


def reference(seed: int, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of this rank and the parameters at the end, from one process."""
    model, clock, _ = build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        clock[0] = step
        for rank in range(world_size):
            clock[1] = rank
            loss = total_loss(model, batch(seed, step, rank))
            (loss / world_size).backward()
            if rank == dist.get_rank():
                losses.append(loss.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


def train(seed: int, stage: int, prefetch: int) -> tuple[list[float], dict[str, Tensor]]:
    model, clock, candidates = build(seed)
    clock[1] = dist.get_rank()
    options: dict[str, Any] = {"stage": stage, "prefetch": prefetch, "find_unused_parameters": True}
    try:
        zerocore.shard(model, units=choose_units(seed, candidates), **options)
    except ValueError as error:  # shared modules leave one of the chosen ones without parameters
        assert "units overlap" in str(error)
        zerocore.shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        clock[0] = step
        with nullcontext() if step % 2 else zerocore.no_sync(model):
            loss = total_loss(model, batch(seed, step, dist.get_rank()))
            loss.backward()
        losses.append(loss.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, zerocore.full_state_dict(model, rank0_only=False)


def compare(first: int, count: int) -> None:
    for seed in range(first, first + count):
        losses, state = reference(seed, dist.get_world_size())
        for stage in range(4):
            print(f"graph {seed} at stage {stage}", flush=True)  # shown if a rank fails
            found, found_state = train(seed, stage, prefetch=seed % 3)
            torch.testing.assert_close(found, losses, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(found_state, state, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("world_size", [1, 2, 3], indirect=True)
def test_random_graphs_train_as_one_process(world_size: int) -> None:
    run_ranks(compare, world_size, 0, NUM_GRAPHS, timeout=200)


def test_the_graphs_have_everything() -> None:
    plans = [
        what
        for seed in range(NUM_GRAPHS)
        for module in build(seed)[0].modules()
        for what, _ in getattr(module, "plan", nn.Identity()).__dict__.get("steps", ())
    ]
    wanted = {"call", "twice", "sometimes", "checkpoint", "reentrant", "read", "aux", "detach"}
    wanted.add("routed")
    assert set(plans) == wanted


if __name__ == "__main__":
    begin, number = (int(word) for word in sys.argv[1:3])
    ranks = int(sys.argv[3]) if len(sys.argv) > 3 else 2
    for seed in range(begin, begin + number, 10):
        try:
            run_ranks(compare, ranks, seed, 10, timeout=100)
            print(f"graphs {seed} to {seed + 9}: equal", flush=True)
        except RanksFailed as error:
            print(f"graphs from {seed}: {error}", flush=True)
