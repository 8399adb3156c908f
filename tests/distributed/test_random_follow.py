"""Random nets follow each other in random ways, as in one process.

`python -m tests.distributed.test_random_follow FIRST COUNT [SHAPE ...]` runs others; a SHAPE is a
number of ranks.
"""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.random_seeds import begin, parser_of, seeds_of, train_all, world_of
from tests.tensor.test_uneven_cuts import WAYS

SHAPES = ("2", "3", "4")
NETS_OF_A_SHAPE = 20


class Layer(nn.Module):
    """A layer around another one, so that units differ between nets of the same parameters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Other(nn.Module):
    """Another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Nets(nn.Module):
    """Two to three nets of the same shapes, of which the first is trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        sizes = [4, *(rng.randrange(1, 9) for _ in range(rng.randrange(1, 5)))]
        self.nets = nn.ModuleList()
        for _ in range(rng.randrange(2, 4)):
            layers: list[nn.Module] = []
            for size, following in pairwise(sizes):
                kinds = rng.choice([(), (Layer,), (Other,), (Layer, Other)])
                layer: nn.Module = nn.Linear(size, following)
                for kind in kinds:
                    layer = kind(layer)
                layers.append(layer)
            self.nets.append(nn.Sequential(*layers))
        self.nets[1:].requires_grad_(rng.random() < 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return sum((net(x) for net in self.nets[1:]), -self.nets[0](x)).square().mean()


def train(model: Any, seed: int) -> list[float]:
    rng = random.Random(seed + 1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step in range(3):
        loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            for _ in range(rng.randrange(1, 4)):
                target, source = rng.sample(list(model.nets), 2)
                rng.choice(WAYS)(list(target.parameters()), list(source.parameters()))
    return losses


def compare(seeds: range, shape: str) -> None:
    for seed in seeds:
        rng = random.Random(seed + 2)
        stage = rng.randrange(4)
        units: Any = rng.choice([None, [Layer], [Other], [nn.Linear], [nn.Sequential]])
        begin(seed, f"stage {stage}, units {units}")
        plain, sharded = Nets(seed), Nets(seed)
        present = {type(module) for module in sharded.modules()}
        if units and not present >= set(units):
            units = None
        zerocore.shard(sharded, stage=stage, units=units)
        torch.testing.assert_close(train(sharded, seed), train(plain, seed))
        found = zerocore.full_state_dict(sharded, rank0_only=False)
        torch.testing.assert_close(found, plain.state_dict())


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_random_nets_follow_each_other(index: int) -> None:
    seeds = seeds_of(index, NETS_OF_A_SHAPE)
    run_ranks(compare, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=200)


def main() -> bool:
    """Runs random nets and prints the seeds of those that went wrong."""
    options = parser_of(main.__doc__, SHAPES).parse_args()
    return train_all(compare, options, options.shapes)


if __name__ == "__main__":
    sys.exit(not main())
