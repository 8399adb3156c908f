"""Random module graphs of units with several regions; engines log what their streams do."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.by_night import by_night
from tests.plan.driver import Call, random_tree
from zerocore import _C
from zerocore.model.state import state_of

WIDTH = 4


class Block(nn.Module):
    """Two dtypes, a frozen and an unused parameter: several regions a unit."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        if rng.random() < 0.3:
            self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        if rng.random() < 0.2:
            self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor, inside: Call, root: Graph) -> Tensor:
        root.change_stream()
        y = root.run(inside, self.linear(x) * self.scale[0].float())
        if y.requires_grad:
            y.register_hook(lambda _: root.change_stream())
        return x + y.tanh()


class Graph(nn.Module):
    """Calls blocks as a tree of calls says; some of them checkpointed, some skipped."""

    def __init__(self, seed: int, num_units: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.calls = random_tree(rng, num_units)
        self.blocks = nn.ModuleList(Block(rng) for _ in range(num_units))
        self.reentrant = {u: rng.random() < 0.3 for u in range(num_units) if rng.random() < 0.4}
        self.skipped: set[int] = set()
        self.streams: random.Random | None = None  # draws the one that computes from here on

    def change_stream(self) -> None:
        if self.streams is not None:
            _C.set_logged_compute_stream(self.streams.randrange(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(tuple(self.calls), x)

    def run(self, calls: tuple[Call, ...], x: Tensor) -> Tensor:
        for unit, inside in calls:
            if unit in self.skipped:
                continue
            block = self.blocks[unit]
            if unit in self.reentrant and not inside:
                x = checkpoint(block, x, inside, self, use_reentrant=self.reentrant[unit])
            else:
                x = block(x, inside, self)
        return x


class Mesh:
    """Three replicas of two shards each, as a DeviceMesh of two dimensions says it."""

    ndim = 2
    mesh = torch.tensor([[0, 1], [2, 3], [4, 5]])

    def __init__(self) -> None:
        self.groups = [dist.new_group([1, 3, 5]), dist.new_group([0, 1])]

    def get_group(self, dimension: int) -> dist.ProcessGroup:
        return self.groups[dimension]


def train(model: Graph, seed: int, steps: int = 4) -> list[_C.HandOver]:
    """Steps with accumulation, evaluation, another order and skipped units; the log."""
    rng = random.Random(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = range(len(model.blocks))
    for _ in range(steps):
        num_micro_batches = rng.randint(1, 2)
        for micro_batch in reversed(range(num_micro_batches)):
            skipped = {u for u in units if rng.random() < 0.1}
            # A backward that meets no unit is not seen, and reduces nothing. A gradient of no_sync
            # that the last one does not come to stays each rank's own, which a step refuses.
            may_skip = num_micro_batches == 1 or micro_batch > 0
            model.skipped = skipped if may_skip and len(skipped) < len(units) else set()
            with zerocore.no_sync(model) if micro_batch else nullcontext():
                model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=rng.random() < 0.7)
        if rng.random() < 0.3:
            rng.shuffle(model.calls)
        if rng.random() < 0.2:
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
    return state_of(model).engine.hand_overs


POLICIES = (
    None,
    zerocore.MixedPrecision(torch.bfloat16, keep_fp32=("scale",)),
    zerocore.MixedPrecision(torch.bfloat16, torch.float32, keep_fp32=("scale",)),
)


def seeds(count: int) -> list[Any]:
    """Half of them by day, in which all options that shard() draws from a seed come as often."""
    return [seed if seed % 8 in (0, 1, 5, 6) else by_night(seed)[0] for seed in range(count)]


def shard(seed: int, stage: int, mesh: Mesh, regather: int | None = None, **options: Any) -> Graph:
    rng = random.Random(seed)
    accumulate = rng.choice(["sharded", "full"])
    graph = Graph(seed, rng.randint(1, 8))
    return zerocore.shard(
        graph,
        stage=stage,
        units=[Block],
        communication=zerocore.Communication(
            prefetch=seed % 5, accumulate=accumulate, regather=regather
        ),
        mixed_precision=POLICIES[seed % 3],
        group=mesh if seed % 4 == 0 else None,
        **options,
    )


def five_in_a_row() -> Graph:
    """Five blocks, each called once after the one before."""
    model = Graph(0, 5)
    model.calls, model.reentrant = [(unit, ()) for unit in range(5)], {}
    return model


def log_of_steps(
    model: Graph, make: type[torch.optim.Optimizer] = torch.optim.SGD, steps: int = 4
) -> tuple[list[_C.HandOver], int]:
    """The log of a sharded graph and of steps without anything unusual, and where they begin."""
    setup = len(state_of(model).engine.hand_overs)
    optimizer = make(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model).engine.hand_overs, setup
