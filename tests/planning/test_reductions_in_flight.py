"""The plan of several units that are reduced at a time."""

from __future__ import annotations

import pytest

import zerocore
from tests.planning.test_plan import allocated, fake_group, planned
from tests.zoo import CASES


@pytest.mark.parametrize("reductions", [2, 3])
def test_more_blocks_are_planned(reductions: int) -> None:
    """Each holds one more unit's gradients, at stages 2 and 3 alone."""
    case = CASES["plain"]
    options = {"communication": zerocore.Communication(reductions_in_flight=reductions)}
    units = list(case.units) if case.units else None
    few = zerocore.plan(case.seeded_build(), 2, units=units)
    plan = zerocore.plan(case.seeded_build(), 2, units=units, **options)
    assert f"{reductions} reductions in flight" in str(plan)
    with fake_group(2, 0):
        for stage in plan.stages:
            assert planned(stage) == allocated(case, stage.stage, 0, **options)
    more = [a.pool_reserved - b.pool_reserved for a, b in zip(plan.stages, few.stages, strict=True)]
    assert more[0] == more[1] == 0 < min(more[2:])
