"""The device alone: it computes the CPU's results, later, and a missing order shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.async_device.device import DEVICE, load
from tests.async_device.training import WIDTH, make_model, start, train
from tests.distributed.harness import run_ranks

LATE_US = 50_000  # far longer than the host takes for the rest of a test
# The host waits by `extension.synchronize()`: with torch 2.11 `torch.accelerator.synchronize()`
# returns at once, as if the device had never been used.


def run(check: Callable[..., None], *args: Any) -> None:
    """Runs the check in a process that has the device."""
    run_ranks(check, 1, *args, launch="none")


def chain(x: Tensor) -> Tensor:
    """Computes with products, views, broadcasts, reductions, casts and an index."""
    y = x
    for _ in range(4):
        y = torch.tanh(y @ x + y.t()) - y.mean(0, keepdim=True)
        y = torch.cat([y[:, ::2], y[:, 1::2].half().float()], 1).contiguous()
    return torch.nn.functional.gelu(y)[torch.arange(0, WIDTH, 3)].square().sum()


def check_a_chain(seed: int) -> None:
    extension = load()
    extension.set_delays(seed, 0.3, 500)
    torch.manual_seed(seed)
    on_cpu = torch.randn(WIDTH, WIDTH, requires_grad=True)
    on_device = on_cpu.detach().to(DEVICE).requires_grad_()
    results = [chain(leaf) for leaf in (on_cpu, on_device)]
    for result in results:
        result.backward()
    assert torch.equal(results[1].cpu(), results[0])
    assert on_cpu.grad is not None and on_device.grad is not None
    assert torch.equal(on_device.grad.cpu(), on_cpu.grad)
    losses = [
        train(make_model(torch.device(kind), 2), torch.device(kind)) for kind in ("cpu", DEVICE)
    ]
    assert torch.equal(torch.stack(losses[1]).cpu(), torch.stack(losses[0]))


@pytest.mark.parametrize("seed", range(2))
def test_a_chain_is_that_of_the_cpu(seed: int) -> None:
    run(check_a_chain, seed)


def check_streams() -> None:
    """The host goes on at once; a stream sees another's work only if it waits for it."""
    extension = load()
    side = torch.Stream(DEVICE)
    for waits in (True, False):
        source = torch.zeros(100, device=DEVICE)
        extension.synchronize()
        with side:
            extension.sleep(LATE_US, side.stream_id)
            source.fill_(1.0)
            late = side.record_event()
        assert not side.query() and not late.query()
        if waits:
            torch.accelerator.current_stream().wait_event(late)
        copy = source.clone()
        source.record_stream(side)
        assert bool((copy == 1.0).all()) == waits
        late.synchronize()


def check_poison() -> None:
    """Reads memory late: kept by record_stream, freed too early, and new."""
    extension = load()
    side = torch.Stream(DEVICE)
    for kept in (True, False):
        source = torch.ones(100, device=DEVICE)
        extension.synchronize()
        with side:
            extension.sleep(LATE_US, side.stream_id)
            copy = source.clone()
        if kept:
            source.record_stream(side)
        del source
        if kept:
            assert bool(torch.zeros(100, device=DEVICE).eq(0).all())  # in other memory
        side.synchronize()
        assert bool(copy.eq(1).all() if kept else copy.isnan().all())
    assert bool(torch.empty(100, device=DEVICE).isnan().all())


def check_waits_are_counted() -> None:
    extension = load()
    x = torch.ones(4, device=DEVICE)
    extension.forbid_host_waits(True)
    y = (x + x).square_()
    with pytest.raises(RuntimeError, match="the host waits for the device: item"):
        y.sum().item()
    extension.forbid_host_waits(False)
    assert y.tolist() == [4.0] * 4
    assert dict(extension.host_waits())["item"] == 1


def check_errors_come_later() -> None:
    load()
    x = torch.ones(4, device=DEVICE)
    wrong = x[torch.full((2,), 7, device=DEVICE)]
    with pytest.raises(IndexError, match="out of bounds"):
        wrong.cpu()
    assert x.sum().item() == 4


@pytest.mark.parametrize(
    "check", [check_streams, check_poison, check_waits_are_counted, check_errors_come_later]
)
def test_streams_and_memory(check: Callable[[], None]) -> None:
    run(check)


def gathered(own: Tensor, async_op: bool) -> tuple[Any, Tensor]:
    out = torch.empty(own.numel() * dist.get_world_size(), device=own.device)
    return dist.all_gather_into_tensor(out, own, async_op=async_op), out


def scattered(own: Tensor, async_op: bool) -> tuple[Any, Tensor]:
    full = torch.cat([own + index for index in range(dist.get_world_size())])
    out = torch.empty_like(own)
    return dist.reduce_scatter_tensor(out, full, async_op=async_op), out


def reduced(own: Tensor, async_op: bool) -> tuple[Any, Tensor]:
    return dist.all_reduce(own, async_op=async_op), own


def spread(own: Tensor, async_op: bool) -> tuple[Any, Tensor]:
    return dist.broadcast(own, 1, async_op=async_op), own


def exchanged(own: Tensor, async_op: bool) -> tuple[Any, Tensor]:
    out = torch.empty_like(own)
    return dist.all_to_all_single(out, own, async_op=async_op), out


def collect(device: torch.device) -> list[list[float]]:
    """Returns each collective's result, on the current stream and on its own."""
    found = []
    for call in (gathered, scattered, reduced, spread, exchanged):
        for async_op in (False, True):
            own = torch.arange(6.0, device=device) + 10 * dist.get_rank()
            work, out = call(own, async_op)
            assert (work is not None) == async_op
            if work is not None:
                work.wait()
            found.append((out + 0).clone())
    return [each.tolist() for each in found]


def check_collectives(on_device: bool) -> list[list[float]]:
    device, extension = start(on_device)
    if on_device:
        extension.set_delays(dist.get_rank(), 0.5, 1000)
        check_order(device, extension)
    return collect(device)


def check_order(device: torch.device, extension: Any) -> None:
    """A communicator keeps the host's order, whichever stream is late; coalesced calls are one."""
    side = torch.Stream(DEVICE)
    first, second = torch.ones(3, device=device), torch.ones(3, device=device)
    extension.synchronize()
    extension.forbid_host_waits(True)
    with side:
        if dist.get_rank() == 0:
            extension.sleep(LATE_US, side.stream_id)
        dist.all_reduce(first)
    dist.all_reduce(second)
    assert not torch.accelerator.current_stream().query()
    out = torch.empty(6, device=device)
    with dist._coalescing_manager(device=device, async_ops=True) as together:
        dist.all_gather_into_tensor(out, first)
    together.wait()
    with pytest.raises(RuntimeError, match="not in this rank's slice"):
        dist.all_gather_into_tensor(out, out[1:4])
    extension.forbid_host_waits(False)
    assert first.tolist() == second.tolist() == [2.0] * 3 and out.tolist() == [2.0] * 6


def test_collectives_are_those_of_gloo() -> None:
    expected = run_ranks(check_collectives, 2, False, launch="torchrun")
    assert run_ranks(check_collectives, 2, True, launch="torchrun") == expected
