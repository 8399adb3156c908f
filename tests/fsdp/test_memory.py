"""The bytes that a fully sharded model takes are those that were predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.fsdp.both import loss_of, make_net, shard_blocks, tokens_of

NARROW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def measure(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = shard_blocks(zerocore.fsdp, make_net(), mesh=mesh, **options)
    with pytest.raises(ValueError, match="run a forward"):
        zerocore.planning.predict_memory(model)
    optimizer = torch.optim.AdamW(model.parameters())
    engine: Any = None
    for index in range(3):
        loss = loss_of(model, tokens_of(index))
        engine = model._group().engine
        if index == 2:
            engine.forget_recent_peak()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = zerocore.planning.predict_memory(model)
    assert plan.parameters == engine.parameter_nbytes
    assert plan.main_weights == engine.main_nbytes
    assert plan.gradients == engine.gradient_nbytes
    assert plan.pool == engine.pool_stats.peak_nbytes
    states = [state for param in optimizer.state.values() for state in param.values()]
    held = sum(s.to_local().nbytes for s in states if s.dim() > 0)
    assert plan.optimizer == held


def measure_all() -> None:
    for options in ({}, {"reshard_after_forward": False}, {"mp_policy": NARROW}):
        measure(options, (4,))
        measure(options, (2, 2))


def test_bytes_are_those_that_were_predicted() -> None:
    run_ranks(measure_all, 4, timeout=120)
