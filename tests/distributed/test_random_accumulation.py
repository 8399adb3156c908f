"""Random sequences of backwards, with and without sync, through layers that ranks use or leave out.

`python -m tests.distributed.test_random_accumulation FIRST COUNT [SHAPE ...]` runs others; a SHAPE
is a number of ranks.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.random_seeds import begin, parser_of, seeds_of, train_all, world_of
from tests.distributed.test_random_graphs import options_of
from zerocore.common.alarm import STALL_SECONDS
from zerocore.optim import AdamW

SHAPES = ("2", "3", "2x2")
PROGRAMS_OF_A_SHAPE = 112
LAYERS = 3


class Chosen(nn.Module):
    """Calls the layers that it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(LAYERS))

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        y = self.first(x)
        return y.sum() + sum(self.layers[index](y).square().sum() for index in chosen)


@dataclass(frozen=True)
class Op:
    kind: str  # "backward", "toggle" (requires_grad), "drop" (one gradient), ...
    sync: bool = True
    chosen: tuple[tuple[int, ...], ...] = ()  # layers by rank


def program_of(seed: int, world_size: int, are_alike: bool = False) -> list[Op]:
    """Backwards and other operations between them. Gradients are used only after a sync.
    ``are_alike``: all ranks use the same layers; else in half of the programs they do."""
    rng, stage = random.Random(seed), seed % 4
    are_alike = rng.random() < 0.5 or are_alike
    program: list[Op] = []
    for _ in range(rng.randint(3, 8)):
        held = rng.choice([0, 0, 1, 2])
        for number in range(held + 1):
            alike = tuple(each for each in range(LAYERS) if rng.random() < 0.5)
            chosen = tuple(
                alike if are_alike else tuple(each for each in range(LAYERS) if rng.random() < 0.4)
                for _ in range(world_size)
            )
            if number > 0 and rng.random() < 0.25:
                program.append(
                    Op(rng.choice(["zero_grad", "zeros"] if stage == 0 else ["zero_grad"]))
                )
            program.append(Op("backward", number == held, chosen))
        program += [Op("toggle")] if rng.random() < 0.2 else []
        program += [Op("resume")] if rng.random() < 0.2 else []
        program += [Op("step")] if rng.random() < 0.6 else []
        program += [Op(rng.choice(["zero_grad", "zero_grad", "zeros"]))] * (rng.random() < 0.6)
    return program


class Player:
    """A model and its optimizer, and the ranks whose part this process does."""

    model: Any
    optimizer: torch.optim.Optimizer
    ranks: Sequence[int]

    def begin(self, model: nn.Module, optimizer: type[torch.optim.Optimizer]) -> None:
        self.model = model
        self.optimizer = optimizer(model.parameters(), lr=0.1, weight_decay=0.5)  # type: ignore[call-arg]

    def go_back(self, op: Op, rank: int, x: Tensor) -> None:
        (self.model(x, op.chosen[rank]) / len(self.ranks)).backward()

    def resume(self, number: int) -> None:
        """In another model, without gradients."""
        self.optimizer.zero_grad()

    def run(self, op: Op, number: int) -> None:
        for rank in self.ranks if op.kind == "backward" else ():
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number)) * (1 + rank)
            self.go_back(op, rank, x)
        if op.kind == "step":
            self.optimizer.step()
        elif op.kind == "resume":
            self.resume(number)
        elif op.kind == "toggle":
            self.model.layers[1].requires_grad_(not self.model.layers[1].weight.requires_grad)
        elif op.kind == "drop":
            self.model.layers[-1].weight.grad = None
        elif op.kind != "backward":
            self.optimizer.zero_grad(set_to_none=op.kind == "zero_grad")

    def shown(self) -> dict[str, Tensor]:
        """Gradients and weights, in full."""
        found = {name: full(param) for name, param in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                found[f"{name}.grad"] = full(param.grad)
        return found


def full(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()
    return found


class Reference(Player):
    """One process that does every rank's part."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.ranks = range(dist.get_world_size())
        self.begin(Chosen(), torch.optim.AdamW)


class Sharded(Player):
    """This rank's part, by ``zerocore.shard``."""

    def __init__(self, seed: int, shape: str) -> None:
        self.seed, self.shape = seed, shape
        self.ranks = [dist.get_rank()]
        self.start(seed % 4)

    def start(self, stage: int) -> None:
        torch.manual_seed(self.seed)
        units = random.Random(f"units {self.seed}").choice([None, ["Linear"]])
        options = options_of(self.seed, stage, self.shape)
        self.begin(zerocore.shard(Chosen(), stage=stage, units=units, **options), AdamW)

    def go_back(self, op: Op, rank: int, x: Tensor) -> None:
        with nullcontext() if op.sync else zerocore.no_sync(self.model):
            self.model(x, op.chosen[rank]).backward()

    def resume(self, number: int) -> None:
        """In another model, at another stage, without gradients."""
        values = zerocore.full_state_dict(self.model, rank0_only=False)
        states = zerocore.full_optimizer_state_dict(self.optimizer, rank0_only=False)
        trained = [param.requires_grad for param in self.model.parameters()]
        self.start(self.seed % 4 and 1 + (self.seed + number) % 3)
        for param, requires_grad in zip(self.model.parameters(), trained, strict=True):
            param.requires_grad_(requires_grad)
        zerocore.load_full_state_dict(self.model, values)
        self.optimizer.load_state_dict(states)


def compare(seeds: range, shape: str) -> None:
    os.environ[STALL_SECONDS] = "20"
    for seed in seeds:
        program = program_of(seed, world_of(shape))
        begin(seed, f"stage {seed % 4}, {program}")
        ours, right = Sharded(seed, shape), Reference(seed)
        for number, op in enumerate(program):
            ours.run(op, number)
            right.run(op, number)
            held = op.kind == "backward" and not op.sync
            if not held and program[number - 1].sync:
                found, expected = ours.shown(), right.shown()
                assert found.keys() == expected.keys(), f"op {number}"
                torch.testing.assert_close(
                    found, expected, msg=lambda text, number=number: f"op {number}: {text}"
                )


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_gradients_of_layers_that_ranks_leave_out(index: int) -> None:
    seeds = seeds_of(index, PROGRAMS_OF_A_SHAPE)
    run_ranks(compare, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=400)


if __name__ == "__main__":
    options = parser_of(__doc__, SHAPES).parse_args()
    sys.exit(not train_all(compare, options, options.shapes))
