"""Collectives and pool bytes of a step: exact lists, equal to the plan, no allocation later."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.distributed.chain import WIDTH, Chain, step
from tests.distributed.harness import run_ranks
from tests.planning.test_plan import fake_group
from zerocore.model.state import state_of
from zerocore.planning.prediction import planned_events


def make(stage: int, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zerocore.shard(Chain(), stage=stage, **options)
    return model, torch.optim.AdamW(model.parameters())


def collect(stage: int) -> list[tuple[str, str]]:
    model, optimizer = make(stage)
    for _ in range(3):
        events = step(model, optimizer)
    return [(e.op, e.unit) for e in events if e.op not in ("unshard", "reshard")]


def gathers(*units: int) -> list[tuple[str, str]]:
    return [("all_gather", f"blocks.{unit}") for unit in units]


def reduces(*units: int) -> list[tuple[str, str]]:
    return [("reduce_scatter", f"blocks.{unit}") for unit in units]


EXPECTED = {
    0: [("all_reduce", f"blocks.{unit}") for unit in (3, 2, 1, 0)],
    1: reduces(3, 2, 1, 0) + gathers(0, 1, 2, 3),  # behind the step
    2: reduces(3, 2, 1, 0) + gathers(0, 1, 2, 3),
    3: gathers(0, 1, 2, 3)
    + gathers(2) + reduces(3) + gathers(1) + reduces(2) + gathers(0) + reduces(1, 0),
}  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exact_collectives(stage: int, world_size: int) -> None:
    expected = EXPECTED[stage]
    if stage == 0 and world_size == 4:  # on gloo, an exchange and a gather replace the all-reduce
        ops = ("reduce_scatter", "gather_sums")
        expected = [(op, unit) for _, unit in expected for op in ops]
    for events in run_ranks(collect, world_size, stage):
        assert events == expected


def compare_with_plan(stage: int, prefetch: int) -> None:
    model, optimizer = make(stage, communication=zerocore.Communication(prefetch=prefetch))
    allocations = 0
    for number in range(4):
        events = step(model, optimizer)
        stats = state_of(model).engine.pool_stats
        if number >= 2:
            assert stats.num_allocations == allocations
        allocations = stats.num_allocations
        if number >= 1:
            actual = [(e.op, e.unit, e.nbytes, e.pool_nbytes) for e in events]
            assert actual == planned_events(model)
    assert zerocore.memory_usage(model, optimizer) == zerocore.planning.predict_memory(model)
    if stage == 3:
        transient = [e.pool_nbytes for e in events if e.op == "unshard"]
        buckets = 2 if dist.get_world_size() > 1 else 0  # a reduction and what gloo receives
        unit = events[0].nbytes
        assert max(transient) <= (prefetch + 1 + buckets) * unit
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_events_and_bytes_equal_the_plan(stage: int, world_size: int, prefetch: int) -> None:
    run_ranks(compare_with_plan, world_size, stage, prefetch)


MIXED = zerocore.MixedPrecision(torch.bfloat16, torch.float32)
NARROW = zerocore.MixedPrecision(torch.bfloat16)


def accumulate_as_planned(stage: int, shape: tuple[int, int]) -> None:
    """Steps of three micro-batches on replicas by shards, event by event."""
    group = init_device_mesh("cpu", shape) if shape[0] > 1 else None
    for mixed in (None, MIXED, NARROW):
        for accumulate in ("sharded", "full"):
            model, optimizer = make(
                stage,
                communication=zerocore.Communication(accumulate=accumulate),
                mixed_precision=mixed,
                group=group,
            )
            for number in range(4):
                with zerocore.reporting.record_events(model) as events:
                    for index in range(3):
                        with nullcontext() if index == 2 else zerocore.no_sync(model):
                            model(torch.randn(3, WIDTH)).sum().backward()
                    optimizer.step()
                optimizer.zero_grad()
                if number > 0:
                    actual = [(e.op, e.unit, e.nbytes, e.pool_nbytes) for e in events]
                    assert actual == planned_events(model, micro_batches=3), (mixed, accumulate)
            predicted = zerocore.planning.predict_memory(model, micro_batches=3)
            assert zerocore.memory_usage(model, optimizer) == predicted


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_accumulation_is_as_planned(stage: int, shape: tuple[int, int]) -> None:
    """On gloo, where a reduce-scatter is an exchange."""
    run_ranks(accumulate_as_planned, shape[0] * shape[1], stage, shape)


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (2, 2)])
def test_accumulation_is_as_planned_where_collectives_sum(
    stage: int, shape: tuple[int, int]
) -> None:
    """As on NCCL: a reduce-scatter leaves the sum. Its values are not looked at here."""
    with fake_group(shape[0] * shape[1], 0):
        accumulate_as_planned(stage, shape)


def count_unsharded(prefetch: int) -> int:
    model, optimizer = make(3, communication=zerocore.Communication(prefetch=prefetch))
    step(model, optimizer)
    held = highest = 0
    for event in step(model, optimizer):
        held += {"unshard": 1, "reshard": -1}.get(event.op, 0)
        highest = max(highest, held)
    return highest


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_transient_parameters_never_exceed_prefetch_plus_one_units(prefetch: int) -> None:
    assert run_ranks(count_unsharded, 2, prefetch) == [prefetch + 1] * 2


def moved_bytes(stage: int) -> float:
    """Bytes one rank sends in a step; an all-reduce is a reduce-scatter and an all-gather."""
    model, optimizer = make(stage)
    step(model, optimizer)
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    weights = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    return sum(share * weights.get(e.op, 0) * e.nbytes for e in step(model, optimizer))


def test_traffic_of_the_stages() -> None:
    moved = [run_ranks(moved_bytes, 2, stage)[0] for stage in range(4)]
    assert moved[0] == moved[1] == moved[2]
    # Of four units the last one of the forward is not gathered again: 11 of 12 collectives.
    assert moved[3] == moved[0] * 1.5 * 11 / 12
