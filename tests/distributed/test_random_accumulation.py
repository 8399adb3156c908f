"""Random sequences of backwards, with and without sync, through layers that ranks use or leave out.

`python -m tests.distributed.test_random_accumulation FIRST COUNT [SHAPE ...]` runs others; a SHAPE
is a number of ranks.
"""

from __future__ import annotations

import os
import random
import sys
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
PROGRAMS_OF_A_SHAPE = 12
PROGRAMS_BY_NIGHT = 100
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


def program_of(seed: int, world_size: int) -> list[Op]:
    """Backwards and what lies between them; a gradient is used only behind a sync."""
    rng, stage = random.Random(seed), seed % 4
    few = rng.random() < 0.5  # layers that all ranks use alike
    program: list[Op] = []
    for _ in range(rng.randint(3, 8)):
        held = rng.choice([0, 0, 1, 2])
        for number in range(held + 1):
            alike = tuple(each for each in range(LAYERS) if rng.random() < 0.5)
            chosen = tuple(
                alike if few else tuple(each for each in range(LAYERS) if rng.random() < 0.4)
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


class Trained:
    """A model that is sharded, or in one process that does every rank's part."""

    def __init__(self, seed: int, shape: str | None) -> None:
        self.seed, self.shape = seed, shape
        self.is_sharded = shape is not None
        self.ranks = [dist.get_rank()] if self.is_sharded else range(dist.get_world_size())
        self.start(seed % 4)

    def start(self, stage: int) -> None:
        torch.manual_seed(self.seed)
        self.model = Chosen()
        if self.shape is not None:
            units = random.Random(f"units {self.seed}").choice([None, ["Linear"]])
            options = options_of(self.seed, stage, self.shape)
            zerocore.shard(self.model, stage=stage, units=units, **options)
        kind = AdamW if self.is_sharded else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=0.1, weight_decay=0.5)

    def resume(self, number: int) -> None:
        """In another model, at another stage, without gradients."""
        if not self.is_sharded:
            self.optimizer.zero_grad()
            return
        values = zerocore.full_state_dict(self.model, rank0_only=False)
        states = zerocore.full_optimizer_state_dict(self.optimizer, rank0_only=False)
        trained = [param.requires_grad for param in self.model.parameters()]
        self.start(self.seed % 4 and 1 + (self.seed + number) % 3)
        for param, requires_grad in zip(self.model.parameters(), trained, strict=True):
            param.requires_grad_(requires_grad)
        zerocore.load_full_state_dict(self.model, values)
        self.optimizer.load_state_dict(states)

    def run(self, op: Op, number: int) -> None:
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
        for rank in self.ranks if op.kind == "backward" else ():
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number)) * (1 + rank)
            with zerocore.no_sync(self.model) if self.is_sharded and not op.sync else nullcontext():
                loss = self.model(x, op.chosen[rank])
                (loss if self.is_sharded else loss / dist.get_world_size()).backward()

    def shown(self) -> dict[str, Tensor]:
        """Gradients and weights, in full."""
        found: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            shown: list[Any] = [param, param.grad]
            if self.is_sharded:
                shown = [value if value is None else value.full_tensor() for value in shown]
            found[name] = shown[0]
            if shown[1] is not None:
                found[f"{name}.grad"] = shown[1].clone()
        return found


def compare(seeds: range, shape: str) -> None:
    os.environ[STALL_SECONDS] = "20"
    for seed in seeds:
        program = program_of(seed, world_of(shape))
        begin(seed, f"stage {seed % 4}, {program}")
        ours, right = Trained(seed, shape), Trained(seed, None)
        for number, op in enumerate(program):
            for each in (ours, right):
                each.run(op, number)
            held = op.kind == "backward" and not op.sync
            if not held and program[number - 1].sync:
                found, expected = ours.shown(), right.shown()
                assert found.keys() == expected.keys(), f"op {number}"
                torch.testing.assert_close(
                    found, expected, msg=lambda text, number=number: f"op {number}: {text}"
                )


@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_gradients_of_layers_that_ranks_leave_out(index: int) -> None:
    seeds = seeds_of(index, PROGRAMS_OF_A_SHAPE)
    run_ranks(compare, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=200)


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_more_gradients(index: int) -> None:
    seeds = seeds_of(index, PROGRAMS_BY_NIGHT, after=len(SHAPES) * PROGRAMS_OF_A_SHAPE)
    run_ranks(compare, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=400)


if __name__ == "__main__":
    options = parser_of(__doc__, SHAPES).parse_args()
    sys.exit(not train_all(compare, options, options.shapes))
