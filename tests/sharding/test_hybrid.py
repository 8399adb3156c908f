"""Hybrid sharding: the state is sharded within groups of ranks, and the groups are replicas."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerocore
from tests.by_night import by_day, by_night
from tests.distributed.chain import Chain, step
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    Trained,
    accumulate,
    assert_same_training,
    case_named,
    full_gradients,
    reference_gradients,
    train_reference,
    train_sharded,
)
from tests.distributed.values import own_of, range_of
from zerocore.model.state import state_of
from zerocore.planning.prediction import planned_events

STAGES = (0, 1, 2, 3)
CASES = ("plain", "tied", "mixed_dtypes", "unused", "looped", "hf_qwen3_tied")
SHAPES = ((2, 2), (1, 2), (2, 1))
FULL = {"communication": zerocore.Communication(accumulate="full")}
MIXED = zerocore.MixedPrecision(torch.bfloat16, torch.float32, output_dtype=torch.float32)


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def train_stages(name: str, shape: tuple[int, int]) -> tuple[Trained | None, list[Trained]]:
    """Stage 3 in both ways on the largest mesh; each of the others on one of the meshes."""
    case, mesh, number = case_named(name), mesh_of(*shape), SHAPES.index(shape)
    reference = None
    if dist.get_rank() == 0:
        reference = train_reference(case, dist.get_world_size())
    trained = [train_sharded(case, (CASES.index(name) + number) % 3, group=mesh)]
    for options in ({}, FULL) if number == 0 else ({},) if number == 1 else (FULL,):
        trained.append(train_sharded(case, 3, group=mesh, **options))
    return reference, trained


# Replicas of shards for each model, and the other meshes for one.
BY_DAY = [*((name, SHAPES[0]) for name in CASES), ("plain", SHAPES[1]), ("tied", SHAPES[2])]


@pytest.mark.one_by_day
@pytest.mark.parametrize(("name", "shape"), by_day(product(CASES, SHAPES), BY_DAY))
def test_training_equals_one_process(name: str, shape: tuple[int, int]) -> None:
    answers = run_ranks(train_stages, shape[0] * shape[1], name, shape, timeout=120)
    reference = answers[0][0]
    assert reference is not None
    for index in range(len(answers[0][1])):
        assert_same_training([trained[index] for _, trained in answers], reference)


def watch_collectives(stage: int) -> list[tuple[str, str, int]]:
    mesh = mesh_of(2, 2)
    for mixed in (MIXED, None):
        model = zerocore.shard(Chain(3), stage=stage, group=mesh, mixed_precision=mixed)
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(3):
            events = step(model, optimizer)
            if number > 0:
                actual = [(e.op, e.unit, e.nbytes, e.pool_nbytes) for e in events]
                assert actual == planned_events(model)
        assert zerocore.memory_usage(model, optimizer) == zerocore.planning.predict_memory(model)
        assert state_of(model).engine.pool_stats.in_use_nbytes == 0
    collectives = [(e.op, e.unit, e.nbytes) for e in events if e.op not in ("unshard", "reshard")]
    rank, inputs = dist.get_rank(), torch.randn(3, 16)
    plan = zerocore.plan(
        Chain(3), 4, num_replicas=2, workload=zerocore.Workload(rank=rank, inputs=inputs)
    ).stages[stage]
    usage = zerocore.memory_usage(model, optimizer)
    # Not the pool: on gloo it also has what an exchange receives.
    kept = (usage.parameters, usage.main_weights, usage.gradients, usage.optimizer)
    assert kept == (plan.parameters, plan.main_weights, plan.gradients, plan.optimizer)
    assert plan.num_collectives == len(collectives)
    # Of two ranks each sends half of a bucket, and twice that for an all-reduce.
    halves = sum(nbytes * (2 if op == "all_reduce" else 1) for op, _, nbytes in collectives)
    assert plan.sent_nbytes == halves // 2
    return collectives


def across(number: int, nbytes: int) -> tuple[str, str, int]:
    return ("all_reduce", f"blocks.{number}", nbytes)


@pytest.mark.one_by_day
def test_exact_collectives(stage: int) -> None:
    """Reduce-scatter of the unit among two ranks, all-reduce of the half with the other two."""
    whole = 4 * (16 * 16 + 16)
    half = whole // 2
    for events in run_ranks(watch_collectives, 4, stage):
        reductions = [event for event in events if event[0] != "all_gather"]
        if stage == 0:
            expected = [across(n, whole) for n in (2, 2, 1, 1, 0, 0)]
            assert reductions == expected
            continue
        scatters = [("reduce_scatter", f"blocks.{n}", whole) for n in (2, 1, 0)]
        # On gloo a sum over the replicas starts when the next unit has its gradients.
        sums = [across(n, half) for n in (2, 1, 0)]
        assert reductions == [scatters[0], sums[0], scatters[1], sums[1], scatters[2], sums[2]]
        assert {nbytes for op, _, nbytes in events if op == "all_gather"} == {whole}


def accumulate_and_clip(stage: int) -> None:
    """Every way to accumulate, the gradients that all ranks hold, and their global norm."""
    case, mesh = case_named("plain"), mesh_of(2, 2)
    expected = reference_gradients(case, 4)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
    for options in ({}, {"communication": zerocore.Communication(accumulate="full")}):
        model = zerocore.shard(case.seeded_build(), stage=stage, group=mesh, **options)
        for sync_every in (False, True, False):
            accumulate(model, case, 0, sync_every=sync_every)
            found = gather_shards(model, mesh)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(zerocore.clip_grad_norm_(model, 1e9), norm)
            model.zero_grad()
        # A reduced gradient counts once, whichever ranks hold it.
        accumulate(model, case, 0, sync_every=True)
        accumulate(model, case, 0)
        twice = {name: 2 * gradient for name, gradient in expected.items()}
        torch.testing.assert_close(gather_shards(model, mesh), twice, rtol=1e-5, atol=1e-6)


def gather_shards(model: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Full gradients from the ranks of one replica; the replicas agree to the bit."""
    gradients = full_gradients(model)  # sums over all ranks what they own
    for name, parameter in model.named_parameters():
        grad = own_of(parameter.grad)
        copies = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(copies, grad, group=mesh.get_group(0))
        assert torch.equal(copies[0], copies[1]), name
        if range_of(parameter) != (0, parameter.numel()):
            gradients[name] = gradients[name] / 2
    return gradients


@pytest.mark.one_by_day
def test_accumulation_and_clipping(stage: int) -> None:
    run_ranks(accumulate_and_clip, 4, stage)


def mixed_precision(stage: int) -> tuple[list[float], dict[str, Tensor]]:
    """Training, and a state that goes through rank 0's full state dict into another mesh."""
    case = case_named("plain")
    model = zerocore.shard(
        case.seeded_build(seed=dist.get_rank()),  # rank 0's values win
        stage=stage,
        group=mesh_of(2, 2),
        mixed_precision=MIXED,
    )
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(3):
        losses.append(accumulate(model, case, number))
        optimizer.step()
        optimizer.zero_grad()
    state = zerocore.full_state_dict(model)
    assert bool(state) == (dist.get_rank() == 0)
    other = zerocore.shard(case.seeded_build(), stage=3 - stage, group=mesh_of(1, 4))
    zerocore.load_full_state_dict(other, state or None)
    everywhere = zerocore.full_state_dict(other, rank0_only=False)
    zerocore.load_full_state_dict(model, everywhere, broadcast=False)
    again = zerocore.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(again[key], value) for key, value in everywhere.items())
    assert all(torch.equal(again[key], value) for key, value in state.items())
    return losses, state


@pytest.mark.parametrize("stages", [*by_night((STAGES,)), (0, 3)])
def test_mixed_precision_and_state_dicts(stages: tuple[int, ...]) -> None:
    answers = [run_ranks(mixed_precision, 4, stage) for stage in stages]
    for ranks in answers[1:]:
        for rank, (losses, _) in enumerate(ranks):
            assert losses == pytest.approx(answers[0][rank][0], rel=1e-2)
        for key, value in ranks[0][1].items():
            torch.testing.assert_close(value, answers[0][0][1][key], rtol=0.0, atol=3e-2)


def differ_between_replicas(kind: str) -> str:
    mesh = mesh_of(2, 2)
    width = 16 + (dist.get_rank() == 3)
    options: dict[str, Any] = {"stage": 5} if kind == "option" and dist.get_rank() == 3 else {}
    model = nn.Linear(width if kind == "model" else 16, 4)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        zerocore.shard(model, group=mesh, **options)
    return str(caught.value)


def test_a_mistake_on_one_rank_is_an_error_on_all() -> None:
    assert all("rank 3 has" in text for text in run_ranks(differ_between_replicas, 4, "model"))
    texts = run_ranks(differ_between_replicas, 4, "option")
    assert all("stage must be one of" in text for text in texts)


def refuse_three_dimensions() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2))
    with pytest.raises(ValueError, match=r"1-D DeviceMesh, or a 2-D mesh of replicas by shards"):
        zerocore.shard(nn.Linear(2, 2), group=mesh)


def test_a_mesh_of_three_dimensions_is_refused() -> None:
    run_ranks(refuse_three_dimensions, 2)
