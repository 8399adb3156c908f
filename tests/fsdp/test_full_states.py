"""Full optimizer states of models that ``fully_shard`` has sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks

OPTIMIZERS: list[Any] = [torch.optim.AdamW, zerocore.optim.AdamW]


def compare_states(number: int) -> None:
    make = OPTIMIZERS[number]
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model = zerocore.fsdp.fully_shard(copy.deepcopy(plain))
    states = []
    for net, optimizer in ((plain, torch.optim.AdamW), (model, make)):
        step = optimizer(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.ones(2, 5)).square().sum().backward()
            step.step()
            step.zero_grad()
        states.append(step)
    right = states[0].state_dict()
    found = zerocore.full_optimizer_state_dict(states[1])
    if dist.get_rank() > 0:
        assert found == {}
        found = zerocore.full_optimizer_state_dict(states[1], rank0_only=False)
    else:
        zerocore.full_optimizer_state_dict(states[1], rank0_only=False)
    for index, values in right["state"].items():
        for key, value in values.items():
            each = found["state"][index][key]
            assert type(each) is torch.Tensor, key
            torch.testing.assert_close(each, value, check_dtype=False)


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
@pytest.mark.parametrize("world_size", [2, 4])
def test_states_are_full(number: int, world_size: int) -> None:
    run_ranks(compare_states, world_size, number)
