"""Sharded training equals training in one process, for every model and stage, on 1 to 4 ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    Trained,
    assert_same_training,
    case_named,
    train_reference,
    train_sharded,
)
from tests.zoo import CASES

STAGES = (0, 1, 2, 3)
# Where shards begin and end is for the models that are awkward; these are for how they are called.
RANKS_OF_OTHERS = (2, 3)
RUNS = [
    (name, world_size)
    for name in CASES
    for world_size in (RANKS_OF_OTHERS if name.startswith("hf_") else (1, 2, 3, 4))
]


def train_all_stages(name: str) -> tuple[Trained | None, list[Trained]]:
    case = case_named(name)
    reference = None
    if dist.get_rank() == 0:
        reference = train_reference(case, dist.get_world_size())
    return reference, [train_sharded(case, stage) for stage in STAGES]


@pytest.mark.parametrize(("name", "world_size"), RUNS)
def test_every_stage_equals_one_process(name: str, world_size: int) -> None:
    answers = run_ranks(train_all_stages, world_size, name, timeout=120)
    reference = answers[0][0]
    assert reference is not None
    first = reference.losses[0]
    assert first[0] != first[-1], "the reference does not learn"
    by_stage = [[stages[stage] for _, stages in answers] for stage in STAGES]
    for stage in STAGES:
        assert_same_training(by_stage[stage], reference)
        # Stages agree with each other as closely as with the reference.
        rank0 = by_stage[0][0]
        losses = [rank.losses[0] for rank in by_stage[0]]
        assert_same_training(by_stage[stage], Trained(losses, rank0.state))
