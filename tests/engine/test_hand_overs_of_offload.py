"""Streams hand over what offload and a gather at the step add, on random module graphs."""

from __future__ import annotations

import pytest

import zerocore
from tests.engine.graphs import (
    POLICIES,
    Block,
    Mesh,
    five_in_a_row,
    log_of_steps,
    seeds,
    shard,
    train,
)
from tests.engine.hand_overs import find_race, waits
from zerocore.model.state import state_of

pytestmark = pytest.mark.usefixtures("mesh", "log_hand_overs")

GRADIENTS = zerocore.Offload(states="device", gradients="cpu")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("seed", seeds(24))
def test_gradients_on_their_way_to_the_host_are_ordered(seed: int, stage: int, mesh: Mesh) -> None:
    model = shard(seed, stage, mesh, offload=GRADIENTS)
    log = train(model, seed)
    assert find_race(log) is None
    assert any(each.what == "leaves" for each in log)
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0


@pytest.mark.one_by_day
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("mixed", POLICIES, ids=["plain", "bf16", "fp32_reduce"])
def test_every_wait_for_gradients_is_needed(
    stage: int, mixed: zerocore.MixedPrecision | None
) -> None:
    """Of a unit's copies for the reductions, and of a block's next user for the copy."""
    model = zerocore.shard(
        five_in_a_row(), stage=stage, units=[Block], mixed_precision=mixed, offload=GRADIENTS
    )
    log, setup = log_of_steps(model, steps=3)
    made = [i for i in waits(log) if i >= setup]
    idle = [i for i in made if find_race(log, without=i) is None]
    kinds = {i: (log[i].stream, log[i].source) for i in made}
    # Both of a unit's reductions may be done when the first one's result is copied.
    copies = [i for i in idle if kinds[i] == ("device_to_host", "compute")]
    assert 0 < 2 * len(copies) <= list(kinds.values()).count(("device_to_host", "compute"))
    # In bfloat16 the gradients are packed into the block that follows in the pool, behind the copy.
    packed = mixed is not None and mixed.reduce_dtype is None and stage == 3
    others = {kinds[i] for i in idle} - {("device_to_host", "compute")}
    assert others == ({("reduce_scatter", "device_to_host")} if packed else set())
    assert any(kinds[i][1] == "device_to_host" for i in made if i not in idle)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("seed", seeds(30))
def test_gathers_from_near_ranks_are_ordered(seed: int, mesh: Mesh) -> None:
    model = shard(seed, 3, mesh, regather=2)
    assert find_race(train(model, seed)) is None


@pytest.mark.one_by_day
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_gather_from_near_ranks_waits_for_what_is_kept(prefetch: int) -> None:
    model = zerocore.shard(
        five_in_a_row(),
        units=[Block],
        communication=zerocore.Communication(prefetch=prefetch, regather=3),
    )
    log, setup = log_of_steps(model)
    assert find_race(log) is None
    races = {i: find_race(log, without=i) for i in waits(log) if i >= setup}
    assert any("keeps for near ranks" in race for race in races.values() if race is not None)
