"""Averages and frozen copies of sharded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zerocore
import zerocore.fsdp as zerocore_fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, case_named
from tests.engine.offloading import BF16, STATES
from tests.fsdp.both import loss_of, make_net, tokens_of
from tests.weights.test_export import assert_same, exported

DECAY = 0.75


def expected_averages(history: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    average = {name: value.clone() for name, value in history[0].items()}
    for values in history[1:]:
        for name, value in values.items():
            average[name].lerp_(value, 1 - DECAY)
    return average


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    values = zerocore.full_state_dict(model, rank0_only=False)
    return {name: value for name, value in values.items() if value.is_floating_point()}


def train(options: dict[str, Any], folder: str) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), **options)
    make: Any = zerocore.optim.AdamW if "offload" in options else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-2)
    ema = zerocore.weights.EMA(model.parameters(), decay=DECAY)
    history = [full(model)]
    for step in range(3):
        accumulate(model, case, step)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        history.append(full(model))
    expected = expected_averages(history)
    checkpoints = zerocore.Checkpoints(folder, model, [optimizer, ema])
    checkpoints.save(3)
    checkpoints.wait()
    with ema.swapped():
        assert_same(full(model), expected)
        narrow = {n: v.bfloat16() for n, v in expected.items()} if "mixed" in str(options) else None
        assert_same(exported(model), narrow or expected)
        accumulate(model.eval(), case, 0)
        optimizer.zero_grad()
    assert_same(full(model), history[-1])
    for _ in range(2):
        ema.update()
    checkpoints.load()
    with ema.swapped():
        assert_same(full(model), expected)
    with pytest.raises(TypeError, match="no step"):
        ema.step()


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3},
        {"stage": 1},
        {"stage": 3, "mixed_precision": BF16},
        {"stage": 3, "offload": STATES},
    ],
    ids=str,
)
def test_averages(options: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(train, 2, options, str(tmp_path))


def train_rows() -> None:
    model = make_net()
    for block in model.blocks:
        zerocore_fsdp.fully_shard(block)
    zerocore_fsdp.fully_shard(model)
    ema = zerocore.weights.EMA(model.parameters(), decay=DECAY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = [exported(model)]
    for step in range(2):
        loss_of(model, tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        history.append(exported(model))
    with ema.swapped():
        assert_same(exported(model), expected_averages(history))
    assert_same(exported(model), history[-1])


def test_averages_of_rows() -> None:
    run_ranks(train_rows, 2)


def clone(options: dict[str, Any], freezes: bool) -> None:
    case = case_named("plain")
    built = case.seeded_build()
    if freezes:
        next(iter(built.parameters())).requires_grad_(False)
    model = zerocore.shard(built, **options)
    copied = zerocore.clone_sharded(model, case.build)
    assert type(copied).__name__ == type(model).__name__ and not copied.training
    assert_same(exported(copied), exported(model))
    usage = zerocore.memory_usage(copied)
    assert usage.gradients == usage.optimizer == usage.main_weights == 0
    batch = case.seeded_batch(0, 0, 2)
    with torch.no_grad():
        before = case.loss(copied, batch)
        assert torch.equal(before, case.loss(model.eval(), batch))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    accumulate(model, case, 0)
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(before, case.loss(copied, batch))  # it has stayed
    zerocore.weights.copy_weights(model, copied)
    assert_same(exported(copied), exported(model))
    if not freezes:
        with pytest.raises(ValueError, match="different parameters"):
            zerocore.weights.copy_weights(zerocore.shard(nn.Linear(3, 3)), copied)
        with pytest.raises(TypeError, match="pass make="):
            zerocore.clone_sharded(model)


def copy_to_another_arrangement() -> None:
    """Equal layouts, whose parts other ranks hold."""
    pair = {}
    for name, ranks in {"rows": [[0, 1], [2, 3]], "columns": [[0, 2], [1, 3]]}.items():
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicas", "shards"))
        torch.manual_seed(len(pair))
        pair[name] = zerocore.shard(nn.Linear(6, 6), group=mesh)
    zerocore.weights.copy_weights(pair["rows"], pair["columns"])
    assert_same(exported(pair["columns"]), exported(pair["rows"]))


def test_weights_go_to_another_arrangement_of_the_ranks() -> None:
    run_ranks(copy_to_another_arrangement, 4)


@pytest.mark.one_by_day
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize(
    "options", [{"stage": 3}, {"stage": 2}, {"stage": 3, "mixed_precision": BF16}], ids=str
)
def test_clones(options: dict[str, Any], freezes: bool) -> None:
    run_ranks(clone, 2, options, freezes)
