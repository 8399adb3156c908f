"""Random programs that train inside of a forward end as in one process that does every rank's part.

`python -m tests.distributed.test_random_inner_training FIRST COUNT [SHAPE ...]` runs others; a
SHAPE is a number of ranks.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.inner_training import (
    OPS,
    SPLITS,
    Case,
    Net,
    Op,
    Part,
    Player,
    build,
    case_of,
    every_op,
    reference,
)
from tests.distributed.random_seeds import (
    begin,
    check,
    parser_of,
    references,
    seeds_of,
    train_all,
    world_of,
)
from tests.distributed.test_random_graphs import mesh_of
from zerocore.common.alarm import STALL_SECONDS

SHAPES = ("2", "3", "2", "4")
PROGRAMS_OF_A_SHAPE = 110

FOUND = (
    # The two calls of the part are in one forward pass, although a backward comes between them.
    Case(
        100375,
        2,
        3,
        SPLITS[2],
        ("custom", "own_adamw", "sgd"),
        (Op("returned", "gen", 1, body=(Op("backward", "read"),)),),
    ),
    # The critic is frozen in the backward that follows one for inputs alone, and then trained.
    Case(
        100313,
        2,
        1,
        SPLITS[1],
        ("custom", "sgd"),
        (
            Op("toggle", which=1),
            Op("penalty", "critic"),
            Op("backward", "both"),
            Op("toggle", which=1),
            Op("backward", "both"),
            Op("step", which=1),
        ),
    ),
)


class ShardedPlayer(Player):
    """This rank's part of the program, by `zerocore.shard`."""

    def __init__(self, case: Case, net: Net) -> None:
        super().__init__(case, net, [dist.get_rank()])
        rng = random.Random(f"options {case.seed}")
        options: dict[str, Any] = {
            "communication": zerocore.Communication(
                prefetch=rng.randrange(3),
                reductions_in_flight=1 + case.seed % 3,
                registered=case.seed % 2 == 1,
                accumulate=rng.choice(["sharded", "sharded", "full"]),
                retain_last=case.stage != 3 or rng.random() < 0.3,
            )
        }
        if all(kind == "own_adamw" for kind in case.optimizers) and rng.random() < 0.5:
            options["offload"] = zerocore.Offload(states="cpu")
        units = rng.choice([None, [Part], [nn.Linear], [Part, nn.Linear]])
        zerocore.shard(net, stage=case.stage, units=units, **options)

    def own_adamw(self) -> Any:
        return zerocore.optim.AdamW

    def final_state(self) -> dict[str, Tensor]:
        return zerocore.full_state_dict(self.net, rank0_only=False)


class FsdpPlayer(ShardedPlayer):
    """The same by `zerocore.fsdp.fully_shard`."""

    def __init__(self, case: Case, net: Net) -> None:
        Player.__init__(self, case, net, [dist.get_rank()])
        mesh = mesh_of(1, dist.get_world_size())["shard"]
        for part in (net.gen, net.critic, net)[random.Random(case.seed).randrange(3) :]:
            zerocore.fsdp.fully_shard(part, mesh=mesh)

    def final_state(self) -> dict[str, Tensor]:
        return get_model_state_dict(self.net, options=StateDictOptions(full_state_dict=True))


def compare(seeds: range, shape: str) -> None:
    """Runs the program of each seed."""
    os.environ[STALL_SECONDS] = "20"
    for seed, right in references(reference, seeds).items():
        case = case_of(seed, world_of(shape))
        begin(seed, str(case))
        player = FsdpPlayer if case.stage == "fsdp" else ShardedPlayer
        check(player(case, build(seed)).run(), right, rtol=1e-7, atol=1e-9)


def compare_found() -> None:
    for case in FOUND:
        right = Player(case, build(case.seed), range(case.world_size)).run()
        player = ShardedPlayer(case, build(case.seed))
        check(player.run(), right, rtol=1e-7, atol=1e-9)


def test_programs_that_failed() -> None:
    run_ranks(compare_found, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_programs_that_train_inside_of_a_forward(index: int) -> None:
    seeds = seeds_of(index, PROGRAMS_OF_A_SHAPE)
    run_ranks(compare, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=600)


def test_the_programs_have_everything() -> None:
    cases = [case_of(seed, 2) for seed in range(len(SHAPES) * PROGRAMS_OF_A_SHAPE)]
    inside = [op.kind for case in cases for depth, op in every_op(case.ops) if depth > 0]
    assert set(inside) == {*OPS, "call", "returned"}
    assert {case.stage for case in cases} == {0, 1, 2, 3, "fsdp"}
    assert {len(case.split) for case in cases} == {1, 2, 3}


def main() -> bool:
    """Runs random programs and prints the seeds of those that went wrong."""
    options = parser_of(main.__doc__, SHAPES).parse_args()
    return train_all(compare, options, options.shapes)


if __name__ == "__main__":
    sys.exit(not main())
