"""Exports and parked models on the device: its memory is counted, and early reads are NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
import zerocore.fsdp as zerocore_fsdp
from tests.async_device.training import WIDTH, Block, make_model, start
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of

ROUNDING = 512  # bytes to which each allocation is rounded up


def allocated() -> int:
    return torch.accelerator.memory_allocated()


def make(kind: str, device: torch.device) -> nn.Module:
    model = make_model(device)
    if kind == "rows":
        mesh = init_device_mesh(device.type, (2,))
        for block in model:
            zerocore_fsdp.fully_shard(block, mesh=mesh)
        return zerocore_fsdp.fully_shard(model, mesh=mesh)
    narrow = zerocore.MixedPrecision(torch.bfloat16) if kind == "narrow" else None
    stage = int(kind) if kind.isdigit() else 3
    return zerocore.shard(model, stage=stage, units=[Block], mixed_precision=narrow)


def exported(model: nn.Module, max_bytes: int) -> dict[str, torch.Tensor]:
    found = {}
    for bucket in zerocore.export(model, max_bytes=max_bytes):
        found |= {name: value.clone() for name, value in bucket.items()}
        bucket.release()
    return {name: value.float().cpu() for name, value in found.items()}


def take_turns(kind: str) -> None:
    device, extension = start(True)
    extension.set_delays(1, 0.3, 400)
    model = make(kind, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.ones(4, WIDTH, device=device)
    seen: list[Any] = []
    for step in range(3):
        loss = model(inputs).float().square().mean()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            continue
        extension.synchronize()
        before, whole = allocated(), exported(model, 3000)
        state_nbytes = zerocore.memory_usage(model, optimizer).total
        with zerocore.parked(model, optimizer):
            extension.synchronize()
            assert before - allocated() >= state_nbytes
            again = exported(model, 3000)
        assert all(torch.equal(whole[name], again[name]) for name in whole)
        assert not any(value.isnan().any() for value in whole.values())
        assert all(map(torch.equal, whole.values(), exported(model, 1).values()))
        extension.synchronize()
        assert allocated() <= before + ROUNDING  # the arena comes back with the next forward
        seen.append(whole)
    assert not all(map(torch.equal, seen[0].values(), seen[1].values()))


@pytest.mark.one_by_day
@pytest.mark.parametrize("kind", ["3", "1", "narrow", "rows"])
def test_parked_memory_is_free(kind: str) -> None:
    run_ranks(take_turns, 2, kind, launch="torchrun", timeout=120)


def count() -> None:
    device, extension = start(True)
    model = make("3", device)
    model(torch.ones(4, WIDTH, device=device)).sum().backward()
    info = zerocore.weights.export_info(model, dtype=torch.bfloat16)
    unit = state_of(model).engine.layout(0).nbytes
    for max_bytes in (1, unit // 3, unit, 2 * unit):
        extension.synchronize()
        before = allocated()
        torch.accelerator.reset_peak_memory_stats()
        for _ in zerocore.export(model, info=info, max_bytes=max_bytes):
            pass
        taken = torch.accelerator.max_memory_allocated() - before
        assert taken <= info.peak_nbytes(max_bytes) + 20 * ROUNDING


def test_an_export_takes_no_more_than_planned() -> None:
    run_ranks(count, 2, launch="torchrun", timeout=120)
