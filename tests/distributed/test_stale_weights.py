"""Weights that change after a step that has sent them: an error on every rank, and no harm."""

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


def skip_and_multiply(model: Net) -> None:
    """This rank then leaves out the unit that was gathered, and changed."""
    multiply(model)
    model.first = 1


@dataclass(frozen=True)
class Change:
    """What is done to weights of some ranks after a step."""

    change: Callable[[Net], None]
    ranks: tuple[int, ...]
    how: str = "backward"  # what comes next, behind a forward: "no backward", "step"; or "eval"


CHANGES = (
    Change(clamp_data, (0,)),
    Change(clamp_data, (0, 1)),
    Change(write_array, (1,), "no backward"),
    Change(multiply, (1,)),
    Change(multiply, (0,), "eval"),
    Change(multiply, (0, 1), "step"),
    Change(skip_and_multiply, (1,)),
)


def start(gather_at_step: bool, mixed: bool) -> Training:
    torch.manual_seed(0)
    options: dict[str, Any] = {"mixed_precision": BF16} if mixed else {}
    model = zerocore.shard(Net(), units=[Block], gather_at_step=gather_at_step, **options)
    training = Training(model, [ADAMW(model.parameters())])
    for step in range(2):
        plainly(training, step)
    return training


def message_of(training: Training, how: str, is_changed: bool) -> str:
    """What a rank raises: one that has changed weights in the forward, another in its backward."""
    with torch.set_grad_enabled(how != "eval"):
        if is_changed:
            with pytest.raises(ValueError, match="was changed on this rank") as caught:
                training.forward(2)
            return str(caught.value)
        loss = training.forward(2)
    if how == "step":
        training.optimizers[0].step()
    elif how == "backward":
        with pytest.raises(RuntimeError) as refused:
            loss.backward()
        return str(refused.value)
    return ""


def refuse(change: Change, mixed: bool) -> tuple[str, str]:
    """The error, and which weight this rank changes. Losses after it are those of the weights."""
    found = []
    for gather_at_step in (False, True):
        training = start(gather_at_step, mixed)
        is_changed = dist.get_rank() in change.ranks
        if is_changed:
            change.change(training.model)
        message = message_of(training, change.how, is_changed) if gather_at_step else ""
        assert all(param.grad is None for param in training.model.parameters())
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
    for rank, (message, fqn) in enumerate(run_ranks(refuse, 2, change, index % 2 == 1)):
        if rank in change.ranks:
            assert f"parameter '{fqn}' of unit 'blocks.0' was changed on this rank" in message
            assert "gather_at_step=False" in message
        elif change.how == "backward":
            assert f"the forward raised on rank {change.ranks[0]} of the model's ranks" in message


def test_emulated_ranks_are_refused_as_real_ones() -> None:
    with zerocore.emulate(4, "10GB/s", "10us"):
        for change in (clamp_data, write_array, multiply):
            training = start(gather_at_step=True, mixed=False)
            change(training.model)
            assert "gather_at_step=False" in message_of(training, "backward", is_changed=True)
            plainly(training, 3)
