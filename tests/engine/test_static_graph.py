"""Ranks that promise to do the same in each pass: they send nothing once they agree on a pass."""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.distributed.harness import run_ranks, run_to_end
from tests.distributed.values import full_of
from tests.recovery.test_lost_batches import CLOSE, WRAPPERS, Net, batch, clip, full_values
from zerocore.common.alarm import STALL_SECONDS
from zerocore.model.state import state_of


class Branches(nn.Module):
    """Two units that all calls use, and one for those that ask; `spare` is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)
        self.side = nn.Linear(8, 8)

    def forward(self, x: Tensor, side: bool = False) -> Tensor:
        x = self.last(self.first(x).relu())
        return self.side(x) if side else x


def make(stage: int, *, static_graph: bool = True) -> Branches:
    torch.manual_seed(0)
    model = Branches()
    return zerocore.shard(
        model,
        stage=stage,
        units=["Linear"],
        communication=zerocore.Communication(static_graph=static_graph),
    )


def num_messages(model: nn.Module) -> int:
    agreed = state_of(model).engine.agreed
    return agreed["num_messages"] + agreed["num_compared"]


def train(model: Branches, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Steps of two micro-batches, each behind an evaluation."""
    for number in range(num_steps):
        torch.manual_seed(100 * number + dist.get_rank())
        with torch.no_grad():
            model(torch.randn(3, 8))
        with zerocore.no_sync(model):
            model(torch.randn(3, 8)).square().mean().backward()
        model(torch.randn(3, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return zerocore.matrices.Muon([{"params": matrices}, {"params": others, "use_muon": False}])


def count_and_train(stage: int, *, static_graph: bool) -> tuple[int, nn.Module]:
    """The messages of three steps behind 20 others."""
    model = make(stage, static_graph=static_graph)
    optimizer = optimizer_of(model)
    train(model, optimizer, 20)
    before = num_messages(model)
    train(model, optimizer, 3)
    return num_messages(model) - before, model


def send_nothing(stage: int) -> None:
    count, model = count_and_train(stage, static_graph=True)
    other_count, other = count_and_train(stage, static_graph=False)
    assert count == 0
    # Two passes, the used parameters of one backward and the optimizer's flags; where an evaluation
    # gathers that pass, too, and where gradients are sharded the other backward.
    assert other_count == 3 * (4 + (stage >= 1) + (stage >= 2))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full_of(one), full_of(two))


@pytest.mark.one_by_day
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_message_once_a_pass_is_known(stage: int, world_size: int) -> None:
    """Evaluations, accumulation, unused parameters and Muon's flags send nothing, either."""
    run_ranks(send_nothing, world_size, stage)


def change_together() -> None:
    model = make(3)
    for side in [False] * 20 + [True] * 20 + [False] * 20:
        model(torch.ones(2, 8), side).sum().backward()
    before = num_messages(model)
    model(torch.ones(2, 8)).sum().backward()
    assert num_messages(model) == before
    gradient = model.first.weight.grad
    assert gradient is not None


def test_a_graph_that_changes_on_all_ranks_is_learned() -> None:
    run_ranks(change_together, 3)


def break_the_promise(side: bool) -> str:
    os.environ[STALL_SECONDS] = "2"
    model = make(3)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    odd = dist.get_rank() == 1
    with pytest.raises(dist.DistBackendError if side or not odd else KeyError) as caught:
        for number in range(3):
            if odd and not side:
                raise KeyError(number)
            model(torch.ones(2, 8), side=odd).sum().backward()
    if odd and not side:
        time.sleep(3)
    return str(caught.value)


@pytest.mark.one_by_day
@pytest.mark.parametrize("side", [True, False])
def test_a_rank_that_breaks_the_promise_gets_the_alarm(side: bool) -> None:
    """It calls another unit than the others, or raises in place of a pass."""
    outcomes = run_to_end(break_the_promise, 3, side, group_timeout=600.0)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        if side or outcome.rank != 1:
            assert re.search(r"ranks? (0, )?2 waits? in all_gather", outcome.value)


PROMISING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": partial(DistributedDataParallel, static_graph=True),
    "FSDP2": WRAPPERS["FSDP2"],
    **{
        f"stage {stage}": partial(
            zerocore.shard, stage=stage, communication=zerocore.Communication(static_graph=True)
        )
        for stage in (0, 2, 3)
    },
}


def started(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = PROMISING[name](Net())
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)


def train_as_promised(name: str) -> list[Tensor]:
    """Recomputed blocks, two micro-batches of which the last one of an epoch is smaller, evaluation
    between steps, clipping, and a resume in a new model half way."""
    model, optimizer = started(name, 0)
    for step in range(8):
        if step == 4:
            saved = model.state_dict(), copy.deepcopy(optimizer.state_dict())
            model, optimizer = started(name, 1)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for micro in range(2):
            size = 1 if (step % 4, micro) == (3, 1) else 4
            x = batch(step, micro, dist.get_rank())[:size]
            model(x).square().mean().div(2).backward()
        clip(model, name)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(batch(step, 9, dist.get_rank()))
        model.train()
    return full_values(model)


def train_in_all_ways() -> dict[str, list[Tensor]]:
    return {name: train_as_promised(name) for name in PROMISING}


@pytest.mark.one_by_day
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_ordinary_program_keeps_the_promise(world_size: int) -> None:
    for found in run_ranks(train_in_all_ways, world_size):
        for name, values in found.items():
            for value, expected in zip(values, found["DDP"], strict=True):
                torch.testing.assert_close(value, expected, **CLOSE, msg=name)
