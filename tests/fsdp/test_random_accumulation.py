"""Random sequences of backwards, with and without gradient sync: each gradient and each weight is
the one of FSDP2.

`python -m tests.fsdp.test_random_accumulation FIRST COUNT [SHAPE ...]` runs others; a SHAPE is a
number of ranks.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.random_seeds import begin, parser_of, seeds_of, train_all, world_of
from tests.distributed.test_random_accumulation import LAYERS, Chosen, Op
from zerocore.common.alarm import STALL_SECONDS

SHAPES = ("2", "3")
PROGRAMS_OF_A_SHAPE = 10


def program_of(seed: int, world_size: int) -> list[Op]:
    """Backwards and what lies between them; all ranks use the same layers."""
    rng = random.Random(seed)
    program: list[Op] = []
    for _ in range(rng.randint(3, 8)):
        held = rng.choice([0, 0, 1, 2])
        for number in range(held + 1):
            alike = tuple(each for each in range(LAYERS) if rng.random() < 0.6)
            if number > 0 and rng.random() < 0.25:
                program.append(Op(rng.choice(["zero_grad", "drop"])))
            program.append(Op("backward", number == held, (alike,) * world_size))
        program += [Op("toggle")] if rng.random() < 0.15 else []
        program += [Op("step")] if rng.random() < 0.6 else []
        program += [Op(rng.choice(["zero_grad", "zero_grad", "zeros"]))] * (rng.random() < 0.6)
    return program


class Trained:
    """A model of ``fully_shard`` of one of the two packages."""

    def __init__(self, seed: int, shard: Callable[..., Any], mesh: DeviceMesh) -> None:
        torch.manual_seed(seed)
        self.model: Any = Chosen()
        rng = random.Random(f"options {seed}")
        options = {"mesh": mesh, "reshard_after_forward": rng.random() < 0.5}
        for module in [self.model.first, *self.model.layers][rng.randrange(2) :]:
            shard(module, **options)
        shard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.5)

    def run(self, op: Op, number: int) -> None:
        if op.kind == "backward":
            rank = dist.get_rank()
            self.model.set_requires_gradient_sync(op.sync)
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number)) * (1 + rank)
            self.model(x, op.chosen[rank]).backward()
        elif op.kind == "step":
            self.optimizer.step()
        elif op.kind == "toggle":
            self.model.layers[1].requires_grad_(not self.model.layers[1].weight.requires_grad)
        elif op.kind == "drop":
            self.model.layers[-1].weight.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=op.kind == "zero_grad")

    def shown(self) -> dict[str, Tensor]:
        """Gradients and weights, in full."""
        found = {name: param.full_tensor() for name, param in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                found[f"{name}.grad"] = param.grad.full_tensor()
        return found


def compare(seeds: range, shape: str) -> None:
    os.environ[STALL_SECONDS] = "20"
    mesh = init_device_mesh("cpu", (world_of(shape),))
    for seed in seeds:
        program = program_of(seed, world_of(shape))
        begin(seed, str(program))
        systems = (zerocore.fsdp.fully_shard, fully_shard)
        ours, theirs = (Trained(seed, shard, mesh) for shard in systems)
        for number, op in enumerate(program):
            ours.run(op, number)
            theirs.run(op, number)
            found, expected = ours.shown(), theirs.shown()
            assert found.keys() == expected.keys(), f"op {number}"
            torch.testing.assert_close(
                found, expected, msg=lambda text, number=number: f"op {number}: {text}"
            )


@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_gradients_are_those_of_fsdp2(index: int) -> None:
    seeds = seeds_of(index, PROGRAMS_OF_A_SHAPE)
    run_ranks(compare, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=200)


if __name__ == "__main__":
    options = parser_of(__doc__, SHAPES).parse_args()
    sys.exit(not train_all(compare, options, options.shapes))
