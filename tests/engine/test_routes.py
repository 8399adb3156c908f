"""Ways of ranks that part: exact, or an error with names on all ranks, long before the limit."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks, run_to_end
from tests.distributed.values import full_of
from tests.engine.test_recompute_routes import Routed, wrap
from tests.model.test_joined_blocks import batch


def way_of(*key: int) -> int:
    return hash((*key, dist.get_rank()))


def joint_loss(model: nn.Module, step: int) -> Tensor:
    """Of several forwards, each by a way of the rank's own."""
    losses = [model(batch(3 * step + i), way_of(step, i)) for i in range(2 + step % 2)]
    return torch.stack(losses).sum()


def one_backward(stage: int) -> None:
    """Trains as one process does."""
    torch.manual_seed(0)
    plain: nn.Module = Routed()
    model = wrap("zerocore", copy.deepcopy(plain), stage)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(8):
        losses = [joint_loss(each, step) for each in (plain, model)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[0], losses[1])
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = zerocore.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(full, dict(plain.state_dict()))


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_one_backward_through_several_checkpointed_ways(stage: int, world_size: int) -> None:
    run_ranks(one_backward, world_size, stage, timeout=90)


class Layers(nn.Module):
    """Calls the layers of a route; those in brackets inside of a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abc"})

    def forward(self, x: Tensor, route: str) -> Tensor:
        if route.startswith("("):
            x = checkpoint(self.layers[route[1]], x.requires_grad_(), use_reentrant=True)
            route = route[3:]
        for name in route:
            x = torch.tanh(self.layers[name](x))
        return x


def drop_a_forward(stage: int) -> None:
    """The graph of a forward is dropped, in which ranks went different ways."""
    torch.manual_seed(0)
    plain: Any = Layers()
    model: Any = zerocore.shard(copy.deepcopy(plain), stage=stage, units=["Linear"])
    for step in range(4):
        for each in (plain, model):
            loss = each(batch(step), "ab").sum()
            x = batch(-step).requires_grad_()
            loss = loss + checkpoint(each.layers["c"], x, use_reentrant=True).sum()
            each(batch(step), "(a)b" if dist.get_rank() % 2 else "ab")
            loss.backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(expected.grad)
        average = expected.grad / dist.get_world_size()
        torch.testing.assert_close(full_of(param.grad), average)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_forward_that_is_dropped_beside_checkpoints(stage: int, world_size: int) -> None:
    run_ranks(drop_a_forward, world_size, stage)


def checkpoint_outside(stage: int) -> list[int]:
    """The collectives of micro-batches."""
    model: Any = zerocore.shard(Layers(), stage=stage, units=["Linear"])
    counts = []
    for step in range(4):
        with zerocore.reporting.record_events(model) as events:
            x = batch(step).requires_grad_()
            x = checkpoint(model.layers["a"], x, use_reentrant=True)
            model(x, "bc").sum().backward()
        counts.append(len(events))
    return counts


def test_a_backward_does_not_do_the_one_before_again(stage: int) -> None:
    for counts in run_ranks(checkpoint_outside, 2, stage):
        assert counts[1] == counts[2] == counts[3] <= counts[0]


class Chain(nn.Module):
    """Layers, one of which is changed in place where it is asked for."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        if self.where == "forward":
            self.change()
        x = first(x)
        if self.where == "backward" and x.requires_grad:
            x.register_hook(lambda grad: self.change())  # behind the layer's own backward
        return self.layers[2](torch.tanh(self.layers[1](torch.tanh(x))))

    def change(self) -> None:
        layer: Any = self.layers[1]
        with torch.no_grad():
            layer.weight.mul_(0.5)


def change_with_near_ranks(where: str) -> str:
    """The error of a change in place; empty for none, where the training is that without."""
    found = []
    for regather in (None, 2):
        torch.manual_seed(0)
        model = zerocore.shard(
            Chain(where), units=["Linear"], communication=zerocore.Communication(regather=regather)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for step in range(4):
                model(batch(step)).square().mean().backward()
                if where == "between":
                    model.change()
                optimizer.step()
                optimizer.zero_grad()
                if where == "unsharded":
                    with zerocore.unsharded(model, write_back=True):
                        model.change()
        except (ValueError, RuntimeError) as error:
            assert regather is not None
            return str(error)
        found.append(zerocore.full_state_dict(model, rank0_only=False))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    return ""


@pytest.mark.parametrize("where", ["forward", "backward", "between", "unsharded"])
def test_changes_in_place_with_near_ranks(where: str) -> None:
    for told in run_ranks(change_with_near_ranks, 4, where):
        named = "'layers.1'" in told and "regather" in told
        assert named if where == "forward" else named or told == "", told


class Actor(nn.Linear):
    """A model."""


class Critic(nn.Linear):
    """Another one."""


def begin_in_other_order(stage: int, num_steps: int) -> tuple[str, float]:
    """The error where rank 1 goes backward through the other model first, and its seconds."""
    torch.manual_seed(0)
    models = [zerocore.shard(each, stage=stage) for each in (Actor(8, 8), Critic(8, 8))]
    start = time.monotonic()
    try:
        for step in range(num_steps + 1):
            losses = [model(batch(step)).square().mean() for model in models]
            start = time.monotonic()
            turned = step == num_steps and dist.get_rank() == 1
            for loss in reversed(losses) if turned else losses:
                loss.backward()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("num_steps", [0, 20])
def test_backwards_of_two_models_in_other_order(stage: int, num_steps: int) -> None:
    """An error on all ranks that names both, in the first step and in one like many before."""
    outcomes = run_to_end(
        begin_in_other_order, 2, stage, num_steps, timeout=90, group_timeout=600.0
    )
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error
        told, seconds = outcome.value
        # On a machine that is too busy a rank may not have answered in time.
        assert ("Actor" in told and "Critic" in told) or "did not answer" in told, told
        assert seconds < 30
