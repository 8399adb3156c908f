"""Exports and parking of models that ``fully_shard`` has sharded."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerocore
import zerocore.fsdp as zerocore_fsdp
from tests.distributed.harness import run_ranks
from tests.fsdp.both import ADAMW, Net, loss_of, make_net, tokens_of
from tests.weights.test_export import assert_same, exported
from zerocore.model.state import state_of


def sharded(**options: object) -> Net:
    model = make_net()
    for block in model.blocks:
        zerocore_fsdp.fully_shard(block, **options)
    return zerocore_fsdp.fully_shard(model, **options)


def full_of(model: Net) -> dict[str, torch.Tensor]:
    values = model.state_dict().items()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values
    }


def step(model: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, tokens_of(number)).backward()
    optimizer.step()
    optimizer.zero_grad()


def compare() -> None:
    model = sharded()
    assert_same(exported(model), full_of(model))  # before the first forward
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    for number in range(2):
        step(model, optimizer, number)
    expected = full_of(model)
    state = state_of(model)
    info = zerocore.weights.export_info(model)
    for size in (1, 500, 10**9):
        state.engine.forget_recent_peak()
        found = exported(model, max_bytes=size)
        assert set(found) == set(expected)
        assert_same(found, expected)
        assert state.engine.pool_stats.recent_peak_nbytes == info.peak_nbytes(size)
    some = exported(model, names=lambda name: name if "1.norm" in name else None)
    assert len(some) == 2
    assert_same(some, expected)
    with zerocore.parked(model, optimizer):
        assert_same(exported(model), expected)
        with pytest.raises(RuntimeError, match="is parked"):
            model(tokens_of(0))
    assert_same(full_of(model), expected)
    step(model, optimizer, 2)
    again = sharded()
    optimizer = ADAMW(again.parameters(), lr=1e-2)
    for number in range(3):
        step(again, optimizer, number)
    assert_same(full_of(model), full_of(again))


def test_values() -> None:
    run_ranks(compare, 2)


def compare_narrow() -> None:
    policy = zerocore_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded(mp_policy=policy, reshard_after_forward=False)
    step(model, ADAMW(model.parameters(), lr=1e-2), 0)
    expected = {name: value.bfloat16() for name, value in full_of(model).items()}
    assert_same(exported(model), expected)


def test_mixed_precision() -> None:
    run_ranks(compare_narrow, 2)


def compare_two_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_net()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    plan = {f"blocks.{number}.up": ColwiseParallel() for number in range(3)}
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        zerocore_fsdp.fully_shard(block, mesh=mesh["dp"])
    zerocore_fsdp.fully_shard(model, mesh=mesh["dp"])
    found = exported(model, max_bytes=300)
    assert_same(found, expected)
    assert set(found) == set(expected)


def test_two_meshes() -> None:
    run_ranks(compare_two_meshes, 4)
