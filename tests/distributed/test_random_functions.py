"""Random functions of parameters and gradients, and random writes to their views, give plain
torch's values.

`python -m tests.distributed.test_random_functions FIRST COUNT [SHAPE ...]` tries other programs; a
SHAPE is a number of ranks.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.random_seeds import begin, parser_of, seeds_of, train_all, world_of
from tests.distributed.values import full_of

SHAPES = ("3", "4", "2", "1")
PROGRAMS_OF_A_SHAPE = 25
STEPS = 14
Value = Any  # a shard, a copy of a part, or a plain tensor


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [(5, 3), (7,), (3, 2, 3), (4, 4), (1,)]
        self.all = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        return sum((p * x).square().sum() for p in self.all)  # type: ignore[return-value]


VIEWS: list[Callable[[Value, random.Random], Value]] = [
    lambda t, r: t.t() if t.dim() == 2 else t.flatten(),
    lambda t, r: t.view(-1) if t.is_contiguous() else t.reshape(-1),
    lambda t, r: t[r.randrange(len(t))] if t.dim() else t,
    lambda t, r: t[r.randrange(len(t)) :] if t.dim() else t,
    lambda t, r: t[..., 0] if t.dim() else t,
    lambda t, r: t.unsqueeze(0),
    lambda t, r: t.chunk(2)[0] if t.dim() else t,
    lambda t, r: t.detach(),
    lambda t, r: t.data,
    lambda t, r: t.transpose(0, -1) if t.dim() > 1 else t,
    lambda t, r: t[::2] if t.dim() else t,
]
FUNCTIONS: list[Callable[[Value, random.Random], Value]] = [
    lambda t, r: t.exp().clamp(max=9),
    lambda t, r: t * 0.5 + 1,
    lambda t, r: t.sum(),
    lambda t, r: t.mean(0) if t.dim() else t,
    lambda t, r: t.norm(dim=-1, keepdim=True) if t.dim() else t,
    lambda t, r: t.norm(),
    lambda t, r: t.sort(-1).values if t.dim() else t,
    lambda t, r: t.cumsum(0) if t.dim() else t,
    lambda t, r: torch.cat([t.flatten(), t.flatten()]),
    lambda t, r: t.flatten().topk(min(2, t.numel())).values,
    lambda t, r: t @ t.t() if t.dim() == 2 else t.square(),
    lambda t, r: torch.where(t > 0, t, 0.1),
    lambda t, r: t - t.mean(-1, keepdim=True) if t.dim() else t,
    lambda t, r: t[t > t.median()],
    lambda t, r: t.clone(),
    lambda t, r: torch.zeros_like(t).add_(t),
    lambda t, r: torch.nn.functional.normalize(t, dim=0) if t.dim() else t,
]


def _set_item(t: Value, r: random.Random) -> None:
    if t.dim() and len(t):
        t[r.randrange(len(t))] = 0.25


def _set_mask(t: Value, r: random.Random) -> None:
    t[t > 0.5] = 0.5


def _copy(t: Value, r: random.Random) -> None:
    t.copy_(torch.arange(t.numel(), dtype=t.dtype).view(t.shape) * 0.1)


WRITES: list[Callable[[Value, random.Random], Any]] = [
    _set_item,
    _set_mask,
    _copy,
    lambda t, r: t.mul_(0.5),
    lambda t, r: t.zero_(),
    lambda t, r: t.clamp_(-0.3, 0.3),
    lambda t, r: t.add_(1.0),
    lambda t, r: t.fill_(r.random()),
    lambda t, r: t.sub_(t.mean()),
    lambda t, r: t.index_fill_(0, torch.tensor([0]), 2.0) if t.dim() and len(t) else t,
    lambda t, r: t.view(-1)[:1].mul_(3.0) if t.is_contiguous() else t,
    lambda t, r: t.copy_(t.sort(-1).values) if t.dim() else t,
]


def do(values: list[Value], seed: int, check: Callable[[str, int], None]) -> list[Value]:
    """Runs the seed's program on a growing list of values."""
    rng = random.Random(seed)
    for step in range(STEPS):
        kind = rng.choice([VIEWS, VIEWS, FUNCTIONS, WRITES, WRITES])
        number, index = rng.randrange(len(kind)), rng.randrange(len(values))
        state = rng.random()
        value = values[index]
        if value.numel() > 0:
            result = kind[number](value, random.Random(state))
            if kind is not WRITES:
                values.append(result)
        name = {id(VIEWS): "view", id(FUNCTIONS): "function", id(WRITES): "write"}[id(kind)]
        check(f"step {step}: {name} {number} of value {index}", step)
    return values


def start(model: Net) -> list[Value]:
    found: list[Value] = []
    for param in model.all:
        found += [param, param.grad, param.detach()]
    return found


def full(value: Value) -> Tensor:
    return full_of(value) if zerocore.is_sharded(value) else value.detach().clone()


def try_seed(seed: int) -> None:
    rng = random.Random(f"options {seed}")
    plain = Net(seed)
    model = zerocore.shard(deepcopy(plain), stage=rng.choice([1, 2, 3, 3]))
    begin(seed, "functions")
    for each in (plain, model):
        each(torch.tensor(0.5)).backward()
    expected: list[list[Tensor]] = []
    with torch.no_grad():
        values = start(plain)
        do(values, seed, lambda what, step: expected.append([v.clone() for v in values]))
        found = start(model)

        def check(what: str, step: int) -> None:
            for number, (value, right) in enumerate(zip(found, expected[step], strict=True)):
                text = f"seed {seed}, {what}: value {number}: "
                got = full(value)
                assert got.shape == right.shape, text
                torch.testing.assert_close(got, right, msg=lambda t, text=text: text + t)

        do(found, seed, check)
        torch.testing.assert_close(model(torch.tensor(0.5)), plain(torch.tensor(0.5)))
    model(torch.tensor(0.5)).backward()  # all ranks have written alike


def compare(seeds: range, shape: str) -> None:
    for seed in seeds:
        try_seed(seed)


@pytest.mark.parametrize("shape", SHAPES)
def test_random_functions(shape: str) -> None:
    seeds = seeds_of(SHAPES.index(shape), PROGRAMS_OF_A_SHAPE)
    run_ranks(compare, world_of(shape), seeds, shape, timeout=60.0 + 20.0 * len(seeds))


def main() -> bool:
    options = parser_of(__doc__, SHAPES).parse_args()
    return train_all(compare, options, options.shapes)


if __name__ == "__main__":
    sys.exit(not main())
