"""Ranks that come to a step of Muon differently: gradients that are missing, steps left out."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks, run_to_end
from tests.distributed.values import full_of
from tests.matrices.whole_matrices import assert_equal, full_parameters
from zerocore.common.alarm import STALL_SECONDS
from zerocore.matrices import Muon, muon_rounds, owned

LIMIT, PATIENCE = 2.0, 5.0  # seconds, as in test_alarm
ODD = 1  # the rank that does something else


class Net(nn.Module):
    """Two matrices, of which a rank may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x).tanh()
        return (self.second(x) if both else x).square().mean()


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank))


MAKES: list[Any] = [
    lambda named: Muon(named, lr=0.02, adamw={"lr": 0.01}),
    lambda named: owned(torch.optim.Muon, [p for _, p in named if p.ndim == 2], lr=0.02),
]

# -- gradients --------------------------------------------------------------------------------


def train_with_one_rank_skipping() -> None:
    """A matrix that one rank does not use has a gradient on all: the average with zero."""
    for stage in range(4):
        for make in MAKES:
            model = zerocore.shard(seeded(), stage=stage, units=["Linear"])
            alone = seeded()
            optimizer = make(list(model.named_parameters()))
            expected = make_expected(make, alone)
            for step in range(3):
                model(batch(step, dist.get_rank()), both=dist.get_rank() != ODD).backward()
                check_gradients(model, alone, step)
                optimizer.step()
                model.zero_grad()
                for each in expected:
                    each.step()
                assert_equal(full_parameters(model), dict(alone.state_dict()))


def make_expected(make: Any, alone: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in alone.parameters() if p.ndim == 2]
    rest = [p for p in alone.parameters() if p.ndim < 2]
    muon = torch.optim.Muon(matrices, lr=0.02)
    return [muon, torch.optim.AdamW(rest, lr=0.01, fused=True)] if make is MAKES[0] else [muon]


def check_gradients(model: nn.Module, alone: nn.Module, step: int) -> None:
    """They are the averages, and ``alone`` gets them bit for bit."""
    alone.zero_grad()
    for rank in range(dist.get_world_size()):
        (alone(batch(step, rank), both=rank != ODD) / dist.get_world_size()).backward()
    for (name, param), own in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert param.grad is not None, name
        full = full_of(param.grad)
        torch.testing.assert_close(full, own.grad)
        own.grad = full


def test_a_matrix_that_a_rank_does_not_use() -> None:
    run_ranks(train_with_one_rank_skipping, 2)


def lose_a_gradient() -> list[str]:
    messages = []
    for stage in (0, 3):
        for make in MAKES:
            model = zerocore.shard(seeded(), stage=stage, units=["Linear"])
            optimizer = make(list(model.named_parameters()))
            model(batch(0, 0), both=True).backward()
            lost = model.second.weight.grad
            if dist.get_rank() == ODD:
                model.second.weight.grad = None
            before = full_parameters(model)
            with pytest.raises(ValueError) as caught:
                optimizer.step()
            messages.append(str(caught.value))
            assert_equal(full_parameters(model), before)
            model.second.weight.grad = lost
            optimizer.step()
            moved = full_parameters(model)
            assert not torch.equal(moved["second.weight"], before["second.weight"])
    return messages


def test_a_gradient_that_one_rank_lacks_is_named_on_all() -> None:
    """Before anything is exchanged or updated; training goes on once it is there."""
    for messages in run_ranks(lose_a_gradient, 3):
        for message in messages:
            assert "'second.weight' has a gradient on ranks [0, 2] and none on ranks [1]" in message


# -- the alarm --------------------------------------------------------------------------------


def leave_out_a_step(optimizer: Any, model: nn.Module) -> None:
    optimizer.zero_grad()


def end_in_a_step(optimizer: Any, model: nn.Module) -> None:
    muon_rounds.orthogonalise = lambda *args: os._exit(3)  # type: ignore[assignment]
    optimizer.step()


def disagree(act: Any, stage: int) -> tuple[str, float] | None:
    """The error of this rank, and the seconds until it came; None for none."""
    os.environ[STALL_SECONDS] = str(LIMIT)
    model = zerocore.shard(seeded(), stage=stage, units=["Linear"])
    optimizer = MAKES[0](list(model.named_parameters()))
    start = time.monotonic()
    try:
        for step in range(4):
            model(batch(step, dist.get_rank()), both=True).backward()
            start = time.monotonic()
            if step == 2 and dist.get_rank() == ODD:
                act(optimizer, model)
            else:
                optimizer.step()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start
    return None


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("act", "told"),
    [
        (leave_out_a_step, r"rank 1 waits in all_(gather|reduce) of '(first|the calls of a pass)'"),
        (end_in_a_step, "rank 1 did not answer within 3 s: killed, stopped, out of reach"),
    ],
)
def test_a_rank_that_does_not_come_is_named(act: Any, told: str) -> None:
    run = partial(run_to_end, disagree, 2, timeout=60.0, group_timeout=600.0)
    for stage in (0, 3):
        first = run(act, stage)[0]
        assert first.value is not None, first.error
        message, seconds = first.value
        assert re.search(told, message), message
        assert re.search(r"rank 0 waits in all_(reduce|to_all) of 'optimizer'", message), message
        assert "They agreed up to" in message
        assert seconds < LIMIT + PATIENCE
