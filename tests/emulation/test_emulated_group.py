"""The emulated link: numerics of replicas, the duration formula, order, and clean ends."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers "fake"

import zerocore
from zerocore._C import Traffic
from zerocore.common.links import PRESETS, find_link
from zerocore.emulation import link


@pytest.fixture
def emulation() -> Iterator[zerocore.emulation.Emulation]:
    """Rank 1 of 3 on a link without any delay."""
    with zerocore.emulate(3, bandwidth="inf", latency=0, rank=1) as running:
        yield running


# -- the model of the link --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("traffic", "factor"),
    [
        (Traffic.ALL_GATHER, 0.75),
        (Traffic.REDUCE_SCATTER, 0.75),
        (Traffic.ALL_REDUCE, 1.5),
        (Traffic.ALL_TO_ALL, 0.75),
        (Traffic.GATHER, 0.75),
        (Traffic.SCATTER, 0.75),
        (Traffic.BROADCAST, 1.0),
        (Traffic.REDUCE, 1.0),
        (Traffic.BARRIER, 0.0),
    ],
)
def test_duration_formula(traffic: Traffic, factor: float) -> None:
    model = link("2GB/s", "7us")
    assert model.duration_ns(traffic, 8000, 4) == 7000 + round(8000 * factor / 2)
    assert model.duration_ns(traffic, 8000, 1) == 7000
    assert link("inf", "0s").duration_ns(traffic, 1 << 40, 64) == 0


def test_units_and_presets() -> None:
    assert link("400Gbit/s").bandwidth == link("50 GB/s").bandwidth == link(50e9).bandwidth
    assert link("1e3MB/s", "2ms").latency == 2e-3
    assert math.isinf(link("inf").bandwidth)
    for name, preset in PRESETS.items():
        assert link(name).bandwidth == preset.bandwidth_bytes_per_s
        assert link(name).latency == preset.latency_s
        assert link(name, "1us").latency == 1e-6


@pytest.mark.parametrize(
    "written", ["ib400", "450GB/s", "450GB/s,30us", 450e9, zerocore.planning.Link("x", 1, 2)]
)
def test_a_link_is_written_as_for_a_plan(written: zerocore.planning.Link | str | float) -> None:
    planned, emulated = find_link(written), link(written)
    assert emulated.bandwidth == planned.bandwidth_bytes_per_s
    assert emulated.latency == pytest.approx(planned.latency_s)


@pytest.mark.parametrize(("world_size", "name"), [(8, "nvlink4"), (9, "8 x ib400")])
def test_the_default_link_is_that_of_a_plan(world_size: int, name: str) -> None:
    (planned,) = zerocore.plan(torch.nn.Linear(2, 2), world_size).setting.links
    with zerocore.emulate(world_size) as emulation:
        assert emulation.link.bandwidth == planned.bandwidth_bytes_per_s
    assert planned.name == name


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"bandwidth": "fast"}, "nvlink4"),
        ({"bandwidth": "12us"}, "bandwidth"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"latency": -1.0}, "latency"),
        ({"latency": "inf"}, "latency"),
        ({"latency": "3GB/s"}, "latency"),
        ({"sms": -1}, "sms"),
    ],
)
def test_a_link_that_cannot_be(wrong: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        link(**wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"world_size": "64"}, TypeError, "world_size must be an int, got '64'"),
        ({"sms": 1.5}, TypeError, "sms must be an int, got 1.5"),
        ({"rank": 64}, ValueError, "rank must be 0 to 63, got 64"),
        ({"rank": None}, TypeError, "rank must be an int, got None"),
    ],
)
def test_an_emulation_that_cannot_be(wrong: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        zerocore.emulate(**wrong)
    assert not torch.distributed.is_initialized()


def test_ranks_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="rank"):
        zerocore._C.EmulatedGroup(4, 4, link(), 1.0)


# -- what collectives compute -----------------------------------------------------------------


def test_gathers(emulation: zerocore.emulation.Emulation) -> None:
    own = torch.arange(4.0)
    full = torch.empty(12)
    dist.all_gather_into_tensor(full, own)
    assert torch.equal(full, own.repeat(3))
    parts = [torch.empty(4) for _ in range(3)]
    dist.all_gather(parts, own)
    assert all(torch.equal(part, own) for part in parts)
    dist.gather(own * 2, parts, dst=1)
    assert all(torch.equal(part, own * 2) for part in parts)
    dist.gather(own, None, dst=0)
    objects = [None] * 3
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}] * 3


def test_gather_in_place(emulation: zerocore.emulation.Emulation) -> None:
    full = torch.zeros(12)
    full[4:8] = torch.arange(4.0)
    dist.all_gather_into_tensor(full, full[4:8])
    assert torch.equal(full, torch.arange(4.0).repeat(3))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, 6.0),
        (dist.ReduceOp.AVG, 2.0),
        (dist.ReduceOp.MIN, 2.0),
        (dist.ReduceOp.MAX, 2.0),
        (dist._make_nccl_premul_sum(0.5), 3.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_reductions(emulation: zerocore.emulation.Emulation, op, expected: float, dtype) -> None:
    tensor = torch.full((5,), 2.0, dtype=dtype)
    dist.all_reduce(tensor, op)
    assert torch.equal(tensor, torch.full((5,), expected, dtype=dtype))
    tensor.fill_(2.0)
    dist.reduce(tensor, dst=0, op=op)
    assert torch.equal(tensor, torch.full((5,), 2.0, dtype=dtype))
    dist.reduce(tensor, dst=1, op=op)
    assert torch.equal(tensor, torch.full((5,), expected, dtype=dtype))
    full = torch.tensor([9.0, 9.0, 2.0, 2.0, 9.0, 9.0], dtype=dtype)
    shard = torch.empty(2, dtype=dtype)
    dist.reduce_scatter_tensor(shard, full, op)
    assert torch.equal(shard, torch.full((2,), expected, dtype=dtype))
    dist.reduce_scatter(shard.zero_(), list(full.chunk(3)), op)
    assert torch.equal(shard, torch.full((2,), expected, dtype=dtype))


def test_reductions_of_integers(emulation: zerocore.emulation.Emulation) -> None:
    for op, expected in (
        (dist.ReduceOp.SUM, 15),
        (dist.ReduceOp.BAND, 5),
        (dist.ReduceOp.BOR, 5),
    ):
        tensor = torch.tensor([5, 5])
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == [expected] * 2


def test_exchanges(emulation: zerocore.emulation.Emulation) -> None:
    sent, received = torch.arange(6.0), torch.empty(6)
    dist.all_to_all_single(received, sent)
    assert received.tolist() == [2.0, 3.0] * 3
    received = torch.empty(3)
    dist.all_to_all_single(received, sent, [1, 1, 1], [3, 1, 2])
    assert received.tolist() == [3.0] * 3
    received = torch.full((5,), 7.0)  # zeros where more is expected than this rank sends itself
    dist.all_to_all_single(received, sent, [0, 3, 2], [3, 2, 1])
    assert received.tolist() == [3.0, 4.0, 0.0, 3.0, 4.0]
    parts = [torch.empty(2) for _ in range(3)]
    dist.all_to_all(parts, list(sent.chunk(3)))
    assert [part.tolist() for part in parts] == [[2.0, 3.0]] * 3


def test_broadcast_scatter_barrier(emulation: zerocore.emulation.Emulation) -> None:
    tensor = torch.arange(3.0)
    for root in range(3):
        dist.broadcast(tensor, src=root)
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    out = torch.empty(1)
    dist.scatter(out, list(tensor.chunk(3)), src=1)
    assert out.item() == 1.0
    dist.barrier()


def test_a_collective_says_how_long_it_took(emulation: zerocore.emulation.Emulation) -> None:
    emulation.link = link("inf", "20ms")
    work = dist.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(RuntimeError, match="needs a finished collective"):
        work._get_duration()
    before = emulation.waited_ns
    work.wait()
    assert work._get_duration() >= 20
    assert emulation.waited_ns > before


def test_coalesced(emulation: zerocore.emulation.Emulation) -> None:
    shards = [torch.ones(2), torch.full((3,), 2.0)]
    group = dist.distributed_c10d._get_default_group()
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([shards[0]])
    group.allreduce([shards[1]])
    group._end_coalescing(torch.device("cpu")).wait()
    assert shards[0].tolist() == [3.0] * 2 and shards[1].tolist() == [6.0] * 3


def test_empty_and_strided_tensors(emulation: zerocore.emulation.Emulation) -> None:
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
    dist.all_reduce(torch.empty(0))
    parts = [torch.empty(3, 2).t() for _ in range(3)]
    dist.all_gather(parts, torch.arange(6.0).view(2, 3))
    assert all(torch.equal(part, torch.arange(6.0).view(2, 3)) for part in parts)
    square = torch.arange(4.0).view(2, 2).t()
    dist.all_reduce(square)
    assert square.tolist() == [[0.0, 6.0], [3.0, 9.0]]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: dist.all_gather_into_tensor(torch.empty(5), torch.empty(2)),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(5)),
        lambda: dist.all_gather([torch.empty(1)] * 3, torch.empty(2)),
        lambda: dist.all_to_all_single(torch.empty(6), torch.empty(6), [2, 2, 1], [3, 1, 2]),
        lambda: dist.scatter(torch.empty(1), None, src=0),
        lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.PRODUCT),
        lambda: dist.send(torch.empty(1), 0),
        lambda: dist.recv(torch.empty(1), 0),
    ],
)
def test_mistakes(emulation: zerocore.emulation.Emulation, mistake: Callable[[], None]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        mistake()
    dist.barrier()


# -- order and time ---------------------------------------------------------------------------


def test_first_in_first_out() -> None:
    order: list[int] = []
    with zerocore.emulate(8, bandwidth="1GB/s", latency="1ms") as emulation:
        works = [dist.all_reduce(torch.ones(1 + i), async_op=True) for i in range(4)]
        emulation.link = link("inf", 0)
        works += [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(4)]
        for index, work in enumerate(works):
            work.get_future().then(lambda _, index=index: order.append(index))
        works[-1].wait()
        assert all(work.is_completed() for work in works)
    assert order == list(range(8))


def test_a_link_for_each_mesh_dimension() -> None:
    """Each its duration, side by side: one that takes 60 s keeps no other group waiting."""
    with zerocore.emulate(4, "inf", 0) as emulation:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        across, within = mesh.get_all_groups()
        emulation.set_group_link(within, link("inf", 60.0))
        emulation.set_group_link(across, link("inf", "20ms"))
        slow = dist.all_reduce(torch.ones(1), group=within, async_op=True)
        work = dist.all_reduce(torch.ones(1), group=across, async_op=True)
        dist.barrier()
        work.wait()
        assert work._get_duration() >= 20
        assert not slow.is_completed()
        with pytest.raises(TypeError, match="must be a process group"):
            emulation.set_group_link(mesh, link())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not emulated"):
            emulation.set_group_link(dist.new_group([0], backend="fake"), link())


def test_wait_lets_other_threads_run() -> None:
    with zerocore.emulate(8, latency=60.0):
        work = dist.barrier(async_op=True)
        raised: list[Exception] = []

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not work.is_completed()
    waiting.join(timeout=30)
    assert not waiting.is_alive() and "destroyed" in str(raised[0])


def test_timeout() -> None:
    with zerocore.emulate(8, latency=60.0):
        work = dist.barrier(async_op=True)
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            work.wait(timedelta(milliseconds=20))
