"""Offload, Muon, `zerocore.fsdp`, checkpoints, parked states, narrow wires and refused captures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zerocore
import zerocore.fsdp
from tests.distributed.values import own_of
from tests.gpu.checks import (
    assert_same_bits,
    bits,
    check_background_save,
    check_wire,
    make_sharded,
)
from tests.gpu.training import VARIANTS, WIDTH, Branches, Stack, peers, run_step, shard
from zerocore import MixedPrecision

STEPS = 20  # of test_offload, test_muon and test_fsdp; the second and the eighteenth are traced
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
            losses_of(model, lambda p: zerocore.matrices.Muon(p, lr=1e-2, clip_grad_norm=0.5))
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


def test_a_background_save(device: torch.device, stage: int, tmp_path: Path) -> None:
    check_background_save(device, tmp_path, stage)


@pytest.mark.parametrize("offload", [None, zerocore.Offload(states="cpu")], ids=["device", "cpu"])
def test_parked(device: torch.device, stage: int, offload: zerocore.Offload | None) -> None:
    """The bits are those of a run without it, though a step was under way when it began."""
    found = []
    for parks in (False, True):
        with peers():
            model, optimizer = make_sharded(device, stage=stage, offload=offload)
            for step in range(4):
                run_step(model, optimizer, step)
                if parks:
                    park(model, optimizer, device)
            found.append(bits(model, optimizer))
    assert_same_bits(*found)


def park(model: Stack, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """On a GPU, at least the memory of its parameters is free inside the block."""
    if device.type == "cpu":
        with zerocore.parked(model, optimizer):
            return
    shards = [own_of(param) for param in model.parameters()]
    nbytes = sum(each.nbytes for each in shards if each.is_cuda)
    del shards
    held = torch.cuda.memory_allocated(device)
    with zerocore.parked(model, optimizer):
        assert torch.cuda.memory_allocated(device) <= held - nbytes


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_narrow_gathers(device: torch.device, dtype: torch.dtype) -> None:
    check_wire(device, 3, MixedPrecision(torch.bfloat16, gather_dtype=dtype))


def test_narrow_reductions(device: torch.device, stage: int) -> None:
    check_wire(device, stage, MixedPrecision(wire_dtype=torch.bfloat16))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_refused_capture(cuda: torch.device, stage: int) -> None:
    """The model goes on afterwards, with the bits of one that was never captured."""
    found = []
    for captures in (False, True):
        with peers():
            model, optimizer = make_sharded(cuda, stage=stage)
            for step in range(3):
                run_step(model, optimizer, step)
                if captures:
                    capture(model)
            found.append(bits(model, optimizer))
    assert_same_bits(*found)


def capture(model: Stack) -> None:
    inputs = torch.ones(8, WIDTH, dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    error = pytest.raises(RuntimeError, match="in the capture of a CUDA graph")
    with error, torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(inputs)
