"""Muon and owned optimizers with offload: the bits of training without offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.engine.offloading import BF16, DISK, PARAMETERS_ON_DISK, assert_same_bits, offloads_of
from tests.matrices.whole_matrices import Block, full_parameters, make_muon, seeded_model
from zerocore import Offload

Make = Callable[[nn.Module], torch.optim.Optimizer]


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return make_muon(model, lr=0.02)


def clipped(model: nn.Module) -> torch.optim.Optimizer:
    return make_muon(model, lr=0.02, clip_grad_norm=0.1)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return zerocore.matrices.owned(torch.optim.Adafactor, model.parameters(), lr=0.02)


def owned_muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [param for param in model.parameters() if param.ndim == 2 and param.requires_grad]
    return zerocore.matrices.owned(torch.optim.Muon, matrices, lr=0.02)


MAKES: list[Make] = [muon, clipped, adafactor, owned_muon]


def train(make: Make, stage: int, offload: Offload | None, **options: Any) -> dict[str, Tensor]:
    model = zerocore.shard(seeded_model(), stage=stage, units=[Block], offload=offload, **options)
    optimizer = make(model)
    found: dict[str, Tensor] = {}
    for step in range(4):
        loss = model(torch.arange(step, step + 6))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    return found | full_parameters(model)


def compare(make: Make, stage: int) -> None:
    offloads = [*offloads_of(stage), *([PARAMETERS_ON_DISK] if stage == 3 else [])]
    for options in ({}, {"mixed_precision": BF16}):
        expected = train(make, stage, None, **options)
        for offload in offloads:
            what = f"{make.__name__}, stage {stage}, {offload}, {options}"
            print(what, flush=True)
            assert_same_bits(train(make, stage, offload, **options), expected, what)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("world_size", [*by_night(1, 3), 2])
def test_offload_keeps_the_bits(make: Make, stage: int, world_size: int) -> None:
    run_ranks(compare, world_size, make, stage)


def step_on_disk(make: Make) -> None:
    model = zerocore.shard(seeded_model(), stage=3, units=[Block], offload=DISK)
    optimizer = make(model)
    model(torch.arange(6)).backward()
    with pytest.raises(ValueError, match="keeps its states in memory"):
        optimizer.step()


@pytest.mark.parametrize("make", MAKES)
def test_a_disk_is_refused(make: Make) -> None:
    run_ranks(step_on_disk, 2, make)
