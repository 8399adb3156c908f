"""Random writes to parameters are kept as DistributedDataParallel keeps them.

`python -m tests.distributed.test_random_writes FIRST COUNT [SHAPE ...]` runs others; a SHAPE is a
number of ranks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.random_seeds import begin, parser_of, seeds_of, train_all, world_of
from tests.distributed.random_writes import (
    FREE,
    PLACES,
    SPELLINGS,
    WIDTH,
    Block,
    Case,
    Net,
    Program,
    build,
    case_of,
)
from zerocore.common.alarm import STALL_SECONDS

SHAPES = ("2", "3", "2", "4")
PROGRAMS_OF_A_SHAPE = 137
UNITS: tuple[Any, ...] = (None, [Block], [Block, nn.Linear])


def run(case: Case, system: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of this rank and the full parameters at the end."""
    net = build(case)
    wrapped: Any = net
    if system == "ddp":
        wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    elif system == "fsdp":
        is_even = WIDTH % dist.get_world_size() == 0
        cut = in_columns if case.columns and is_even else None
        for module in reversed(list(net.modules())):
            if module is net or isinstance(module, (Block, nn.Linear)[: case.units]):
                zerocore.fsdp.fully_shard(module, shard_placement_fn=cut)
    else:
        zerocore.shard(net, stage=system, units=UNITS[case.units])
    losses = Program(case, net, wrapped, dist.get_rank()).run()
    if losses[-1] != losses[-1]:
        return losses, {}
    return losses, full_state(net, system)


def in_columns(param: nn.Parameter) -> Shard | None:
    return Shard(param.dim() - 1) if param.shape[-1] == WIDTH else None


def full_state(net: Net, system: Any) -> dict[str, Tensor]:
    if system == "ddp":
        return dict(net.state_dict())
    if system == "fsdp":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
        return get_model_state_dict(net, options=options)
    return dict(zerocore.full_state_dict(net, rank0_only=False))


def compare(seeds: range, shape: str) -> None:
    """Runs the program of each seed."""
    os.environ[STALL_SECONDS] = "20"
    for seed in seeds:
        case = case_of(seed)
        begin(seed, str(case))
        expected, state = run(case, "ddp")
        found, found_state = run(case, case.system)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, equal_nan=True)
        if dist.get_rank() == 0:
            torch.testing.assert_close(found_state, state, rtol=1e-7, atol=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_random_writes_are_those_of_ddp(index: int) -> None:
    seeds = seeds_of(index, PROGRAMS_OF_A_SHAPE)
    run_ranks(compare, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=600)


def test_the_writes_have_everything() -> None:
    cases = [case_of(seed) for seed in range(500)]
    writes = [write for case in cases for write in case.writes]
    assert {write.place for write in writes} == set(PLACES)
    assert {write.spelling for write in writes} == set(SPELLINGS)
    places = {(write.place, write.spelling in FREE) for write in writes}
    assert places >= {(place, True) for place in PLACES}


def main() -> bool:
    """Runs random programs and prints the seeds of those that went wrong."""
    options = parser_of(main.__doc__, SHAPES).parse_args()
    return train_all(compare, options, options.shapes)


if __name__ == "__main__":
    sys.exit(not main())
