"""Weights that change between a step, which has begun to gather them, and the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.test_gather_at_step import ADAMW, BF16, EVERYTHING, Block, Net, Training


def weights(model: Net) -> list[Any]:
    """Of the first unit, which is gathered, and of the last."""
    return [*model.blocks[0].parameters(), *model.blocks[-1].parameters()]


def clamp_data(model: Net) -> None:
    for param in weights(model):
        param.data.clamp_(-0.01, 0.01)


@torch.no_grad()
def multiply(model: Net) -> None:
    for param in weights(model):
        param.mul_(0.5)


@torch.no_grad()
def multiply_local(model: Net) -> None:
    for param in weights(model):
        param.data.local().mul_(0.5)


CHANGES = (clamp_data, multiply, multiply_local)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": BF16},
    "host": {"offload": EVERYTHING},
}


def train(change: Callable[[Net], None], at_step: bool, evaluates: bool, options: Any) -> Any:
    """Losses, weights, and the gathers begun in steps."""
    torch.manual_seed(0)
    model = zerocore.shard(Net(), units=[Block], gather_at_step=at_step, **options)
    training = Training(model, [ADAMW(model.parameters())])
    for step in range(4):
        training.backward(step)
        training.update()
        if step % 2:
            change(training.model)
        if evaluates:
            with torch.no_grad():
                training.forward(50 + step)
    return training.losses, zerocore.full_state_dict(model), training.gathered


def compare(change: Callable[[Net], None], evaluates: bool, options: Any) -> None:
    expected, full, none = train(change, False, evaluates, options)
    losses, again, gathered = train(change, True, evaluates, options)
    assert (losses, none, gathered) == (expected, 0, 4)
    different: list[Tensor] = [v for key, v in full.items() if not torch.equal(v, again[key])]
    assert not different


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_after_the_step_are_gathered_again(
    change: Callable[[Net], None], options: str
) -> None:
    run_ranks(compare, 2, change, change is multiply, OPTIONS[options])


def test_emulated_ranks_gather_again() -> None:
    with zerocore.emulate(4, "10GB/s", "10us"):
        losses = [train(multiply, at_step, False, {})[0] for at_step in (False, True)]
    assert losses[0] == losses[1]
