"""Twenty steps with offload, with Muon and with `zerocore.fsdp`: what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zerocore
import zerocore.fsdp
from tests.gpu.training import VARIANTS, Branches, Stack, peers, run_step, shard

STEPS = 20  # the second and the eighteenth are traced
PLAIN = VARIANTS[0]


def losses_of(model: Stack, make: Callable[[Any], torch.optim.Optimizer]) -> Tensor:
    optimizer = make(model.parameters())
    losses = [loss for step in range(STEPS) for loss in run_step(model, optimizer, step)]
    return torch.stack(losses).cpu()


def adamw(params: Any) -> torch.optim.Optimizer:
    return zerocore.optim.AdamW(params, lr=1e-2, eps=1e-5)


def torchs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-5)


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("gradients", ["device", "cpu"])
def test_offload(device: torch.device, gradients: str) -> None:
    expected = losses_of(Stack(PLAIN).to(device), torchs)
    offload = zerocore.Offload(states="cpu", gradients=gradients)
    with peers():
        model = Stack(PLAIN).to(device)
        zerocore.shard(model, units=[Branches], offload=offload)
        check_close(losses_of(model, adamw), expected)
        traced = [step.number for step in zerocore.report(model).steps if step.communication]
        assert traced == [1, 17]


def test_muon(device: torch.device) -> None:
    """At stages 1 and 3; a peer of the emulated link holds this rank's matrices, so without one."""
    found = []
    for stage in (1, 3):
        model = shard(Stack(PLAIN).to(device), stage)
        found.append(
            losses_of(model, lambda p: zerocore.optim.Muon(p, lr=1e-2, clip_grad_norm=0.5))
        )
    assert torch.equal(*found) and found[0][-1] < found[0][0]


def test_fsdp(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    expected = losses_of(Stack(PLAIN).to(device), torchs)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    group: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(group, device.type)
    model: Any = Stack(PLAIN).to(device)
    units: list[nn.Module] = [*model.units, model]
    for unit in units:
        zerocore.fsdp.fully_shard(unit, mesh=mesh)
    check_close(losses_of(model, torchs), expected)
