"""The emulated link on a GPU: numerics, streams and order; it skips itself without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from zerocore.emulation import link

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def emulation() -> Iterator[zerocore.emulation.Emulation]:
    with zerocore.emulate(4, "10GB/s", "20us") as running:
        yield running


@pytest.mark.parametrize("async_op", [False, True])
def test_numerics(emulation: zerocore.emulation.Emulation, async_op: bool) -> None:
    own = torch.arange(6.0, device="cuda")
    full = torch.empty(24, device="cuda")
    work = dist.all_gather_into_tensor(full, own, async_op=async_op)
    if async_op:
        work.wait()
    assert torch.equal(full, own.repeat(4))
    work = dist.all_reduce(full, async_op=async_op)
    if async_op:
        work.get_future().wait()
    assert torch.equal(full, 4 * own.repeat(4))


def test_wait_orders_only_the_stream(emulation: zerocore.emulation.Emulation) -> None:
    emulation.link = link("inf", 0.5)
    tensor = torch.ones(4, device="cuda")
    tensor + 1  # loads the kernel: a first launch may wait for all that runs
    torch.cuda.synchronize()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    after = tensor + 1
    assert not work.is_completed()  # half a second on the device; the host came here at once
    assert after.tolist() == [5.0] * 4
    assert work.is_completed()


def test_streams_share_the_link(emulation: zerocore.emulation.Emulation) -> None:
    emulation.link = link("inf", 0.05)
    streams = [torch.cuda.Stream() for _ in range(3)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    events[0].record()
    for stream, event in zip(streams, events[1:], strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            dist.all_reduce(torch.ones(1, device="cuda"))
            event.record()
    torch.cuda.synchronize()
    # Not a speed: three calls of 50 ms that cannot share the time take at least the sum.
    assert max(events[0].elapsed_time(event) for event in events[1:]) >= 150.0


@pytest.mark.parametrize("stage", range(4))
def test_training_does_not_fail(emulation: zerocore.emulation.Emulation, stage: int) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).cuda()
    model = zerocore.shard(model, stage=stage)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.ones(2, 32, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(loss)
