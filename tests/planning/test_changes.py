"""Changes that need less memory: what stages shard, and which ranks a search finds."""

from __future__ import annotations

import pytest
from torch import nn

from zerocore.model.units import choose_units
from zerocore.options.stages import HIGHEST_STAGE, STAGES, Placements, placements_of
from zerocore.planning.changes import Candidate, changes, with_fewer_replicas, with_more_ranks
from zerocore.planning.division import Division
from zerocore.planning.planner import Planner, make_planner


def planner_of_layers() -> Planner:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    return make_planner(model, choose_units(model, None))


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_shards_is_what_the_plan_divides(stage: int) -> None:
    planner = planner_of_layers()
    alone, shared = (planner.memory(Division(stage, ranks)) for ranks in (1, 8))
    divided = (getattr(shared, name) < getattr(alone, name) for name in Placements._fields)
    assert Placements(*divided) == placements_of(stage)
    assert Division(stage, 8).gathers == placements_of(stage).parameters
    assert not Division(stage, 8, num_replicas=8).gathers


def test_the_first_ranks_that_fit_are_found() -> None:
    now = Candidate(planner_of_layers(), Division(HIGHEST_STAGE, 8, num_replicas=8))
    sizes = {number: now.at(num_replicas=number).nbytes for number in (4, 2, 1)}
    fewer = with_fewer_replicas(now, lambda nbytes: nbytes <= sizes[2])
    assert fewer is not None and fewer.division.num_replicas == 2
    assert with_fewer_replicas(now, lambda nbytes: nbytes < sizes[1]) is None
    wanted = now.at(world_size=32).nbytes
    more = with_more_ranks(now, lambda nbytes: nbytes <= wanted)
    assert more is not None and more.division.ranks == "32 ranks in a (8, 4) mesh"
    assert with_more_ranks(now.at(stage=0), lambda nbytes: True) is None


@pytest.mark.parametrize("stage", STAGES)
def test_changes_of_a_stage(stage: int) -> None:
    """Every stage above it, no prefetch, and what the plan of each says."""
    now = Candidate(planner_of_layers(), Division(stage, 8))
    found = {change.text.partition(" (")[0]: change.nbytes for change in changes(now, bool)}
    for higher in STAGES[stage + 1 :]:
        assert found[f"stage={higher}"] == now.at(stage=higher).nbytes
    on_demand = "communication=zerocore.Communication(prefetch=0)"
    assert (on_demand in found) == (stage == HIGHEST_STAGE)
    assert ("16 ranks" in found) == (stage > 0)
    text = f"stage=3, {on_demand}" if stage < HIGHEST_STAGE else on_demand
    assert found[text] < now.nbytes
