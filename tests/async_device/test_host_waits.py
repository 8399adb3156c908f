"""How often the host waits for the device in optimizer steps and saves."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

import zerocore
from tests.async_device.test_offload import backward, clipped
from tests.async_device.training import Block, make_model, start
from tests.distributed.harness import run_ranks
from tests.engine.offloading import STATES
from zerocore.checkpoint.dcp.saved_state import SavedState


def clip_muon() -> None:
    """Gives the third step a gradient that is not finite, so that it is skipped."""
    device, extension = start(on_device=True)
    model: Any = zerocore.shard(make_model(device), stage=3, units=[Block])
    optimizer = zerocore.matrices.Muon(model.parameters(), lr=0.02, clip_grad_norm=0.5)
    values: list[list[torch.Tensor]] = []
    for step in range(4):
        backward(model, device, step)
        if step == 2:
            next(iter(model.parameters())).grad.mul_(float("inf"))
        extension.forbid_host_waits(step > 0)  # the first step makes plans and states
        optimizer.step()
        extension.forbid_host_waits(False)
        states = [value for state in optimizer.state.values() for value in state.values()]
        held = [*model.parameters(), *states]
        values.append([getattr(value, "local", value.detach)().cpu() for value in held])
        optimizer.zero_grad()
    kept = [all(map(torch.equal, old, new)) for old, new in pairwise(values)]
    assert kept == [False, True, False]


def test_muon_clips_without_a_wait() -> None:
    run_ranks(clip_muon, 2, launch="torchrun")


def save() -> None:
    device, _ = start(on_device=True)
    waited_for: list[Any] = []
    module: Any = torch.get_device_module(device)
    module.synchronize = waited_for.append
    tensor = torch.ones(4, device=device)
    state: Any = SimpleNamespace(tensors={"weight": (tensor, 0)}, parts=lambda: iter([tensor]))
    assert [part.tolist() for part in SavedState.parts_on_cpu(state)] == [[1.0] * 4]
    assert waited_for == [tensor.device]


def test_a_save_waits_for_the_device_of_its_tensors() -> None:
    """The thread that saves has the process's first device as the current one."""
    run_ranks(save, 1, launch="torchrun")


def waits_of_a_step(num_blocks: int) -> int:
    device, extension = start(on_device=True)
    model = zerocore.shard(make_model(device, num_blocks), stage=3, units=[Block], offload=STATES)
    optimizer = clipped(model.parameters())
    for step in range(3):
        backward(model, device, step)
        before = dict(extension.host_waits())
        optimizer.step()
        waits = dict(extension.host_waits())
    return sum(waits[name] - before.get(name, 0) for name in waits if "event" not in name)


def test_units_on_the_host_share_a_wait_for_the_factors() -> None:
    """The host waits for the gradients' factor, and for whether the step is skipped."""
    for num_blocks in (2, 6):
        assert run_ranks(waits_of_a_step, 2, num_blocks, launch="torchrun") == [2, 2]
