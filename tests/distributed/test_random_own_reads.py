"""Random modules that read their own parameters train as in one process that does every rank's
part.

`python -m tests.distributed.test_random_own_reads FIRST COUNT [SHAPE ...]` runs others; a SHAPE is
a number of ranks.
"""

from __future__ import annotations

import os
import random
import sys

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.own_reads import (
    READS,
    STEPS,
    Net,
    Reader,
    build,
    loss_of,
    make_optimizer,
    reference,
)
from tests.distributed.random_runs import Result
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

SHAPES = ("3", "4", "2", "2")
MODELS_OF_A_SHAPE = 125


def shard(net: Net, stage: int | str, seed: int) -> None:
    """Shards in place, with options of the seed."""
    rng = random.Random(f"options {seed}")
    if stage == "fsdp":
        mesh = mesh_of(1, dist.get_world_size())["shard"]
        for part in (*net.parts, net):
            zerocore.fsdp.fully_shard(part, mesh=mesh)
        return
    retain_last = stage != 3 or rng.random() < 0.5
    zerocore.shard(
        net,
        stage=stage,
        units=rng.choice([None, [Reader], [nn.Linear], [Reader, nn.Linear]]),
        communication=zerocore.Communication(
            prefetch=rng.randrange(3),
            reductions_in_flight=rng.randint(1, 3),
            retain_last=retain_last,
        ),
    )


def train(seed: int) -> Result:
    """This rank's part."""
    net, stage, is_joint = build(seed)
    begin(seed, f"stage {stage}, {[net.parts[call].reads for call in net.calls]}")
    shard(net, stage, seed)
    optimizer = make_optimizer(net)
    result = Result([[]])
    for step in range(STEPS):
        loss = loss_of(net, seed, step, dist.get_rank(), is_joint)
        result.numbers[0].append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if stage == "fsdp":
        options = StateDictOptions(full_state_dict=True)
        result.state = get_model_state_dict(net, options=options)
    else:
        result.state = zerocore.full_state_dict(net, rank0_only=False)
    return result


def compare(seeds: range, shape: str) -> None:
    """Trains the model of each seed."""
    os.environ[STALL_SECONDS] = "20"
    for seed, right in references(reference, seeds).items():
        check(train(seed), right, rtol=1e-7, atol=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_reads_of_own_parameters(index: int) -> None:
    seeds = seeds_of(index, MODELS_OF_A_SHAPE)
    run_ranks(compare, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=400)


def test_the_models_have_everything() -> None:
    built = [build(seed) for seed in range(len(SHAPES) * MODELS_OF_A_SHAPE)]
    assert {read for net, *_ in built for part in net.parts for read in part.reads} == set(READS)
    assert {stage for _, stage, _ in built} == {0, 2, 3, "fsdp"}


def main() -> bool:
    """Trains random models and prints the seeds of those that went wrong."""
    options = parser_of(main.__doc__, SHAPES).parse_args()
    return train_all(compare, options, options.shapes)


if __name__ == "__main__":
    sys.exit(not main())
