"""Optimizer states over all ranks of a hybrid mesh: the training of hybrid sharding."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerocore
from tests.distributed.chain import Chain, step
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    Trained,
    assert_same_training,
    case_named,
    train_reference,
    train_sharded,
)
from zerocore import Communication
from zerocore.model.state import state_of
from zerocore.planning.prediction import planned_events

MIXED = zerocore.MixedPrecision(torch.bfloat16, torch.float32, output_dtype=torch.float32)
# Options of shard; the stages they are tried at.
WAYS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, (1, 2, 3)),
    ({"communication": Communication(accumulate="full", prefetch=2)}, (2, 3)),
    ({"mixed_precision": MIXED}, (1, 3)),
]


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(
    shape: tuple[int, int],
    stage: int,
    shares: bool = True,
    communication: Communication | None = None,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    share, group = "optimizer" if shares else None, mesh_of(*shape)
    communication = replace(communication or Communication(), replicas_share=share)
    return zerocore.shard(
        Chain(3), stage=stage, group=group, communication=communication, **options
    )


def full(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.full_tensor() for name, param in model.named_parameters()}


def loss_of(model: Any, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    width = next(model.parameters()).global_shape[-1]
    return model(torch.randn(4, width, generator=generator)).float().square().mean()


def train(model: Any, optimizer: Any, clips: bool) -> list[Any]:
    """Losses, gradients and norms of three steps of two micro-batches."""
    found: list[Any] = []
    for number in range(3):
        for micro in range(2):
            with zerocore.no_sync(model) if micro == 0 else nullcontext():
                loss = loss_of(model, 2 * number + micro)
                loss.backward()
            found.append(loss.detach())
        if clips:
            found.append(zerocore.clip_grad_norm_(model, 0.1))
        found += [param.grad.full_tensor() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + list(full(model).values())


def compare_with_hybrid(shape: tuple[int, int]) -> None:
    for options, stages in WAYS:
        for stage in stages:
            for kind in (torch.optim.AdamW, zerocore.optim.AdamW):
                print(options, stage, kind, flush=True)
                results = []
                for shares in (True, False):
                    model = sharded(shape, stage, shares, **options)
                    results.append(train(model, kind(model.parameters(), lr=0.05), False))
                torch.testing.assert_close(*results, rtol=0, atol=0)
    for stage in (1, 3):  # a norm is a sum over other parts
        models = [sharded(shape, stage, shares) for shares in (True, False)]
        results = [
            train(model, torch.optim.AdamW(model.parameters(), lr=0.05), True) for model in models
        ]
        torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(2, 4), (2, 2)], ids=["2x4", "2x2"])
def test_training_is_that_of_hybrid_sharding(shape: tuple[int, int]) -> None:
    run_ranks(compare_with_hybrid, shape[0] * shape[1], shape, timeout=170)


CASES = ("tied", "mixed_dtypes", "unused", "looped")


def train_cases() -> list[tuple[Trained | None, Trained]]:
    mesh, found = mesh_of(2, 2), []
    for number, name in enumerate(CASES):
        case, reference = case_named(name), None
        if dist.get_rank() == 0:
            reference = train_reference(case, dist.get_world_size())
        options = {
            "group": mesh,
            "communication": zerocore.Communication(replicas_share="optimizer"),
        }
        for stage in (3, 1 + number % 2):
            found.append((reference, train_sharded(case, stage, **options)))
    return found


def test_training_equals_one_process() -> None:
    answers = run_ranks(train_cases, 4, timeout=170)
    for index, (reference, _) in enumerate(answers[0]):
        assert reference is not None
        assert_same_training([answer[index][1] for answer in answers], reference)


def num_moments(optimizer: Any) -> int:
    """Elements of Adam's moments on all ranks."""
    states = optimizer.state.values()
    own = sum(state[key].local().numel() for state in states for key in ("exp_avg", "exp_avg_sq"))
    everywhere = torch.tensor(own)
    dist.all_reduce(everywhere)
    return int(everywhere)


def watch_collectives(stage: int) -> list[tuple[str, str, int]]:
    for mixed in (MIXED, None):
        hybrid = sharded((2, 2), stage, False, mixed_precision=mixed)
        model = sharded((2, 2), stage, mixed_precision=mixed)
        optimizers = [torch.optim.AdamW(each.parameters()) for each in (hybrid, model)]
        for number in range(3):
            step(hybrid, optimizers[0])
            events = step(model, optimizers[1])
            if number > 0:
                actual = [(e.op, e.unit, e.nbytes, e.pool_nbytes) for e in events]
                assert actual == planned_events(model)
        numel = sum(param.global_shape.numel() for param in model.parameters())
        assert [num_moments(each) for each in optimizers] == [2 * 2 * numel, 2 * numel]
        assert zerocore.memory_usage(model, optimizers[1]) == zerocore.planning.predict_memory(
            model
        )
        assert state_of(model).engine.pool_stats.in_use_nbytes == 0
    collectives = [(e.op, e.unit, e.nbytes) for e in events if e.op not in ("unshard", "reshard")]
    plan = zerocore.plan(
        Chain(3),
        4,
        num_replicas=2,
        communication=Communication(replicas_share="optimizer"),
        workload=zerocore.Workload(inputs=torch.randn(3, 16), rank=dist.get_rank()),
    ).stages[stage]
    usage = zerocore.memory_usage(model, optimizers[1])
    kept = (usage.parameters, usage.main_weights, usage.gradients, usage.optimizer)
    assert kept == (plan.parameters, plan.main_weights, plan.gradients, plan.optimizer)
    assert plan.num_collectives == len(collectives)
    # Each goes over two ranks, of which one sends half.
    assert plan.sent_nbytes == sum(nbytes for _, _, nbytes in collectives) // 2
    return collectives


def test_exact_collectives() -> None:
    """Over the replicas go halves of units alone: gradients one way, parameters the other."""
    whole = 4 * (16 * 16 + 16)
    half = whole // 2
    for stage in (1, 2, 3):
        for events in run_ranks(watch_collectives, 4, stage):
            reductions = [(unit, nbytes) for op, unit, nbytes in events if op == "reduce_scatter"]
            names = ["blocks.2", "blocks.1", "blocks.0"]
            assert reductions == [(name, size) for name in names for size in (whole, half)]
            gathers = [(unit, nbytes) for op, unit, nbytes in events if op == "all_gather"]
            assert gathers == [(name, size) for name in reversed(names) for size in (half, whole)]
            near = [(unit, nbytes) for op, unit, nbytes in events if op == "gather_near"]
            assert near == ([(name, whole) for name in names[1:]] if stage == 3 else [])


def trained(shares: bool | None, stage: int, steps: int) -> tuple[Any, Any]:
    """``shares`` is None for no replicas."""
    if shares is None:
        torch.manual_seed(0)
        model = zerocore.shard(Chain(3), stage=stage)
    else:
        model = sharded((2, 2), stage, shares)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=0.05)
    for number in range(steps):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(model: Any, optimizer: Any) -> dict[str, Any]:
    states = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
    return {"model": zerocore.full_state_dict(model, rank0_only=False), "states": states}


def go_between_arrangements(folder: str) -> None:
    ways = [(True, 3), (True, 1), (False, 2), (None, 3)]
    for number, (saved, loaded) in enumerate(zip(ways, [*ways[1:], ways[0]], strict=True)):
        print(saved, loaded, flush=True)
        model, optimizer = trained(*saved, 2)
        expected = values(model, optimizer)
        zerocore.Checkpoints(f"{folder}/{number}/own", model, optimizer).save(2)
        zerocore.save_safetensors(model, f"{folder}/{number}/files")
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{number}/dcp")
        for way in ("own", "files", "dcp", "full"):
            model, optimizer = trained(*loaded, 1)
            if way == "own":
                assert zerocore.Checkpoints(f"{folder}/{number}/own", model, optimizer).load() == 2
                torch.testing.assert_close(values(model, optimizer), expected, rtol=0, atol=0)
            elif way == "files":
                zerocore.load_safetensors(model, f"{folder}/{number}/files")
            elif way == "dcp":
                state = {"model": model.state_dict()}
                dcp.load(state, checkpoint_id=f"{folder}/{number}/dcp")
                model.load_state_dict(state["model"])
            else:
                zerocore.load_full_state_dict(model, expected["model"])
                optimizer.load_state_dict({**optimizer.state_dict(), "state": expected["states"]})
                torch.testing.assert_close(values(model, optimizer), expected, rtol=0, atol=0)
            found = zerocore.full_state_dict(model, rank0_only=False)
            torch.testing.assert_close(found, expected["model"], rtol=0, atol=0)


@pytest.mark.nightly
def test_checkpoints_go_to_other_arrangements(tmp_path: Path) -> None:
    run_ranks(go_between_arrangements, 4, str(tmp_path), timeout=170)


def scale_and_change() -> None:
    """A GradScaler skips bad steps; values that are changed or read in full are those of all."""
    model = sharded((2, 2), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for bad in (False, True):
        before = full(model)
        scaler.scale(loss_of(model, 0) * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(value, before[name]) for name, value in full(model).items()]
        assert all(same) if bad else not any(same)
    with zerocore.unsharded(model, write_back=True):
        for param in model.parameters():
            param.data.fill_(0.5)
    assert all(torch.equal(value, torch.full_like(value, 0.5)) for value in full(model).values())
    assert torch.equal(model(torch.ones(1, 16)), torch.full((1, 16), 548.5))


def test_scaled_gradients_and_written_values() -> None:
    run_ranks(scale_and_change, 4)


def refuse() -> None:
    share: dict[str, Any] = {"communication": zerocore.Communication(replicas_share="optimizer")}
    with pytest.raises(ValueError, match="stage 3 on 4 ranks has no replicas"):
        zerocore.shard(Chain(3), **share)
    mesh = mesh_of(2, 2)
    with pytest.raises(ValueError, match="stage 0 on 2 x 2 ranks has no replicas"):
        zerocore.shard(Chain(3), stage=0, group=mesh, **share)
    with pytest.raises(ValueError, match=r"does not support offload="):
        zerocore.shard(Chain(3), group=mesh, offload=zerocore.Offload(states="cpu"), **share)
    with pytest.raises(ValueError, match=r"does not support groups="):
        zerocore.shard(Chain(3), group=mesh, groups={"blocks.0.*": mesh["shard"]}, **share)
    turned = DeviceMesh("cpu", torch.tensor([[2, 3], [0, 1]]), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="in ascending order"):
        zerocore.shard(Chain(3), group=turned, **share)
    with pytest.raises(ValueError, match="is not supported for Muon"):
        zerocore.plan(
            Chain(3), 4, num_replicas=2, workload=zerocore.Workload(optimizer="muon"), **share
        )
    model = sharded((2, 2), 3)
    with pytest.raises(ValueError, match="does not support replicas_share"):
        zerocore.matrices.Muon(model.parameters())


def test_what_is_refused_by_name() -> None:
    run_ranks(refuse, 4)
