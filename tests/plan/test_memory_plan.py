"""Predicted bytes: the textbook figures, and the ratios between the stages' traffic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.driver import order_of
from zerocore._C import (
    BackwardEvent,
    ElementType,
    ParamSpec,
    PlanOptions,
    ShardOptions,
    UnitPlan,
    plan_events,
    plan_memory,
)

GB = 10**9


WIDE = ElementType(6, 4)


def units(num_params: int, num_units: int = 32) -> list[UnitPlan]:
    numel = num_params // num_units
    return [UnitPlan([ParamSpec(f"block.{i}", [numel], 6, 4)]) for i in range(num_units)]


def options(stage: int, world: int, prefetch: int = 1, **more: Any) -> PlanOptions:
    return PlanOptions(ShardOptions(stage=stage, prefetch=prefetch), world_size=world, **more)


@pytest.mark.parametrize(("stage", "expected"), [(0, 112), (1, 63), (2, 38.5), (3, 14)])
def test_seven_billion_parameters_on_eight_ranks(stage: int, expected: float) -> None:
    """fp32 Adam, 16 bytes a parameter: the table of the ZeRO paper (arXiv:1910.02054, fig. 1)."""
    model = units(7 * GB)
    order = order_of([(unit, ()) for unit in range(len(model))])
    plan = plan_memory(model, order, options(stage, 8, rank=3), optimizer_states=2)
    state = plan.parameters + plan.gradients + plan.optimizer
    assert state == pytest.approx(expected * GB, rel=1e-6)


@pytest.mark.parametrize(("stage", "expected"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 2)])
def test_mixed_precision(stage: int, expected: float) -> None:
    """bf16 weights and gradients, fp32 main weights and Adam; main weights go with the states."""
    model = [UnitPlan([ParamSpec(f"block.{i}", [GB // 32], 15, 2, main=WIDE)]) for i in range(32)]
    order = order_of([(unit, ()) for unit in range(len(model))])
    plan = plan_memory(model, order, options(stage, 8, rank=3), optimizer_states=2)
    state = plan.parameters + plan.main_weights + plan.gradients + plan.optimizer
    assert state == pytest.approx(expected * GB, rel=1e-5)  # padding
    assert plan.optimizer == 2 * plan.main_weights
    assert plan.total == state + plan.pool_reserved


def test_gradients_travel_in_one_type_and_stay_in_another() -> None:
    model = [UnitPlan([ParamSpec("weight", [1024], 15, 2, reduce=WIDE)])]
    order = order_of([(0, ())])
    wide = options(2, 4)
    events = plan_events(model, order, wide)
    assert [(event.op, event.nbytes) for event in events] == [
        ("reduce_scatter", 4096),
        ("all_gather", 2048),
    ]
    plan = plan_memory(model, order, wide, optimizer_states=2)
    assert (plan.gradients, plan.pool) == (512, 4096)
    replicated = plan_memory(model, order, options(0, 4), optimizer_states=2)
    assert (replicated.gradients, replicated.pool) == (2048, 4096)


@pytest.mark.parametrize(("stage", "received"), [(1, 4096), (2, 4096), (3, 4096)])
def test_an_exchange_needs_memory_for_what_every_rank_sends(stage: int, received: int) -> None:
    """Otherwise the plan is that of a backend whose reduce-scatter leaves the sum."""
    model = units(2 * 1024, 2)
    order = order_of([(0, ()), (1, ())])
    gloo, nccl = (options(stage, 4, prefetch=0, backend=name) for name in ("gloo", "nccl"))
    sent, expected = (
        [(event.op, event.unit, event.nbytes) for event in plan_events(model, order, each)]
        for each in (gloo, nccl)
    )
    assert sent == expected
    pool, needed = (
        plan_memory(model, order, each, optimizer_states=2).pool for each in (gloo, nccl)
    )
    assert pool == needed + received


@pytest.mark.parametrize(
    ("ranks", "ops"), [(3, ["all_reduce"]), (4, ["reduce_scatter", "gather_sums"])]
)
def test_four_ranks_of_gloo_sum_in_parts_instead_of_an_all_reduce(
    ranks: int, ops: list[str]
) -> None:
    gloo = options(0, ranks, backend="gloo")
    events = plan_events(units(3 * 1024, 1), order_of([(0, ())]), gloo)
    assert [(event.op, event.nbytes) for event in events] == [(op, 3 * 4096) for op in ops]


def test_a_parameter_without_gradient_has_no_optimizer_state() -> None:
    params = [ParamSpec("used", [256], 6, 4), ParamSpec("unused", [256], 6, 4)]
    model = [UnitPlan(params, unused=[1])]
    order = order_of([(0, ())])
    plan = plan_memory(model, order, options(0, 2), optimizer_states=2)
    assert plan.optimizer == 2 * 4 * 256
    assert plan.gradients == 2 * 4 * 256  # one buffer for the unit


def test_a_unit_without_calls_is_never_reduced() -> None:
    model = units(2 * 1024, 2)
    plan = plan_memory(model, order_of([(0, ())]), options(3, 4), optimizer_states=2)
    assert plan.gradients == 1024
    assert plan.parameters == 2 * 1024


def test_slots_that_only_the_first_step_needs_are_counted() -> None:
    """The first order has a large unit that nobody calls; it is gathered once, in its turn."""
    model = [UnitPlan([ParamSpec(f"block.{i}", [1024 * (i + 1)], 6, 4)]) for i in range(3)]
    order = order_of([(0, ()), (1, ())])
    steady = plan_memory(model, order, options(3, 4), optimizer_states=2)
    other = order_of([(0, ()), (2, ()), (1, ())])
    relearned = options(3, 4, first_order=other)
    first = plan_memory(model, order, relearned, optimizer_states=2)
    assert first.pool_reserved == steady.pool_reserved + 3 * 4096
    assert first.pool > steady.pool
    assert plan_events(model, order, relearned) == plan_events(model, order, options(3, 4))


def test_moments_are_those_of_the_calls() -> None:
    model = units(2 * 1024, 2)
    events = plan_events(model, order_of([(0, ()), (1, ())]), options(3, 4, prefetch=0))
    found = [(event.op, event.unit, event.moment) for event in events if event.op != "unshard"]
    assert found == [
        ("all_gather", 0, 0),
        ("reshard", 0, 1),
        ("all_gather", 1, 2),
        ("reshard", 1, 6),  # when the backward has left the unit
        ("reduce_scatter", 1, 6),
        ("all_gather", 0, 6),
        ("reshard", 0, 8),
        ("reduce_scatter", 0, 8),
    ]


def test_an_observed_backward_replaces_the_mirrored_one() -> None:
    """Outputs of unit 1 get a gradient once more after the unit was reduced: gathered again."""
    model = units(2 * 1024, 2)
    order = order_of([(0, ()), (1, ())])
    mirrored = [
        BackwardEvent(ready=False, index=3),
        BackwardEvent(ready=True, index=1),
        BackwardEvent(ready=False, index=1),
        BackwardEvent(ready=True, index=0),
    ]
    late = [*mirrored[:3], mirrored[0], mirrored[3]]

    def gathers(backward: list[BackwardEvent]) -> list[int]:
        observed = options(3, 4, prefetch=0, backward=backward)
        events = plan_events(model, order, observed)
        return [event.unit for event in events if event.op == "all_gather"]

    assert gathers([]) == gathers(mirrored) == [0, 1, 0]
    assert gathers(late) == [0, 1, 0, 1]


@pytest.mark.parametrize("world", [2, 8, 64])
def test_traffic_of_the_stages(world: int) -> None:
    """All-reduce counts twice: it is a reduce-scatter and an all-gather."""
    model = units(GB)
    order = order_of([(unit, ()) for unit in range(len(model))])
    moved = []
    for stage in range(4):
        events = plan_events(model, order, options(stage, world))
        weight = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "unshard": 0, "reshard": 0}
        moved.append(sum(weight[event.op] * event.nbytes for event in events))
    assert moved[1] == moved[2] == pytest.approx(moved[0], rel=1e-5)  # padding
    # The last unit of the forward is kept and not gathered again.
    assert moved[3] == pytest.approx(1.5 * moved[0] * (1 - 1 / 96), rel=1e-3)


@pytest.mark.parametrize("prefetch", range(4))
def test_pool_holds_prefetch_plus_one_units_and_one_bucket(prefetch: int) -> None:
    model = units(32 * 1024, 32)
    order = order_of([(unit, ()) for unit in range(32)])
    plan = plan_memory(model, order, options(3, 4, prefetch), optimizer_states=2)
    assert plan.pool == (prefetch + 2) * 4096


def test_one_rank_communicates_nothing() -> None:
    assert plan_events(units(1024, 4), order_of([(0, ()), (1, ())]), options(3, 1)) == []


LLAMAS = {"8b": (32, 218_112_000, 525_336_576), "70b": (80, 855_654_400, 1_050_673_152)}


def llama(name: str, mixed: bool) -> list[UnitPlan]:
    """An embedding, equal blocks and a head of the embedding's size."""
    num_blocks, block, embedding = LLAMAS[name]
    numels = [embedding, *[block] * num_blocks, embedding]
    types = {"reduce": WIDE, "main": WIDE} if mixed else {}
    dtype = (15, 2) if mixed else (6, 4)
    return [UnitPlan([ParamSpec(f"unit.{i}", [n], *dtype, **types)]) for i, n in enumerate(numels)]


@pytest.mark.parametrize("prefetch", range(5))
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", LLAMAS)
def test_the_arena_is_no_larger_than_what_is_held_at_a_time(
    name: str, stage: int, mixed: bool, prefetch: int
) -> None:
    """Blocks of different sizes share bytes: an embedding's are the layers' while it rests."""
    model = llama(name, mixed)
    order = order_of([(unit, ()) for unit in range(len(model))])
    plan = plan_memory(model, order, options(stage, 8, prefetch), optimizer_states=2)
    assert plan.pool_reserved == plan.pool
    accumulated = options(stage, 8, prefetch, micro_batches=4)
    plan = plan_memory(model, order, accumulated, optimizer_states=2)
    # In the first step the shards of scratch that sums are added from have no place yet.
    scratch = 4 * LLAMAS[name][2] // 8
    assert plan.pool <= plan.pool_reserved <= plan.pool + scratch
