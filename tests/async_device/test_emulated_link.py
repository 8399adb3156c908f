"""The emulated link on the device: order, copies, and a model on two of its communicators."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.utils._python_dispatch import TorchDispatchMode

import zerocore
from tests.async_device.device import DEVICE, load
from tests.async_device.training import Block, make_model, train
from tests.distributed.harness import run_ranks
from zerocore import _C
from zerocore.emulation import link
from zerocore.model.state import state_of


class Copies(TorchDispatchMode):
    """Counts copies, which must be of contiguous memory: a GPU does those by memcpy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.copy_:
            assert args[0].is_contiguous() and args[1].is_contiguous()
            self.count += 1
        return func(*args, **(kwargs or {}))


def on_current_stream() -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = False
    return options


def gather(group: Any, numel: int) -> Tensor:
    full = torch.empty(group.size() * numel, device=DEVICE)
    own = torch.arange(float(numel), device=DEVICE)
    group._allgather_base(full, own, on_current_stream())
    return full


def check_order_of_a_communicator() -> None:
    """A communicator books the link in the order of issue; a second one when its stream comes."""
    extension = load()
    _C.set_device_timer(extension.device_timer())
    group = _C.EmulatedGroup(1, 4, link("1GB/s", 0), 10.0)
    beside = group.beside()
    gather(group, 1)  # the host waits for memory in the first gather
    extension.synchronize()
    side = torch.Stream(DEVICE)
    for other, expected in ((group, [192, 96]), (beside, [96, 192])):
        booked = len(extension.booked())
        gate = extension.hold(side.stream_id)
        with side:
            gather(group, 16)  # 3 of 4 slices of 64 bytes, at a byte a nanosecond
        gather(other, 8)
        if other is beside:
            extension.wait_for_stream(extension.current_stream())
        gate.open()
        extension.synchronize()
        assert extension.booked()[booked:] == expected
    group.link = link("2GB/s", 0)
    assert beside.link.bandwidth == 2e9


def check_gathers_are_few_copies() -> None:
    load()
    _C.set_device_timer(load().device_timer())
    group = _C.EmulatedGroup(5, 64, link("inf", 0), 10.0)
    with Copies() as copies:
        full = gather(group, 6)
    assert copies.count == 1 + 6  # the own slice, then each copy doubles the slices
    assert full.tolist() == list(map(float, range(6))) * 64
    full.zero_()
    own = full[30:36]
    own.fill_(3.0)
    with Copies() as copies:
        group._allgather_base(full, own, on_current_stream())
    assert copies.count == 4 + 7 and bool((full == 3.0).all())


def train_emulated(device: torch.device) -> list[float]:
    """Trains at stage 3, where the device has a second communicator on the same link."""
    with zerocore.emulate(4, "10GB/s", "20us", rank=1) as emulation:
        model = zerocore.shard(make_model(device), stage=3, units=[Block])
        reductions = state_of(model).ranks.reductions
        assert (reductions is None) == (device.type == "cpu")
        losses = torch.stack(train(model, device)).tolist()
        if reductions is not None:
            emulation.link = link("1GB/s")
            assert reductions._get_backend(device).link.bandwidth == 1e9
    return losses


def check_training() -> None:
    _C.set_device_timer(load().device_timer())
    dist.Backend.backend_capability["emulated"].append(DEVICE)
    assert train_emulated(torch.device(DEVICE, 0)) == train_emulated(torch.device("cpu"))


def check_link() -> None:
    check_order_of_a_communicator()
    check_gathers_are_few_copies()
    check_training()


def test_the_emulated_link_on_a_device() -> None:
    run_ranks(check_link, 1, launch="none", timeout=100)
