"""Streams hand buffers over in order, on random module graphs, as the log of a run shows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zerocore
from tests.engine.graphs import (
    POLICIES,
    WIDTH,
    Block,
    Graph,
    Mesh,
    five_in_a_row,
    log_of_steps,
    seeds,
    shard,
    train,
)
from tests.engine.hand_overs import find_race, waits
from zerocore import _C
from zerocore.model.state import state_of

pytestmark = pytest.mark.usefixtures("mesh", "log_hand_overs")


@pytest.fixture
def one_stream_at_the_end() -> Iterator[None]:
    yield
    _C.set_logged_compute_stream(0)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.usefixtures("one_stream_at_the_end")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("seed", seeds(24))
def test_compute_goes_from_stream_to_stream(seed: int, stage: int, mesh: Mesh) -> None:
    """Between forward and backward, in the middle of them, and where gradients accumulate.

    Each stream is ordered behind the one before, as torch and users have to.
    """
    model = shard(seed, stage, mesh)
    model.streams = random.Random(seed)
    for unit, block in enumerate(model.blocks):
        for param in block.parameters():
            if param.requires_grad and unit % 2:
                full = getattr(param, "full", param)
                full.register_hook(lambda _: model.change_stream())  # before it accumulates
    assert find_race(train(model, seed)) is None


def steps_of_five(
    stage: int, streams: random.Random | None = None
) -> tuple[list[_C.HandOver], int]:
    """The log of four steps of five blocks in a row, and where they begin in it."""
    model = zerocore.shard(five_in_a_row(), stage=stage, units=[Block])
    model.streams = streams
    return log_of_steps(model)


@pytest.mark.one_by_day
@pytest.mark.usefixtures("one_stream_at_the_end")
@pytest.mark.parametrize("stage", [1, 3])
def test_events_of_either_stream_are_needed(stage: int) -> None:
    """Of both directions, and where the one is left for the other."""
    log, _ = steps_of_five(stage, random.Random(0))
    assert find_race(log) is None
    needed = {
        (log[i].stream, log[i].source) for i in waits(log) if find_race(log, without=i) is not None
    }
    computes = ("compute", "compute 1")
    roles = ("all_gather", "reduce_scatter")
    assert needed >= {(role, compute) for role in roles for compute in computes}
    assert needed >= {(compute, role) for role in roles for compute in computes}
    assert needed >= {computes, computes[::-1]}


@pytest.mark.one_by_day
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_communicator_of_two_roles_hides_waits(stage: int) -> None:
    """Where gathers and reductions go by one, a gather is behind what the reduction before it is.

    So at stage 3 some of its waits for compute would not be missed. They are where it goes by two.
    """
    log, setup = steps_of_five(stage)
    made = [i for i in waits(log) if i >= setup]
    both = frozenset(("all_gather", "reduce_scatter"))
    hidden = [i for i in made if find_race(log, without=i, communicator=both) is None]
    kinds = {(log[i].stream, log[i].source) for i in hidden}
    assert kinds == ({("all_gather", "compute")} if stage == 3 else set())
    assert find_race(log) is None
    assert all(find_race(log, without=i) is not None for i in made)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("seed", seeds(80))
def test_every_hand_over_is_ordered(seed: int, stage: int, mesh: Mesh) -> None:
    model = shard(seed, stage, mesh)
    assert find_race(train(model, seed)) is None
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0


WAYS = ("plain", "hybrid", "checkpointed", "reentrant")


@pytest.mark.one_by_day
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("policy", range(len(POLICIES)), ids=["plain", "bf16", "fp32_reduce"])
@pytest.mark.parametrize("how", WAYS)
def test_every_wait_is_needed(stage: int, policy: int, how: str, mesh: Mesh) -> None:
    """Without any one of the waits the checker objects: it can fail, and no wait is idle.

    Any two of stage, prefetch, policy and way meet.
    """
    mixed, prefetch = POLICIES[policy], (policy + WAYS.index(how)) % 3
    model = five_in_a_row()
    if how in ("checkpointed", "reentrant"):
        model.reentrant = dict.fromkeys((1, 2, 3), how == "reentrant")
    group = mesh if how == "hybrid" else None
    zerocore.shard(
        model,
        stage=stage,
        units=[Block],
        communication=zerocore.Communication(prefetch=prefetch),
        mixed_precision=mixed,
        group=group,
    )
    log, setup = log_of_steps(model)
    assert find_race(log) is None
    needed = [position for position in waits(log) if position >= setup]
    assert needed
    idle = [(i, log[i].stream) for i in needed if find_race(log, without=i) is None]
    assert not idle


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_reset_waits_for_gathers_under_way(stage: int) -> None:
    """Also for those into memory that stays: what frees it next is ordered behind compute only."""
    model = Graph(0, 4)
    model.calls, model.reentrant = [(unit, ()) for unit in range(4)], {}
    zerocore.shard(
        model, stage=stage, units=[Block], communication=zerocore.Communication(prefetch=2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(TypeError, match="linear"):
        model("no tensor")  # within the first unit, while those after it are gathered
    log = state_of(model).engine.hand_overs
    gathers = [each for each in log if (each.kind, each.stream) == ("write", "all_gather")]
    spans = {(each.begin, each.end) for each in gathers}
    frees = partial(
        SimpleNamespace, kind="write", stream="compute", source="", event=-1, what="frees", unit=""
    )
    freed: list[Any] = [frees(begin=begin, end=end) for begin, end in spans]
    assert gathers
    assert find_race([*log, *freed]) is None


@pytest.mark.parametrize("stage", range(4))
def test_main_weights_are_cast_once_per_update(stage: int) -> None:
    """However many micro-batches and gathers there are in a step."""
    model = Graph(0, 3)
    model.calls, model.reentrant = [(unit, ()) for unit in range(3)], {}
    zerocore.shard(model, stage=stage, units=[Block], mixed_precision=POLICIES[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = state_of(model).engine

    def num_casts() -> int:
        log = engine.hand_overs
        return sum(entry.kind == "write" and entry.what == "is cast" for entry in log)

    casts = []
    for _ in range(3):
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        casts.append(num_casts())
    # In the first step the weights are as they were filled. At stages 1 and 2 gathers begin behind
    # the step, so they cast in its end; at the others, the next forward does.
    assert casts == ([3, 6, 9] if stage in (1, 2) else [0, 3, 6])


@pytest.mark.parametrize("stage", range(4))
def test_an_optimizer_that_casts_spares_the_cast(stage: int) -> None:
    model = Graph(0, 3)
    model.calls, model.reentrant = [(unit, ()) for unit in range(3)], {}
    zerocore.shard(model, stage=stage, units=[Block], mixed_precision=POLICIES[1])
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    log = state_of(model).engine.hand_overs
    assert not [each for each in log if each.kind == "write" and each.what == "is cast"]
    assert find_race(log) is None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # not seen by the optimizer, and cast before its next step
    optimizer.zero_grad()
    optimizer.step()
    for parameter in model.parameters():
        if getattr(parameter, "model_weight", None) is not None:
            assert torch.equal(parameter.model_weight, parameter.local().bfloat16())
