"""Functions of zerocore on models of ``zerocore.fsdp``, beside ``zerocore.shard`` and FSDP2."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import zerocore
import zerocore.fsdp
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.fsdp.both import (
    ADAMW,
    Block,
    Net,
    check_same,
    make_net,
    shard_blocks,
    tokens_of,
    train,
    train_both,
)
from tests.fsdp.both import loss_of as loss_of_net
from zerocore.model.state import state_of
from zerocore.reporting.recording import record_events

NARROW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def trained(num_steps: int = 4, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = shard_blocks(zerocore.fsdp, make_net(), **options)
    optimizer = zerocore.optim.AdamW(model.parameters())
    run(model, optimizer, num_steps)
    return model, optimizer


def run(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for index in range(num_steps):
        loss_of_net(model, tokens_of(index)).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- what a step did, and what it was planned to do ------------------------------------------------


def compare_with_the_plan(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, optimizer = trained(20, mesh=mesh, **options)
    planned = zerocore.planning.predict_events(model)
    with record_events(model) as events:
        run(model, optimizer, 1)
    assert [(e.op, e.unit, e.nbytes) for e in events if e.op in COLLECTIVES] == planned
    report = zerocore.report(model, tokens=20)
    assert [step.number for step in report.steps] == list(range(21))
    assert report.title == f"FSDPNet, stage 3, rank {dist.get_rank()} of 4, cpu"
    for step in report.steps[1:]:
        assert step.num_collectives == len(planned)
        assert step.gathered_nbytes == sum(n for op, _, n in planned if op == "all_gather")
        assert step.pool_nbytes == zerocore.planning.predict_memory(model).pool
    assert set(report.units) == {"FSDPNet", "blocks.0", "blocks.1", "blocks.2"}
    usage, predicted = (
        zerocore.memory_usage(model, optimizer),
        zerocore.planning.predict_memory(model),
    )
    for part in ("parameters", "gradients", "main_weights", "pool"):
        assert getattr(usage, part) == getattr(predicted, part), part
    held = sum(
        state[name].to_local().nbytes
        for state in optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    )
    assert usage.optimizer == predicted.optimizer == held


def compare_all_with_the_plan() -> None:
    for options in ({}, {"reshard_after_forward": False}, {"mp_policy": NARROW}):
        compare_with_the_plan(options, (4,))
        compare_with_the_plan(options, (2, 2))


def test_steps_are_reported_and_as_planned() -> None:
    run_ranks(compare_all_with_the_plan, 4, timeout=180)


def trace_and_describe(folder: Path) -> None:
    model, optimizer = trained()
    path = folder / f"{dist.get_rank()}.json"
    with zerocore.trace(model, path) as timeline:
        run(model, optimizer, 1)
    kinds = {box.kind for box in timeline.boxes}
    assert {"forward", "backward", "optimizer", "all_gather", "reduce_scatter"} <= kinds
    assert {"blocks.1", "FSDPNet"} <= {box.label for box in timeline.boxes}
    assert json.loads(path.read_text())["traceEvents"]
    description = zerocore.describe(model)
    assert [unit.name for unit in description.units] == [
        "FSDPNet",
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    assert (description.stage, description.world_size) == (3, 2)
    net = zerocore.shard(make_net())
    rows, flat = description.units[1], zerocore.describe(net).units[1]
    assert (rows.num_params, rows.param_nbytes) == (flat.num_params, flat.param_nbytes)
    with pytest.raises(ValueError, match="sharded already; plan it before"):
        zerocore.plan(model, world_size=2)


def test_trace_and_describe(tmp_path: Path) -> None:
    run_ranks(trace_and_describe, 2, tmp_path)


# -- optimizers ------------------------------------------------------------------------------------


class Clipping(zerocore.optim.AdamW):
    """Clips in its own pass, instead of by torch's function before."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, clip_grad_norm=1.0)


def train_with_adamw(options: dict[str, Any]) -> None:
    def with_torchs(fsdp: Any, model: nn.Module) -> Any:
        kind = zerocore.optim.AdamW if fsdp is zerocore.fsdp else ADAMW
        return train(shard_blocks(fsdp, model, **options), make_optimizer=kind)

    found = train_both(with_torchs)
    narrow = "mp_policy" in options
    check_same(found, *((2e-2, 2e-3) if narrow else (1e-5, 1e-6)))


def clip_in_the_step(shape: tuple[int, ...]) -> None:
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, twin = (shard_blocks(zerocore.fsdp, make_net(), mesh=mesh) for _ in range(2))
    own = Clipping(model.parameters(), 1e-2)
    other = torch.optim.AdamW(twin.parameters(), 1e-2)
    for index in range(3):
        loss_of_net(model, tokens_of(index)).backward()
        loss_of_net(twin, tokens_of(index)).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0).full_tensor()
        own.step()
        other.step()
        torch.testing.assert_close(own.grad_norm, norm)
        own.zero_grad()
        other.zero_grad()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor(), rtol=1e-5, atol=1e-6)


def adamw_is_torchs() -> None:
    for options in ({}, {"reshard_after_forward": False}, {"mp_policy": NARROW}):
        train_with_adamw(options)
    train_with_adamw({"shard_placement_fn": last_dim})
    clip_in_the_step((dist.get_world_size(),))
    if dist.get_world_size() == 4:
        clip_in_the_step((2, 2))


def last_dim(param: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    even = param.dim() > 1 and param.shape[1] % dist.get_world_size() == 0
    return Shard(1) if even else None


@pytest.mark.parametrize("world_size", [*by_night(4), 2])
def test_adamw_trains_as_fsdp2_with_torchs(world_size: int) -> None:
    run_ranks(adamw_is_torchs, world_size, timeout=120)


def weights_follow_the_step() -> None:
    """The copies that layers compute with are written by the step, also by a plan made before."""
    model = shard_blocks(zerocore.fsdp, make_net(), mp_policy=NARROW)
    optimizer = zerocore.optim.AdamW(model.parameters(), 1e-2)
    for param in model.parameters():  # a step before the engine is there
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for again in range(2):
        weight = model.blocks[0].qkv.weight
        old = weight.full_tensor().clone()
        run(model, optimizer, 2)
        before = weight.full_tensor().clone()
        assert not torch.equal(before, old)
        assert len(zerocore.report(model).steps) == 2  # of this engine, which knows the optimizer
        full = before.to(torch.bfloat16)
        model.blocks[0].unshard()
        assert torch.equal(model.blocks[0].qkv.weight, full)
        model.blocks[0].reshard()
        if not again:
            model.to("cpu")  # the engine is made anew: the plan's memory is another one
    state = copy.deepcopy(optimizer.state_dict())
    assert isinstance(state["state"][0]["exp_avg"], DTensor)
    optimizer.load_state_dict(state)
    run(model, optimizer, 1)
    assert not torch.equal(weight.full_tensor(), before)


def test_weights_follow_the_step() -> None:
    run_ranks(weights_follow_the_step, 2)


# -- out of memory ---------------------------------------------------------------------------------


class Greedy(Block):
    """Wants more memory than there is, in the forward or in the backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            torch.empty(1 << 60)
        x = super().forward(x)
        if self.where == "backward":
            x.register_hook(lambda grad: torch.empty(1 << 60))
        return x


def explain() -> None:
    for where in ("forward", "backward"):
        net = Net(8)
        net.blocks[1] = Greedy(where)
        model = shard_blocks(zerocore.fsdp, net, reshard_after_forward=False)
        with pytest.raises(zerocore.reporting.OutOfMemory) as caught:
            loss_of_net(model, tokens_of(0)).backward()
        diagnosis = caught.value.diagnosis
        assert diagnosis.phase == where and "blocks.1" in diagnosis.unit
        assert diagnosis.held["parameters"] == state_of(model).engine.parameter_nbytes
        texts = [text for text, _ in diagnosis.changes]
        assert any("reshard_after_forward=True" in text for text in texts)
        assert not any("stage=" in text or "offload=" in text for text in texts)
        model.blocks[1].where = ""
        optimizer = zerocore.optim.AdamW(model.parameters())
        run(model, optimizer, 2)  # goes on


def test_out_of_memory_is_explained() -> None:
    run_ranks(explain, 2)


# -- what is not there -----------------------------------------------------------------------------


def refuse() -> None:
    model = shard_blocks(zerocore.fsdp, make_net())
    for function in (zerocore.report, zerocore.describe, zerocore.planning.predict_events):
        with pytest.raises(ValueError, match="run a forward first"):
            function(model)
    loss_of_net(model, tokens_of(0))
    with pytest.raises(ValueError, match="leave stage out"):
        zerocore.planning.predict_memory(model, stage=1)
    blocks = nn.ModuleList(zerocore.fsdp.fully_shard(Block()) for _ in range(2))
    for block in blocks:
        block(torch.ones(2, 10))
    with pytest.raises(ValueError, match="holds 2 separately sharded models"):
        zerocore.report(blocks)


def test_refusals() -> None:
    run_ranks(refuse, 2)
