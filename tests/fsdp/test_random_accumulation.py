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
from tests.distributed.test_random_accumulation import Chosen, Op, Player, program_of
from zerocore.common.alarm import STALL_SECONDS

SHAPES = ("2", "3")
PROGRAMS_OF_A_SHAPE = 10


class Trained(Player):
    """A model of ``fully_shard`` of one of the two packages."""

    def __init__(self, seed: int, shard: Callable[..., Any], mesh: DeviceMesh) -> None:
        torch.manual_seed(seed)
        self.ranks = [dist.get_rank()]
        model: Any = Chosen()
        rng = random.Random(f"options {seed}")
        options = {"mesh": mesh, "reshard_after_forward": rng.random() < 0.5}
        for module in [model.first, *model.layers][rng.randrange(2) :]:
            shard(module, **options)
        shard(model, **options)
        self.begin(model, torch.optim.AdamW)

    def go_back(self, op: Op, rank: int, x: Tensor) -> None:
        self.model.set_requires_gradient_sync(op.sync)
        self.model(x, op.chosen[rank]).backward()


def compare(seeds: range, shape: str) -> None:
    os.environ[STALL_SECONDS] = "20"
    mesh = init_device_mesh("cpu", (world_of(shape),))
    for seed in seeds:
        program = [op for op in program_of(seed, world_of(shape), True) if op.kind != "resume"]
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


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_gradients_are_those_of_fsdp2(index: int) -> None:
    seeds = seeds_of(index, PROGRAMS_OF_A_SHAPE)
    run_ranks(compare, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=200)


if __name__ == "__main__":
    options = parser_of(__doc__, SHAPES).parse_args()
    sys.exit(not train_all(compare, options, options.shapes))
