"""Steady steps use the same addresses as the steps before."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zerocore
from tests.async_device.test_offload import backward
from tests.async_device.training import Block, make_model, start
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.values import own_of

Place = tuple[str, int]
MIXED = zerocore.MixedPrecision(torch.bfloat16, torch.float32, output_dtype=torch.float32)
CASES: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 3, "communication": zerocore.Communication(prefetch=2)},
    {"stage": 3, "mixed_precision": MIXED},
]


def full_parameters(block: nn.Module, found: list[Place], when: str) -> None:
    found.extend((f"{when} {name}", param.data_ptr()) for name, param in block.named_parameters())


def watch(block: nn.Module, found: list[Place]) -> None:
    """Notes where the unit's full parameters lie in the forward and in the backward."""
    layers: Any = block
    layers.up.register_forward_pre_hook(lambda *_: full_parameters(block, found, "forward"))
    layers.down.register_full_backward_pre_hook(
        lambda *_: full_parameters(block, found, "backward")
    )


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Place]:
    """Returns the addresses of shards, their gradients and the optimizer's states."""
    found: list[Place] = []
    for name, param in model.named_parameters():
        shard: Any = param
        found += [(name, own_of(shard).data_ptr()), (name, own_of(shard.grad).data_ptr())]
        moments: list[Any] = [optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")]
        found += [(name, own_of(moment).data_ptr()) for moment in moments]
    return found


def addresses(
    device: torch.device, micro_batches: int, options: dict[str, Any]
) -> list[list[Place]]:
    """Returns the addresses of each of six steps."""
    model: Any = zerocore.shard(make_model(device), units=[Block], **options)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-3)
    steps: list[list[Place]] = []
    found: list[Place] = []
    for block in model:
        watch(block, found)
    for step in range(6):
        found.clear()
        for index in range(micro_batches):
            last = index == micro_batches - 1
            with nullcontext() if last else zerocore.no_sync(model):
                backward(model, device, step)
        optimizer.step()
        steps.append([*found, *kept(model, optimizer)])
        optimizer.zero_grad()
    return steps


def check_addresses(micro_batches: int) -> None:
    device, _ = start(on_device=True)
    for options in CASES:
        steps = addresses(device, micro_batches, options)
        full = [address for name, address in steps[2] if "ward " in name]
        assert len(full) == micro_batches * 2 * 4 * 4 and 0 not in full
        assert all(step == steps[2] for step in steps[3:]), options


@pytest.mark.parametrize("micro_batches", [*by_night(2), 1])
def test_steady_steps_have_the_addresses_of_those_before(micro_batches: int) -> None:
    run_ranks(check_addresses, 2, micro_batches, launch="torchrun", timeout=150)
