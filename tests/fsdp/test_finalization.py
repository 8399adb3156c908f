"""Backwards that the program finalizes, and gradients in a dtype of their own (torch 2.15)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.fsdp.both import (
    NUM_STEPS,
    Trained,
    check_same,
    full_params,
    loss_of,
    make_net,
    shard_blocks,
    tokens_of,
    train,
)


def accumulates(model: Any, index: int) -> float:
    """Three micro-batches, of which the last one reduces."""
    total = 0.0
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss = loss_of(model, tokens_of(index, micro)) / 3
        loss.backward()
        total += loss.item()
    return total


def finalizes(model: Any, index: int) -> float:
    """The same, reduced where the program says."""
    model.set_manual_backward_finalization(True)
    total = 0.0
    for micro in range(3):
        loss = loss_of(model, tokens_of(index, micro)) / 3
        loss.backward()
        total += loss.item()
        assert not any(isinstance(param, DTensor) for param in model.blocks.parameters())
    handle = model.finalize_backward(async_op=index % 2 == 0)
    if index % 2 == 0:
        handle.wait()
    assert all(param.grad is not None for param in model.parameters())
    return total


def manual(reshards: bool) -> None:
    trained: dict[str, Trained] = {}
    for name, step in (("torch", accumulates), ("zerocore", finalizes)):
        model = shard_blocks(zerocore.fsdp, make_net(), reshard_after_forward=reshards)
        if name == "zerocore":
            with pytest.raises(RuntimeError, match="requires manual backward finalization"):
                model.finalize_backward()
        trained[name] = train(model, step)
    check_same(trained)


def gathers_once() -> None:
    """Units stay through all micro-batches, and are reduced once."""
    model = shard_blocks(zerocore.fsdp, make_net())
    finalizes(model, 0)
    with zerocore.reporting.record_events(model) as events:
        finalizes(model, 1)
    ops = [event.op for event in events]
    assert ops.count("all_gather") == 4
    assert ops.count("reduce_scatter") == 4


def drops_what_is_left() -> None:
    model = shard_blocks(zerocore.fsdp, make_net())
    model.set_manual_backward_finalization(True)
    loss_of(model, tokens_of(0)).backward()
    model.set_manual_backward_finalization(False)
    assert all(param.grad is None for param in model.parameters())
    loss_of(model, tokens_of(1)).backward()
    found = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    model.zero_grad()
    loss_of(model, tokens_of(1)).backward()
    for name, param in model.named_parameters():
        assert torch.equal(param.grad.full_tensor(), found[name])
    with pytest.raises(NotImplementedError, match="set_keep_unsharded_storage"):
        model.set_keep_unsharded_storage(True)


def wide_gradients(before: bool) -> None:
    """bfloat16 parameters, whose gradients are summed and kept in float32."""
    model: Any = make_net().bfloat16()

    def widen() -> None:
        for param in model.parameters():
            param.grad_dtype = torch.float32

    if before:
        widen()
    shard_blocks(zerocore.fsdp, model)
    if not before:
        widen()
    for index in range(NUM_STEPS):
        loss_of(model, tokens_of(index)).backward()
        for param in model.parameters():
            assert param.grad.dtype == torch.float32
    reference = make_net().bfloat16()
    shard_blocks(zerocore.fsdp, reference, mp_policy=zerocore.fsdp.MixedPrecisionPolicy())
    for index in range(NUM_STEPS):
        loss_of(reference, tokens_of(index)).backward()
    wide = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    narrow = torch.cat([p.grad.full_tensor().flatten() for p in reference.parameters()])
    assert not torch.equal(wide, narrow.float())
    torch.testing.assert_close(wide, narrow.float(), rtol=5e-2, atol=5e-3)
    assert full_params(model).keys() == full_params(reference).keys()


def run_all() -> None:
    for reshards in (True, False):
        manual(reshards)
    gathers_once()
    drops_what_is_left()
    for before in (True, False):
        wide_gradients(before)


@pytest.mark.one_by_day
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_program_finalizes_backwards(num_ranks: int) -> None:
    run_ranks(run_all, num_ranks, timeout=120)
