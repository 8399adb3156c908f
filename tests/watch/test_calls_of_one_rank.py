"""Functions that communicate, called by one rank alone: an error on all ranks, no wrong number."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_to_end

ALONE: dict[str, Callable[[Any, Any], Any]] = {
    "histc": lambda model, _: model[0].weight.grad.histc(),
    "norm": lambda model, _: model[0].weight.grad.norm(),
    "norms": lambda model, _: [param.grad.norm() for param in model.parameters()],
    "sum": lambda model, _: model[0].weight.grad.sum(),
    "state": lambda model, optimizer: optimizer.state[model[0].weight]["exp_avg"].histc(),
    "state_dict": lambda model, _: zerocore.full_state_dict(model),
}
ALL: dict[str, Callable[[Any], Any]] = {
    "clip": lambda model: zerocore.clip_grad_norm_(model, 1.0),
    "torch's clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm": lambda model: model[2].weight.grad.norm(),
    "histc": lambda model: model[0].bias.grad.histc(),
    "barrier": lambda model: dist.barrier(),
    "forward": lambda model: model(torch.ones(2, 8)),
    "full state": lambda model: zerocore.full_state_dict(model),
}
BY_DAY = [
    ("histc", "clip"),
    ("norms", "torch's clip"),
    ("state", "barrier"),
    ("sum", "forward"),
    ("state_dict", "norm"),
]
PAIRS = [(alone, then) for alone in ALONE for then in ALL]
PAIRS.remove(("state_dict", "full state"))  # the ranks make the same call
BY_NIGHT = [pair for pair in PAIRS if pair not in BY_DAY]


def call_alone(alone: str, then: str, num_steps: int) -> tuple[str, float]:
    """Rank 0 calls one function, and then all ranks call another one; returns the error."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = zerocore.shard(net, stage=3, units=["Linear"])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(num_steps):
        model(torch.randn(4, 8)).sum().backward()
        ALL[then](model)
        optimizer.step()
        if step + 1 < num_steps:
            optimizer.zero_grad()
    start = time.monotonic()
    try:
        if dist.get_rank() == 0:
            ALONE[alone](model, optimizer)
        ALL[then](model)
        model(torch.randn(4, 8)).sum().backward()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


@pytest.mark.parametrize("num_steps", [2, *by_night(20)])  # later, ranks compare less
@pytest.mark.parametrize("world_size", [2, *by_night(3)])
@pytest.mark.parametrize(("alone", "then"), [*BY_DAY, *by_night(*BY_NIGHT)])
def test_a_call_of_one_rank(alone: str, then: str, world_size: int, num_steps: int) -> None:
    case = (alone, then, num_steps)
    for outcome in run_to_end(call_alone, world_size, *case, timeout=60, group_timeout=600.0):
        assert outcome.value is not None, outcome.error
        text, seconds = outcome.value
        assert "The ranks wait for each other" in text or "about to issue different" in text, text
        assert "rank 0 waits in" in text or "rank 0 has issued" in text, text
        assert seconds < 30
