"""Activation checkpointing, of both kinds, changes nothing."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    accumulate,
    assert_gradients,
    case_named,
)
from tests.distributed.values import own_of, range_of


def checkpoint_calls(module: nn.Module, use_reentrant: bool) -> None:
    """Makes every call of `module` a checkpoint around that call."""
    call = type(module).__call__

    def checkpointed(self: nn.Module, *args: Any) -> Any:
        return checkpoint(partial(call, self), *args, use_reentrant=use_reentrant)

    module.__class__ = type(type(module).__name__, (type(module),), {"__call__": checkpointed})


def checkpoint_inside(module: nn.Module, use_reentrant: bool) -> None:
    """Makes `module` checkpoint what it does once it has been called."""
    forward = module.forward

    def checkpointed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=use_reentrant)

    module.forward = checkpointed  # type: ignore[method-assign]


WAYS = {"around": checkpoint_calls, "inside": checkpoint_inside}
CASES = ("plain", "scalars", "tied", "experts", "looped", "mixed_dtypes")
HUGGINGFACE = ("hf_gpt2_tied", "hf_llama", "hf_t5")


def checkpoint_blocks(stage: int, way: str, use_reentrant: bool) -> None:
    """Every other model; any two of model, stage, way and kind meet."""
    for name in CASES[(stage + (way == "around") + use_reentrant) % 2 :: 2]:
        case = case_named(name)
        model = zerocore.shard(case.seeded_build(), stage=stage)
        for block in model.blocks:
            WAYS[way](block, use_reentrant)
        for step in range(2):
            accumulate(model, case, step)
            assert_gradients(model, case, step)
            model.zero_grad()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_blocks(stage: int, way: str, use_reentrant: bool) -> None:
    run_ranks(checkpoint_blocks, 2, stage, way, use_reentrant)


def checkpoint_huggingface(stage: int, name: str, use_reentrant: bool) -> None:
    before = (stage + HUGGINGFACE.index(name) + use_reentrant) % 2 == 0  # any two options meet
    case = case_named(name)
    model: Any = case.seeded_build()
    settings = {"use_reentrant": use_reentrant}
    if before:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    model = zerocore.shard(model, stage=stage)
    if not before:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    assert model.is_gradient_checkpointing
    for step in range(2):
        accumulate(model, case, step)
        assert_gradients(model, case, step)
        model.zero_grad()


@pytest.mark.one_by_day
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", HUGGINGFACE)
def test_huggingface(stage: int, name: str, use_reentrant: bool) -> None:
    run_ranks(checkpoint_huggingface, 2, stage, name, use_reentrant)


class TwoSegments(nn.Module):
    """One weight in two reentrant checkpoints: its gradient comes twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def step(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.step, x, use_reentrant=True)
        return x


def gradient_in_two_parts(stage: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(TwoSegments(), TwoSegments())
    sharded = zerocore.shard(copy.deepcopy(plain), stage=stage, units=[TwoSegments])
    for _ in range(3):
        for model in (plain, sharded):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    for full, shard in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert full.grad is not None and shard.grad is not None
        start, end = range_of(shard)
        torch.testing.assert_close(own_of(shard.grad), full.grad.flatten()[start:end])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_that_comes_in_two_parts(stage: int, world_size: int) -> None:
    run_ranks(gradient_in_two_parts, world_size, stage)
