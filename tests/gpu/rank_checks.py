"""Checks for every rank of `tests.gpu.test_ranks`, with its device and a shared folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zerocore
import zerocore.fsdp
from tests.gpu import test_parity
from tests.gpu.checks import check_background_save, check_wire
from tests.gpu.training import VARIANTS, Stack, train

PLAIN, MIXED, ALL = VARIANTS[0], VARIANTS[1], VARIANTS[-1]


def collectives_are_made(device: torch.device, folder: Path) -> None:
    """Or the others would show nothing about the backend."""
    model = zerocore.shard(Stack(PLAIN).to(device), stage=3)
    with zerocore.reporting.record_events(model) as events:
        train(model, steps=2)
    assert {"all_gather", "reduce_scatter"} <= {event.op for event in events}


def parity(device: torch.device, folder: Path) -> None:
    """In a rehearsal the larger models at two stages only."""
    for stage in range(4):
        for variant in (PLAIN, MIXED, ALL):
            if variant is PLAIN or device.type == "cuda" or stage in (0, 3):
                test_parity.test_stages(device, stage, variant, prefetch=1)


def fsdp(device: torch.device, folder: Path) -> None:
    plain = Stack(PLAIN).to(device)
    expected = train(plain)
    group: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(group, device.type)
    model: Any = Stack(PLAIN).to(device)
    for unit in [*model.units, model]:
        zerocore.fsdp.fully_shard(unit, mesh=mesh)
    torch.testing.assert_close(train(model), expected, rtol=1e-9, atol=0.0)
    # Over gloo torch's full_tensor hands gloo a device's memory as if it were the host's.
    has_full = device.type == "cpu" or dist.get_backend() != "gloo"
    for (name, value), full in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert value.to_local().numel() < full.numel(), name
        if has_full:
            torch.testing.assert_close(value.full_tensor(), full, rtol=1e-9, atol=1e-9)


def checkpoint(device: torch.device, folder: Path) -> None:
    check_background_save(device, folder / "checkpoints", stage=3)


def wires(device: torch.device, folder: Path) -> None:
    for form in (torch.int8, torch.float8_e4m3fn):
        check_wire(device, 3, zerocore.MixedPrecision(torch.bfloat16, gather_dtype=form))
    for stage in (0, 3):
        check_wire(device, stage, zerocore.MixedPrecision(wire_dtype=torch.bfloat16))
