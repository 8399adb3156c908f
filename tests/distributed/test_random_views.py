"""Parameters in one storage are one parameter, two, or an error by both names, on every rank.

`python -m tests.distributed.test_random_views FIRST COUNT [SHAPE ...]` tries other models; a SHAPE
is a number of ranks.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.random_seeds import begin, parser_of, seeds_of, train_all, world_of
from tests.distributed.shared_memory import RELATIONS, Case, Net, build, case_of, train
from tests.distributed.test_random_graphs import mesh_of
from zerocore.common.alarm import STALL_SECONDS

SHAPES = ("3", "4", "1", "2")
MODELS_OF_A_SHAPE = 125
WORDS = {
    "refused": (ValueError, "share memory"),
    "not contiguous": (NotImplementedError, "non-contiguous"),
    "in two groups": (ValueError, "is shared with a parameter already managed"),
}


def shard(net: Net, case: Case) -> None:
    """Shards in place; raises at the first forward, too, where `fully_shard` finds errors."""
    if case.stage != "fsdp":
        zerocore.shard(net, stage=case.stage, units=[*net.parts])
        return
    mesh = mesh_of(1, dist.get_world_size())["shard"]
    pair = [net.parts[part] for part in case.parts]
    joined = pair if case.joins else []
    if joined:
        zerocore.fsdp.fully_shard(joined, mesh=mesh)
    for part in (*(each for each in net.parts if each not in joined), net):
        zerocore.fsdp.fully_shard(part, mesh=mesh)
    net(torch.ones(1, 4))


def whole(net: Net, case: Case) -> dict[str, torch.Tensor]:
    if case.stage == "fsdp":
        return get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    return zerocore.full_state_dict(net, rank0_only=False)


def try_case(seed: int) -> None:
    case, world = case_of(seed), dist.get_world_size()
    begin(seed, str(case))
    net = build(case, seed)
    if case.outcome in WORDS:
        kind, words = WORDS[case.outcome]
        with pytest.raises(kind, match=words) as caught:
            shard(net, case)
        if case.outcome != "not contiguous":
            assert all(name in str(caught.value) for name in case.names), caught.value
        if case.stage != "fsdp":
            train(net, range(1))  # as before
        return
    shard(net, case)
    plain = build(case, seed)
    names = [name for name, _ in net.named_parameters()]
    assert len(names) == len([*plain.parameters()]) - (case.relation in ("data", "alias"))
    mine = train(net, range(dist.get_rank(), dist.get_rank() + 1))
    right = train(plain, range(world))
    near = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(mine, right[dist.get_rank() :: world], **near)
    torch.testing.assert_close(whole(net, case), dict(plain.state_dict()), **near)


def compare(seeds: range, shape: str) -> None:
    """Tries the case of each seed."""
    os.environ[STALL_SECONDS] = "20"
    for seed in seeds:
        try_case(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_views(index: int) -> None:
    seeds = seeds_of(index, MODELS_OF_A_SHAPE)
    run_ranks(compare, world_of(SHAPES[index]), seeds, SHAPES[index], timeout=400)


def test_the_cases_have_everything() -> None:
    cases = [case_of(seed) for seed in range(len(SHAPES) * MODELS_OF_A_SHAPE)]
    assert {case.relation for case in cases} == set(RELATIONS)
    outcomes = {case.outcome for case in cases}
    assert outcomes == {"tied", "apart", *WORDS}


def on_meta() -> None:
    """Ties by `.data` on the meta device hold, also where values are made later."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        net[2].weight.data = net[0].weight.data
    zerocore.shard(net, device=torch.device("cpu"))
    assert net[0].weight is net[2].weight


def test_a_tie_on_the_meta_device() -> None:
    run_ranks(on_meta, 2)


def main() -> bool:
    """Tries random models and prints the seeds of those that went wrong."""
    options = parser_of(main.__doc__, SHAPES).parse_args()
    return train_all(compare, options, options.shapes)


if __name__ == "__main__":
    sys.exit(not main())
