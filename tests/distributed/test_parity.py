"""Sharded training equals training in one process, for every model and stage, on 1 to 4 ranks.

Stage 3 meets every model on every number of ranks, and any two of model, stage and number meet.
"""

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

# Where shards begin and end is for the models that are awkward; these are for how they are called.
RANKS_OF_OTHERS = (2, 3)


def runs_of(number: int, name: str) -> list[tuple[str, int, list[int]]]:
    """The case, numbers of ranks, and at which stages it is trained on them."""
    if name.startswith("hf_"):
        more = {2: (0, 1), 3: (2,)}
        return [(name, ranks, [*more[ranks], 3]) for ranks in RANKS_OF_OTHERS]
    return [(name, ranks, sorted({(number + ranks) % 4, 3})) for ranks in (1, 2, 3, 4)]


RUNS = [run for number, name in enumerate(CASES) for run in runs_of(number, name)]
# Three ranks have uneven shards of most models; every other four models have two, so that by day,
# too, each number of ranks meets each stage.
FEW = {(name, 3 - number // 4 % 2) for number, name in enumerate(CASES)}
PARAMS = [pytest.param(*run, marks=() if run[:2] in FEW else pytest.mark.nightly) for run in RUNS]


def train_stages(name: str, stages: list[int]) -> tuple[Trained | None, list[Trained]]:
    case = case_named(name)
    reference = None
    if dist.get_rank() == 0:
        reference = train_reference(case, dist.get_world_size())
    return reference, [train_sharded(case, stage) for stage in stages]


@pytest.mark.parametrize(("name", "world_size", "stages"), PARAMS)
def test_stages_equal_one_process(name: str, world_size: int, stages: list[int]) -> None:
    answers = run_ranks(train_stages, world_size, name, stages, timeout=120)
    reference = answers[0][0]
    assert reference is not None
    first = reference.losses[0]
    assert first[0] != first[-1], "the reference does not learn"
    by_stage = list(zip(*(trained for _, trained in answers), strict=True))
    for ranks in by_stage:
        assert_same_training(list(ranks), reference)
        # Stages agree with each other as closely as with the reference.
        losses = [rank.losses[0] for rank in by_stage[0]]
        assert_same_training(list(ranks), Trained(losses, by_stage[0][0].state))


def test_every_two_of_model_stage_and_ranks_meet() -> None:
    trained = {(name, ranks, stage) for name, ranks, stages in RUNS for stage in stages}
    others = {name for name in CASES if not name.startswith("hf_")}
    models = {(name, stage) for name, _, stage in trained}
    assert models == {(name, stage) for name in CASES for stage in range(4)}
    numbers = {(ranks, stage) for name, ranks, stage in trained if name in others}
    assert numbers == {(ranks, stage) for ranks in (1, 2, 3, 4) for stage in range(4)}
    assert {(name, ranks, 3) for name in others for ranks in (1, 2, 3, 4)} <= trained
