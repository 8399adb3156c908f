"""Plans of hybrid sharding: bytes and collectives of the runtime on a 2-D mesh, links, advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerocore
from tests.by_night import by_day
from tests.distributed.chain import WIDTH, Chain, step
from tests.planning.test_plan import (
    BF16,
    GB,
    NUM_BATCHES,
    SAMPLES,
    Wide,
    allocated,
    blocks,
    fake_group,
    planned,
)
from tests.zoo import CASES
from zerocore.common.events import COLLECTIVES
from zerocore.common.links import PRESETS, traffic_nbytes
from zerocore.model.casting import cast_floats
from zerocore.options.precision import MixedPrecision

SHAPES = ((3, 1), (2, 2), (128, 8))  # replicas by shards
MIXED = MixedPrecision(BF16, output_dtype=torch.float32)


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


NAMES = ("plain", "experts", "empty_shards")
MODES = ((None, 1, "sharded"), (MIXED, 1, "sharded"), (MIXED, 2, "sharded"), (MIXED, 2, "full"))
BY_DAY = [(NAMES[number % len(NAMES)], *mode) for number, mode in enumerate(MODES)]
ALL = [(name, *mode) for name in NAMES for mode in MODES]


@pytest.mark.parametrize(
    ("name", "mixed", "micro_batches", "accumulate"),
    by_day(ALL, BY_DAY),
)
def test_the_runtime_allocates_what_was_planned(
    name: str, mixed: MixedPrecision | None, micro_batches: int, accumulate: str
) -> None:
    case = CASES[name]
    options: dict[str, Any] = {
        "mixed_precision": mixed,
        "communication": zerocore.Communication(accumulate=accumulate),
    }
    for shape in SHAPES:
        world_size = shape[0] * shape[1]
        rank = world_size // 2 + shape[1] // 2
        batch = case.seeded_batch(0, rank % NUM_BATCHES, SAMPLES)
        plan = zerocore.plan(
            case.seeded_build(),
            world_size,
            num_replicas=shape[0],
            workload=zerocore.Workload(
                inputs=cast_floats(batch, BF16) if mixed else batch,
                loss=case.loss,
                rank=rank,
                micro_batches=micro_batches,
            ),
            **options,
        )
        assert plan.activations is not None, plan.note
        with fake_group(world_size, rank):
            mesh = mesh_of(shape)
            for stage in plan.stages:
                actual = allocated(case, stage.stage, rank, micro_batches, group=mesh, **options)
                assert planned(stage) == actual, f"stage {stage.stage}, {shape}"


def sent(events: list[tuple[str, int]], shape: tuple[int, int], stage: int) -> list[float]:
    """Bytes that collectives within a shard group, and across groups, make a rank send."""
    inside = across = 0.0
    for op, nbytes in events:
        if op == "all_reduce":
            across += traffic_nbytes(op, nbytes, shape[0])
        else:
            inside += traffic_nbytes(op, nbytes, shape[1])
    if stage == 0 and shape[1] > 1:  # each all-reduce of the group is followed by one across
        across /= 2
        inside = across * (1 - 1 / shape[1]) / (1 - 1 / shape[0])
    return [inside, across]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_runtime_sends_what_was_planned(shape: tuple[int, int]) -> None:
    world_size = shape[0] * shape[1]
    inputs = torch.randn(3, WIDTH)
    plan = zerocore.plan(
        Chain(), world_size, num_replicas=shape[0], workload=zerocore.Workload(inputs=inputs)
    )
    with fake_group(world_size, 0):
        mesh = mesh_of(shape)
        for stage in plan.stages:
            model = zerocore.shard(Chain(), stage=stage.stage, group=mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                events = [(e.op, e.nbytes) for e in step(model, optimizer) if e.op in COLLECTIVES]
            assert stage.num_collectives == len(events)
            inside, across = sent(events, shape, stage.stage)
            assert stage.across_nbytes == pytest.approx(across, abs=1)
            assert stage.sent_nbytes == pytest.approx(inside + across, abs=1)


def test_sixty_four_ranks_in_eight_replicas() -> None:
    """State and inner traffic are those of 8 ranks; 2 * 7/8 of a gradient shard cross."""
    plan = zerocore.plan(blocks(GB), 64, num_replicas=8, workload=zerocore.Workload(rank=63))
    inner = zerocore.plan(blocks(GB), 8, workload=zerocore.Workload(rank=7))
    gradient_nbytes = 4 * GB
    for stage, within in zip(plan.stages, inner.stages, strict=True):
        assert planned(stage) == planned(within)
        assert stage.sent_nbytes - stage.across_nbytes == within.sent_nbytes
        summed = gradient_nbytes / (1 if stage.stage == 0 else 8)
        assert stage.across_nbytes == pytest.approx(2 * 7 / 8 * summed, rel=1e-5)  # padding


def test_the_time_of_each_link() -> None:
    """Equal blocks: gathers and reduce-scatters on one link, all-reduces on the other."""
    shard_nbytes, num_blocks = 4 * (WIDTH * WIDTH + WIDTH) // 2, 4
    plan = zerocore.plan(
        Chain(num_blocks),
        6,
        num_replicas=3,
        workload=zerocore.Workload(inputs=torch.randn(3, WIDTH)),
        machine=zerocore.Machine(
            links=["1MB/s,1ms", "2MB/s,0s"], replica_link="1kB/s,2ms", flops="1TFLOP/s"
        ),
    )
    gathers = 2 * num_blocks - 1  # the last unit is kept for the backward
    for timing, bandwidth, latency in zip(
        plan.stages[3].timings, (1e6, 2e6), (1e-3, 0.0), strict=True
    ):
        inside = (gathers + num_blocks) * (latency + shard_nbytes / bandwidth)
        across = num_blocks * (2e-3 + 2 * 2 / 3 * shard_nbytes / 1e3)
        assert timing.across_s == pytest.approx(across)
        assert timing.communication_s == pytest.approx(inside + across)
        assert timing.bound_s == pytest.approx(across)
        assert timing.step_s > timing.bound_s
    assert plan.stages[3].timings[0].link == "1MB/s,1ms + 1kB/s,2ms"


@pytest.mark.parametrize(
    ("world_size", "num_replicas", "links", "replica_link", "expected"),
    [
        (64, 8, None, None, "nvlink4 + ib400"),
        (64, 2, None, None, "8 x ib400 + ib400"),
        (8, 2, None, None, "nvlink4"),
        (64, 8, "eth100", None, "eth100"),
        (64, 8, "pcie5", PRESETS["eth100"], "pcie5 + eth100"),
        (64, 8, None, "eth100", "nvlink4 + eth100"),
        (64, 1, None, "eth100", "8 x ib400"),
    ],
)
def test_which_links(
    world_size: int, num_replicas: int, links: Any, replica_link: Any, expected: str
) -> None:
    plan = zerocore.plan(
        Chain(),
        world_size,
        num_replicas=num_replicas,
        workload=zerocore.Workload(inputs=torch.randn(3, WIDTH)),
        machine=zerocore.Machine(links=links, replica_link=replica_link),
    )
    assert [stage.timings[0].link for stage in plan.stages] == 4 * [expected]
    assert f"step, {expected}" in str(plan)
    assert ("of it, between replicas" in str(plan)) == (num_replicas > 1)
    assert (f"of {world_size} in {num_replicas} replicas" in str(plan)) == (num_replicas > 1)


@pytest.mark.parametrize(
    ("num_replicas", "error", "message"),
    [
        (0, ValueError, "num_replicas must be at least 1"),
        (2.0, TypeError, "num_replicas must be an int"),
        (3, ValueError, "8 ranks are not 3 replicas of equal size"),
        (16, ValueError, "num_replicas must divide world_size, which counts all ranks"),
    ],
)
def test_mistakes_are_named(num_replicas: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zerocore.plan(Chain(), 8, num_replicas=num_replicas)


def test_advice_on_a_slow_link_names_the_call_that_it_plans() -> None:
    workload = zerocore.Workload(inputs=torch.randn(10, 64))
    links = {"links": "1PB/s", "replica_link": "1MB/s"}
    hybrid = zerocore.plan(
        Wide(), 24, num_replicas=3, workload=workload, machine=zerocore.Machine(**links)
    )
    stage = hybrid.stages[3]

    def slow(memory: int, num_replicas: int = 1, **options: Any) -> str:
        machine = zerocore.Machine(memory=memory, **options)
        plan = zerocore.plan(
            Wide(), 24, num_replicas=num_replicas, workload=workload, machine=machine
        )
        return next((line for line in plan.advice if "is slow for this" in line), "")

    line = slow(stage.peak.nbytes, links="1MB/s")
    assert "within nodes of 8: plan it with num_replicas=3" in line
    said = "machine=zerocore.Machine(links=inside, replica_link='1MB/s'), inside= the link within"
    assert said in line
    of_a_node = slow(stage.peak.nbytes, node="8xH100-ib400")
    call = "num_replicas=3, machine=zerocore.Machine('8xH100-ib400'); run it with"
    assert call in of_a_node
    assert line.endswith("group=init_device_mesh('cuda', (3, 8))")
    assert slow(stage.peak.nbytes - 1, links="1MB/s").endswith("larger micro-batches hide more")
    assert slow(stage.peak.nbytes, 3, **links).endswith("larger micro-batches hide more")


def test_advice_on_fewer_replicas_or_more_ranks() -> None:
    def advice(memory: int | str) -> str:
        return zerocore.plan(
            blocks(GB, 100), 32, num_replicas=8, machine=zerocore.Machine(memory=memory)
        ).advice[1]

    needed = [
        zerocore.plan(blocks(GB, 100), 32, num_replicas=n).stages[3].peak.nbytes for n in (4, 1)
    ]
    assert advice(needed[0]) == "stage 3 fits with num_replicas=4"
    assert advice(needed[0] - 1) == "stage 3 fits with num_replicas=2"
    assert advice(needed[1]) == "stage 3 fits with num_replicas=1"
    assert advice(needed[1] - 1).startswith("stage 3 fits from 64 ranks on in one replica")
    assert not dist.is_initialized()


def test_near_ranks_hold_more_and_wait_less() -> None:
    """Beside its shard a rank keeps an eighth; in the backward it gathers over the faster link."""
    model, batch = Wide(), torch.empty(4096, 64, device="meta")
    near = zerocore.plan(
        model,
        64,
        communication=zerocore.Communication(regather=8),
        workload=zerocore.Workload(inputs=batch),
    )
    flat = zerocore.plan(model, 64, workload=zerocore.Workload(inputs=batch))
    full = zerocore.plan(model, 1, workload=zerocore.Workload(inputs=batch)).stages[3].parameters
    kept = near.stages[3].parameters - flat.stages[3].parameters
    assert full / 8 <= kept < 1.1 * full / 8  # the rest is padding
    assert near.stages[3].timings[0].step_s < flat.stages[3].timings[0].step_s
    assert [stage.parameters for stage in near.stages[:3]] == [
        stage.parameters for stage in flat.stages[:3]
    ]
    with pytest.raises(ValueError, match="regather must divide the number of ranks that share"):
        zerocore.plan(
            model,
            64,
            communication=zerocore.Communication(regather=6),
            workload=zerocore.Workload(inputs=batch),
        )
