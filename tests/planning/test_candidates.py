"""Candidates that need less memory: what stages shard, and which of a search is found."""

from __future__ import annotations

import pytest
from torch import nn

from zerocore.model.units import choose_units
from zerocore.options.stages import HIGHEST_STAGE, STAGES, Placements, placements_of
from zerocore.planning.candidates import Candidate, call_of, candidates, fitting
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


def found(now: Candidate, room: int, search: str) -> list[Division]:
    """Candidates of a search that ``fitting`` finds for so many bytes."""
    fits = fitting(candidates(now), lambda nbytes: nbytes <= room)
    return [each.division for each in fits if each.search == search]


def test_the_first_ranks_that_fit_are_found() -> None:
    now = Candidate(planner_of_layers(), Division(HIGHEST_STAGE, 8, num_replicas=8))
    sizes = {number: now.at(num_replicas=number).nbytes for number in (4, 2, 1)}
    assert [each.num_replicas for each in found(now, sizes[2], "replicas")] == [2]
    assert found(now, sizes[1] - 1, "replicas") == []
    (more,) = found(now, now.at(world_size=32).nbytes, "ranks")
    assert more.ranks == "32 ranks in a (8, 4) mesh"
    (at_three,) = found(now.at(stage=0), 1 << 40, "ranks at stage=3")
    assert at_three.world_size == 16
    assert found(now.at(stage=0), 1 << 40, "ranks") == []


def test_of_offloads_the_first_that_fits_and_the_last_are_found() -> None:
    now = Candidate(planner_of_layers(), Division(0, 8))
    grid = [each for each in candidates(now) if each.search == "offload"]
    wanted = min(each.nbytes for each in grid[:3])
    first, last = found(now, wanted - 1, "offload")
    assert first == next(each.division for each in grid if each.nbytes < wanted)
    assert first.offload is not None and not first.offload.uses_disk
    assert last == grid[-1].division
    call = "offload=zerocore.Offload(states='disk', gradients='cpu', parameters='disk', path='...')"
    assert last.offload is not None and call_of(last.offload) == call
    assert grid[-1].text == f"stage=3, {call} (each step reads and writes a file)"
    assert found(now.at(stage=3), 0, "offload") == []


@pytest.mark.parametrize("stage", STAGES)
def test_changes_of_a_stage(stage: int) -> None:
    """Every stage above it, no prefetch, and what the plan of each says."""
    now = Candidate(planner_of_layers(), Division(stage, 8))
    found = {each.text.partition(" (")[0]: each.nbytes for each in fitting(candidates(now), bool)}
    for higher in STAGES[stage + 1 :]:
        assert found[f"stage={higher}"] == now.at(stage=higher).nbytes
    on_demand = "communication=zerocore.Communication(prefetch=0)"
    assert (on_demand in found) == (stage == HIGHEST_STAGE)
    assert ("16 ranks" in found) == (stage > 0)
    text = f"stage=3, {on_demand}" if stage < HIGHEST_STAGE else on_demand
    assert found[text] < now.nbytes
