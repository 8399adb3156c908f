"""Predicted bytes: the textbook figures, and the ratios between the stages' traffic."""

from __future__ import annotations

import pytest

from tests.plan.driver import order_of
from zerocore._C import ParamSpec, PlanOptions, plan_events, plan_memory

GB = 10**9


def units(num_params: int, num_units: int = 32) -> list[list[ParamSpec]]:
    numel = num_params // num_units
    return [[ParamSpec(f"block.{i}", [numel], 6, 4)] for i in range(num_units)]


def options(stage: int, world: int, prefetch: int = 1, **more: int) -> PlanOptions:
    return PlanOptions(stage=stage, world_size=world, prefetch=prefetch, exchanges=False, **more)


@pytest.mark.parametrize(("stage", "expected"), [(0, 112), (1, 63), (2, 38.5), (3, 14)])
def test_seven_billion_parameters_on_eight_ranks(stage: int, expected: float) -> None:
    """fp32 Adam, 16 bytes a parameter: the table of the ZeRO paper (arXiv:1910.02054, fig. 1)."""
    model = units(7 * GB)
    order = order_of([(unit, ()) for unit in range(len(model))])
    plan = plan_memory(model, order, options(stage, 8), rank=3, optimizer_states=2)
    state = plan.parameters + plan.gradients + plan.optimizer
    assert state == pytest.approx(expected * GB, rel=1e-6)


@pytest.mark.parametrize("world", [2, 8, 64])
def test_traffic_of_the_stages(world: int) -> None:
    """All-reduce counts twice: it is a reduce-scatter and an all-gather."""
    model = units(GB)
    order = order_of([(unit, ()) for unit in range(len(model))])
    moved = []
    for stage in range(4):
        events = plan_events(model, order, options(stage, world))
        weight = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "unshard": 0, "reshard": 0}
        moved.append(sum(weight[op] * nbytes for op, _, nbytes, _, _ in events))
    assert moved[1] == moved[2] == pytest.approx(moved[0], rel=1e-5)  # padding
    # The last unit of the forward is kept and not gathered again.
    assert moved[3] == pytest.approx(1.5 * moved[0] * (1 - 1 / 96), rel=1e-3)


@pytest.mark.parametrize("prefetch", range(4))
def test_pool_holds_prefetch_plus_one_units_and_one_bucket(prefetch: int) -> None:
    model = units(32 * 1024, 32)
    order = order_of([(unit, ()) for unit in range(32)])
    plan = plan_memory(model, order, options(3, 4, prefetch), rank=0, optimizer_states=2)
    assert plan.pool == (prefetch + 2) * 4096


def test_one_rank_communicates_nothing() -> None:
    assert plan_events(units(1024, 4), order_of([(0, ()), (1, ())]), options(3, 1)) == []
