"""Weights that change after a step that has sent them: one error on all ranks, and no harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.test_gather_at_step import ADAMW, BF16, Block, Net, Training, plainly
from zerocore.model.state import state_of


def local_of(model: Net) -> Tensor:
    """This rank's elements of the first linear layer's weight."""
    local: Tensor = model.blocks[0].linear.weight.data.local()
    return local


def clamp_data(model: Net) -> None:
    local_of(model).clamp_(-0.01, 0.01)


def write_array(model: Net) -> None:
    local_of(model).numpy()[...] *= 0.5


@torch.no_grad()
def multiply(model: Net) -> None:
    model.blocks[0].linear.weight.mul_(0.5)


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


def refuse(change: Change, mixed: bool) -> tuple[str, list[float]]:
    """The error, and the losses after it; these are those of the weights that the ranks have."""
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
    return message, losses


@pytest.mark.parametrize("index", range(len(CHANGES)))
def test_weights_changed_after_the_step_are_refused_on_all_ranks(index: int) -> None:
    change = CHANGES[index]
    messages = {message for message, _ in run_ranks(refuse, 2, change, index % 2 == 1)}
    assert len(messages) == 1
    message = messages.pop()
    assert "'blocks.0.linear.weight' of unit 'blocks.0' was changed on rank" in message
    assert f"rank {change.ranks[-1]} " in message
    assert "gather_at_step=False" in message


def test_where_the_other_ranks_are_emulated_this_one_decides() -> None:
    with zerocore.emulate(4, "10GB/s", "10us"):
        training = start(gather_at_step=True, mixed=False)
        model, seen = training.model, []
        weight = model.blocks[0].linear.weight
        begin, end = weight.shard_range
        model.blocks[0].linear.register_forward_pre_hook(
            lambda module, _: seen.append(module.weight.detach().flatten()[begin:end].clone())
        )
        for change in (clamp_data, multiply):
            change(model)
            changed = local_of(model).clone()
            plainly(training, 2)
            assert torch.equal(seen.pop(), changed)
        assert training.gathered == 4
