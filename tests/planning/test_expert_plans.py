"""Plans of models with experts that only some ranks share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerocore
from tests.distributed.harness import run_ranks
from tests.sharding.experts import assert_follows_plan, loss_of, whole_model
from tests.sharding.test_experts import LAYOUTS, PATTERN, sharded
from zerocore.common.events import COLLECTIVES
from zerocore.common.links import traffic_nbytes
from zerocore.planning.candidates import Candidate
from zerocore.planning.division import Division
from zerocore.planning.planner import make_planner
from zerocore.planning.prediction import planned_events
from zerocore.planning.setting import Setting


def compare_plan(stage: int, layout: str) -> None:
    model = sharded(*LAYOUTS[layout], stage)
    optimizer = torch.optim.AdamW(model.parameters())
    assert_follows_plan(model, optimizer, partial(loss_of, model, [dist.get_rank()]))
    assert (
        zerocore.planning.predict_memory(model).total
        == zerocore.memory_usage(model, optimizer).total
    )


def compare_early_plan(stage: int, layout: str) -> None:
    """A plan of the whole model, without ranks, has the bytes of one that is sharded.

    It is one of NCCL, so it is asked for gloo's methods, by which stage 0 is padded.
    """
    model, ((num_ranks, num_parts), _) = sharded(*LAYOUTS[layout], stage), LAYOUTS[layout]
    groups = {PATTERN: zerocore.ParameterMesh(num_ranks, of=num_parts)}
    division = Setting.division
    with mock.patch.object(Setting, "division", lambda *of: replace(division(*of), backend="gloo")):
        early = zerocore.plan(
            whole_model(), 4, groups=groups, workload=zerocore.Workload(rank=dist.get_rank())
        ).stages[stage]
    late = zerocore.planning.predict_memory(model)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(early, name) == getattr(late, name), name
    sent = {True: 0.0, False: 0.0}
    for op, unit, nbytes, _ in planned_events(model):
        if op in COLLECTIVES:
            is_part = PATTERN in unit
            sent[is_part] += traffic_nbytes(op, nbytes, num_ranks if is_part else 4)
    assert early.group_nbytes == {PATTERN: round(sent[True])}
    assert early.sent_nbytes == round(sum(sent.values()))


@pytest.mark.parametrize("layout", ["2x2", "1x4"])
def test_plans_of_the_whole_model(stage: int, layout: str) -> None:
    run_ranks(compare_early_plan, 4, stage, layout)


@pytest.mark.one_by_day
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_is_what_happens(stage: int, layout: str) -> None:
    run_ranks(compare_plan, 4, stage, layout)


MISTAKES = {
    "numbers": (
        {PATTERN: zerocore.ParameterMesh(2, of=3)},
        "3 parts on 2 ranks each are not the 4 ranks",
    ),
    "count": ({PATTERN: zerocore.ParameterMesh(0, of=4)}, "mesh"),
    "kind": ({PATTERN: 2}, "expected numbers of ranks"),
    "pattern": ({"*.nothing.*": zerocore.ParameterMesh(2, of=2)}, "matches no parameter"),
    "dict": ([PATTERN], "expected a dict"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_named(kind: str) -> None:
    groups, text = MISTAKES[kind]
    with pytest.raises((TypeError, ValueError), match=text):
        zerocore.plan(whole_model(), 4, groups=groups)  # type: ignore[arg-type]


def test_more_ranks_share_the_same_parts() -> None:
    """Advice tries twice the ranks: twice as many for each part."""
    candidate = Candidate(make_planner(whole_model(), []), Division(3, 4, parts=((2, 1, 0),)))
    assert candidate.at(world_size=8).division.parts == ((4, 1, 0),)
    assert candidate.at(stage=1).division.parts == ((2, 1, 0),)
