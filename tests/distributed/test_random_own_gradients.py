"""Random functions of parameters and gradients, at random places of a step: as DDP's, or an error.

`python -m tests.distributed.test_random_own_gradients FIRST COUNT [SHAPE ...]` runs others; a SHAPE
is a number of ranks.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.random_seeds import begin, parser_of, seeds_of, train_all, world_of
from tests.tensor.test_conversions import CONVERSIONS, compare, whole

SHAPES = ("2", "3", "4")
PROGRAMS_OF_A_SHAPE = 106
OPS = ("silent", "silent", "sync", "step", "zero", "clip", "clip_own", "read", "read", "scale")
READS: dict[str, Callable[[Any], Any]] = {
    **CONVERSIONS,
    "norm": lambda t: t.norm(),
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(),
    "max": lambda t: t.max(),
    "square": lambda t: (t * t + 1).square(),
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach() * 1,
    "data": lambda t: t.data + 0,
    "flat": lambda t: t.flatten().clone(),
    "row": lambda t: t[0],
    "matmul": lambda t: t @ t.T,
    "cat": lambda t: torch.cat([t.flatten(), t.flatten()]),
    "sort": lambda t: t.flatten().sort().values,
    "foreach_norm": lambda t: torch._foreach_norm([t])[0],
    "total_norm": lambda t: nn.utils.get_total_norm([t]),
    "vector": lambda t: nn.utils.parameters_to_vector([t]),
    "histc": lambda t: torch.histc(t),
}
ERRORS = (RuntimeError, TypeError, ValueError)


class Program:
    """One random program of a sharded model beside DistributedDataParallel."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.stage = self.rng.randrange(4)
        options: dict[str, Any] = {
            "communication": zerocore.Communication(accumulate=self.rng.choice(["sharded", "full"]))
        }
        torch.manual_seed(seed)
        sizes = [self.rng.choice([1, 3, 4, 17]) for _ in range(4)]
        self.width = sizes[0]

        def build() -> nn.Module:
            torch.manual_seed(seed)
            pairs = itertools.pairwise(sizes)
            layers = [nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairs]
            return nn.Sequential(*layers).double()

        self.model: Any = zerocore.shard(build(), stage=self.stage, **options)
        self.ddp: Any = DistributedDataParallel(build())
        self.both = (self.model, self.ddp)
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in self.both]
        self.is_alone = False

    def run(self) -> None:
        for number in range(self.rng.randint(4, 14)):
            getattr(self, self.rng.choice(OPS))(number)
            self.read(number)

    def silent(self, number: int) -> None:
        self.backward(number, alone=True)

    def sync(self, number: int) -> None:
        self.backward(number, alone=False)

    def backward(self, number: int, alone: bool) -> None:
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * number + dist.get_rank())
        x = torch.randn(2, self.width, generator=generator, dtype=torch.float64)
        for each, silent in zip(self.both, (zerocore.no_sync(self.model), self.ddp.no_sync())):  # noqa: B905
            with silent if alone else nullcontext():
                each(x).square().sum().backward()
        self.is_alone = alone

    def step(self, number: int) -> None:
        grads = [param.grad is not None for param in self.model.parameters()]
        if self.is_alone and self.stage > 0 and any(grads):
            with pytest.raises(RuntimeError, match="was not averaged"):
                self.optimizers[0].step()
            return
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self, number: int) -> None:
        for each in self.both:
            each.zero_grad()

    def clip(self, number: int) -> None:
        self.on_gradients(lambda each: nn.utils.clip_grad_norm_(each.parameters(), 0.5))

    def clip_own(self, number: int) -> None:
        self.on_gradients(
            lambda each: (
                zerocore.clip_grad_norm_(each, 0.5)
                if each is self.model
                else nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            )
        )

    def scale(self, number: int) -> None:
        self.on_gradients(
            lambda each: [p.grad.mul_(0.5) for p in each.parameters() if p.grad is not None][:0]
        )

    def on_gradients(self, change: Callable[[Any], Any]) -> None:
        try:
            found = change(self.model)
        except RuntimeError as error:
            assert "is held back" in str(error) and self.is_alone and self.stage > 0
            return
        right = change(self.ddp)
        torch.testing.assert_close(found, right, check_dtype=False, rtol=1e-5, atol=1e-5)

    def read(self, number: int) -> None:
        pairs = list(zip(self.model.parameters(), self.ddp.parameters(), strict=True))
        for _ in range(3):
            param, other = self.rng.choice(pairs)
            name, kind = self.rng.choice(list(READS)), self.rng.choice(["p", "detached", "grad"])
            with torch.set_grad_enabled(self.rng.random() < 0.3):
                assert (param.grad is None) == (other.grad is None)
                if kind == "p":
                    compare(f"{name} of p", READS[name], param, other)
                    # torch.asarray freezes what it was given before torch 2.13, and DDP stops
                    # averaging the others' gradients when a parameter is frozen later.
                    assert param.requires_grad == other.requires_grad
                    param.requires_grad_()
                    other.requires_grad_()
                elif kind == "detached":
                    compare(f"{name} of detached", READS[name], param.detach(), other.detach())
                elif param.grad is not None:
                    compare(f"{name} of grad", READS[name], param.grad, other.grad)
        for param, other in pairs:
            self.check(param.grad, other.grad)

    def check(self, grad: Any, right: Tensor | None) -> None:
        if grad is None:
            return
        try:
            found = whole(grad)
        except RuntimeError as error:
            assert "is held back" in str(error) and self.is_alone and self.stage > 0
            return
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-9)


def run_seeds(seeds: range, shape: str) -> None:
    """Runs the program of each seed."""
    for seed in seeds:
        program = Program(seed)
        begin(seed, f"stage {program.stage}")
        program.run()


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_random_programs(index: int) -> None:
    seeds = seeds_of(index, PROGRAMS_OF_A_SHAPE)
    run_ranks(run_seeds, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=600)


def main() -> bool:
    """Runs random programs and prints the seeds of those that went wrong."""
    options = parser_of(main.__doc__, SHAPES).parse_args()
    return train_all(run_seeds, options, options.shapes)


if __name__ == "__main__":
    sys.exit(not main())
