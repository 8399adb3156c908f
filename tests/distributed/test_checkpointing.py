"""Activation checkpointing, of both kinds, changes nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    accumulate,
    assert_gradients,
    case_named,
)


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


def checkpoint_blocks(stage: int, way: str, use_reentrant: bool) -> None:
    for name in CASES:
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


def checkpoint_huggingface(stage: int, name: str, use_reentrant: bool, before: bool) -> None:
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


@pytest.mark.parametrize("before", [True, False], ids=["enabled_before", "enabled_after"])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["hf_gpt2_tied", "hf_llama", "hf_t5"])
def test_huggingface(stage: int, name: str, use_reentrant: bool, before: bool) -> None:
    pytest.importorskip("transformers")
    run_ranks(checkpoint_huggingface, 2, stage, name, use_reentrant, before)
