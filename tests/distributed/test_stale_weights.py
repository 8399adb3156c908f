"""Weights that change after a step that has sent them: one error on all ranks, and no harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.test_gather_at_step import ADAMW, BF16, Block, Net, Training, plainly
from zerocore.model.state import state_of


def some_weight(model: Net) -> Any:
    """A parameter of the first unit of which this rank has elements."""
    params: list[Any] = list(model.blocks[0].parameters())
    return next(param for param in params if param.data.local().numel() > 0)


def clamp_data(model: Net) -> None:
    some_weight(model).data.local().clamp_(-0.01, 0.01)


def write_array(model: Net) -> None:
    some_weight(model).data.local().numpy()[...] *= 0.5


@torch.no_grad()
def multiply(model: Net) -> None:
    some_weight(model).mul_(0.5)


@dataclass(frozen=True)
class Change:
    """What is done to weights of some ranks after a step."""

    change: Callable[[Net], None]
    ranks: tuple[int, ...]
    how: str = "backward"  # what comes next: "eval", "no backward", "step"


CHANGES = (
    Change(clamp_data, (0,)),
    Change(clamp_data, (0, 1)),
    Change(write_array, (1,), "no backward"),
    Change(multiply, (1,)),
    Change(multiply, (0,), "eval"),
    Change(multiply, (0, 1), "step"),
)


def start(gather_at_step: bool, mixed: bool) -> Training:
    torch.manual_seed(0)
    options: dict[str, Any] = {"mixed_precision": BF16} if mixed else {}
    model = zerocore.shard(Net(), units=[Block], gather_at_step=gather_at_step, **options)
    training = Training(model, [ADAMW(model.parameters())])
    for step in range(2):
        plainly(training, step)
    return training


def message_of(training: Training, how: str) -> str:
    """What the ranks raise, before any gradient is reduced."""
    if how == "eval":
        with torch.no_grad(), pytest.raises(RuntimeError) as caught:
            training.forward(2)
        return str(caught.value)
    loss = training.forward(2)
    with pytest.raises(RuntimeError) as caught:
        if how == "backward":
            loss.backward()
        elif how == "step":
            training.optimizers[0].step()
        else:
            training.forward(3)
    assert all(param.grad is None for param in training.model.parameters())
    return str(caught.value)


def refuse(change: Change, mixed: bool) -> tuple[str, str]:
    """The error, and which weight this rank changes. Losses after it are those of the weights."""
    found = []
    for gather_at_step in (False, True):
        training = start(gather_at_step, mixed)
        if dist.get_rank() in change.ranks:
            change.change(training.model)
        message = message_of(training, change.how) if gather_at_step else ""
        training.losses.clear()
        for step in range(4, 6):
            plainly(training, step)
        found.append((message, training.losses, zerocore.full_state_dict(training.model)))
    (_, expected, weights), (message, losses, again) = found
    assert losses == expected
    for key, value in weights.items():
        assert torch.equal(value, again[key]), key
    assert state_of(training.model).engine.pool_stats.in_use_nbytes > 0  # of the next forward
    return message, some_weight(training.model).fqn


@pytest.mark.parametrize("index", range(len(CHANGES)))
def test_weights_changed_after_the_step_are_refused_on_all_ranks(index: int) -> None:
    change = CHANGES[index]
    ranks = run_ranks(refuse, 2, change, index % 2 == 1)
    message, rank = ranks[0][0], change.ranks[-1]
    assert message == ranks[1][0]
    assert f"parameter '{ranks[rank][1]}' of unit 'blocks.0' was changed on rank {rank} " in message
    assert "gather_at_step=False" in message


def test_where_the_other_ranks_are_emulated_this_one_decides() -> None:
    with zerocore.emulate(4, "10GB/s", "10us"):
        training = start(gather_at_step=True, mixed=False)
        model, seen = training.model, []
        weight = some_weight(model)
        begin, end = weight.shard_range
        model.blocks[0].norm.register_forward_pre_hook(
            lambda module, _: seen.append(module.weight.detach().flatten()[begin:end].clone())
        )
        assert weight.fqn == "blocks.0.norm.weight"
        for change in (clamp_data, multiply):
            change(model)
            changed = weight.data.local().clone()
            plainly(training, 2)
            assert torch.equal(seen.pop(), changed)
        assert training.gathered == 4
