"""Hand-overs on gloo, where a reduce-scatter is an exchange and a local sum."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import zerocore
from tests.distributed.harness import run_ranks
from tests.engine.graphs import WIDTH, Block, Graph
from tests.engine.hand_overs import find_race
from zerocore import _C
from zerocore.model.state import state_of
from zerocore.sharding import builder


def train(stage: int, seed: int, log: bool) -> tuple[list[float], str | None]:
    """Losses of some steps, and the first race."""
    builder.EngineOptions = partial(_C.EngineOptions, log_hand_overs=log)
    torch.manual_seed(0)
    options = {
        "communication": zerocore.Communication(
            prefetch=seed % 3, reductions_in_flight=1 + seed // 2
        )
    }
    model = zerocore.shard(Graph(seed, 4), stage=stage, units=[Block], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, WIDTH, requires_grad=True)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    builder.EngineOptions = _C.EngineOptions
    return losses, find_race(state_of(model).engine.hand_overs)


@pytest.mark.parametrize("seed", range(4))
def test_logging_keeps_the_numbers_and_finds_no_race(stage: int, seed: int) -> None:
    plain = run_ranks(train, 2, stage, seed, False)
    logged = run_ranks(train, 2, stage, seed, True)
    assert [losses for losses, _ in plain] == [losses for losses, _ in logged]
    assert all(race is None for _, race in logged)
