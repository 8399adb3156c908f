"""Near ranks: the first gather after a change comes from all, later ones from the near ones."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.by_night import by_night
from tests.distributed.chain import WIDTH, Chain
from tests.distributed.harness import run_ranks, run_to_end
from zerocore import Communication
from zerocore.common.alarm import STALL_SECONDS
from zerocore.planning.prediction import planned_events

MIXED = zerocore.MixedPrecision(torch.bfloat16, torch.float32)
STEPS, MICRO_BATCHES = 4, 2


def make(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    chain = Chain()
    if options.pop("frozen", False):
        chain.blocks[1].requires_grad_(False)
    model = zerocore.shard(chain, stage=3, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def train(**options: Any) -> tuple[list[float], dict[str, Tensor], list[list[Any]]]:
    """Losses, full values at the end, and the events of the steps, an evaluation after each."""
    model, optimizer = make(**options)
    losses, events = [], []
    for step in range(STEPS):
        with zerocore.reporting.record_events(model) as recorded:
            for index in range(MICRO_BATCHES):
                last = index == MICRO_BATCHES - 1
                with nullcontext() if last else zerocore.no_sync(model):
                    loss = model(batch(10 * step + index)).square().mean()
                    loss.backward()
                    losses.append(loss.item())
        events.append(list(recorded))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(batch(step)).square().mean().item())
    return losses, zerocore.full_state_dict(model), events


def local_mesh(num_near: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // num_near, num_near))
    return mesh.__class__("cpu", mesh.mesh, mesh_dim_names=("node", "local"))["local"]


def train_as_without(num_near: int, as_mesh: bool, options: dict[str, Any]) -> None:
    regather = local_mesh(num_near) if as_mesh else num_near
    losses, state, _ = train(**options)
    communication = replace(options.get("communication", Communication()), regather=regather)
    near_losses, near_state, events = train(**{**options, "communication": communication})
    assert near_losses == losses
    assert all(torch.equal(near_state[name], value) for name, value in state.items())
    ops = Counter(event.op for step in events[1:] for event in step)
    assert ops["all_gather"] == 0, "the evaluation after the update had gathered from all"
    assert ops["gather_near"] > 0


@pytest.mark.one_by_day
@pytest.mark.parametrize("as_mesh", [*by_night(False), True])
@pytest.mark.parametrize(("world_size", "num_near"), [*by_night((8, 2)), (4, 2), (8, 4)])
def test_the_bits_are_those_of_gathers_from_all(
    world_size: int, num_near: int, as_mesh: bool
) -> None:
    run_ranks(train_as_without, world_size, num_near, as_mesh, {})


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "options",
    [
        {"mixed_precision": MIXED},
        {"communication": zerocore.Communication(accumulate="full", prefetch=2)},
        {"communication": zerocore.Communication(prefetch=0), "frozen": True},
        {"offload": zerocore.Offload(parameters="cpu")},
    ],
    ids=["mixed", "full", "frozen", "host"],
)
def test_the_bits_are_equal_with_other_options(options: dict[str, Any]) -> None:
    run_ranks(train_as_without, 4, 2, False, options)


def train_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    train_as_without(2, False, {"group": mesh})


@pytest.mark.nightly
def test_replicas_have_near_ranks_of_their_own() -> None:
    run_ranks(train_replicas, 8)


def compare_with_plan(num_near: int, options: dict[str, Any]) -> None:
    model: Any
    model, optimizer = make(communication=zerocore.Communication(regather=num_near), **options)
    for number in range(4):
        with zerocore.reporting.record_events(model) as events:
            for index in range(MICRO_BATCHES):
                with nullcontext() if index else zerocore.no_sync(model):
                    model(batch(index)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        if number > 0:
            actual = [(e.op, e.unit, e.nbytes, e.pool_nbytes) for e in events]
            assert actual == planned_events(model, micro_batches=MICRO_BATCHES)
    num_blocks = len(model.blocks)
    ops = Counter(event.op for event in events)
    assert ops["all_gather"] == num_blocks - (1 if options.get("frozen") else 0)
    usage = zerocore.memory_usage(model, optimizer)
    assert usage == zerocore.planning.predict_memory(model, micro_batches=MICRO_BATCHES)


@pytest.mark.parametrize("options", [{}, {"frozen": True}])
@pytest.mark.parametrize("num_near", [*by_night(4), 2])
def test_events_and_bytes_equal_the_plan(num_near: int, options: dict[str, Any]) -> None:
    run_ranks(compare_with_plan, 8, num_near, options)


def change_between() -> None:
    """Weights that a user changes are gathered from all ranks again; an exception leaves all."""
    model: Any = make(communication=zerocore.Communication(regather=2))[0]
    plain: Any = make()[0]
    for each in (model, plain):
        each(batch(0)).sum().backward()
        with torch.no_grad(), zerocore.unsharded(each, write_back=True):
            each.blocks[1].weight.mul_(2)
        each(batch(1)).sum().backward()
        with torch.no_grad():
            for param in each.parameters():
                param.add_(0.5)
        with pytest.raises(RuntimeError, match="shapes"):
            each(torch.randn(3, WIDTH + 1))
        each(batch(2)).sum().backward()
        each.load_state_dict(each.state_dict())
    assert torch.equal(model(batch(3)), plain(batch(3)))
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad.local(), other.grad.local())


def test_changed_weights_are_gathered_from_all() -> None:
    run_ranks(change_between, 4)


class Clamped(Chain):
    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        with torch.no_grad():
            first.weight.clamp_(-1, 1)
        return super().forward(x)


def evaluate_first() -> None:
    """As trainers do before the first epoch, in inference mode."""
    found = []
    for regather in (None, 2):
        model, optimizer = make(communication=zerocore.Communication(regather=regather))
        with torch.inference_mode():
            losses = [model(batch(-1)).square().mean().item()]
        for step in range(STEPS):
            loss = model(batch(step)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    assert found[0] == found[1]


def test_an_evaluation_in_inference_mode_comes_first() -> None:
    run_ranks(evaluate_first, 4)


def refuse() -> None:
    world = dist.get_world_size()
    others = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="regather: stage 2 gathers parameters once a step"):
        zerocore.shard(Chain(), stage=2, communication=zerocore.Communication(regather=2))
    with pytest.raises(ValueError, match=f"regather: 3 ranks do not divide the {world}"):
        zerocore.shard(Chain(), communication=zerocore.Communication(regather=3))
    with pytest.raises(TypeError, match="regather: expected a ProcessGroup"):
        zerocore.shard(Chain(), communication=zerocore.Communication(regather="node"))
    with pytest.raises((ValueError, RuntimeError), match="regather"):
        zerocore.shard(
            Chain(),
            communication=zerocore.Communication(regather=others if dist.get_rank() < 2 else 4),
        )
    mesh = init_device_mesh("cpu", (2, 2))
    for options in (
        {"communication": zerocore.Communication(regather=2)},
        {"group": mesh, "communication": zerocore.Communication(replicas_share="optimizer")},
    ):
        model = zerocore.shard(Clamped(), **options)
        with pytest.raises(ValueError, match="its parameters were changed in place"):
            model(batch(0))


def test_mistakes_are_errors_on_all_ranks() -> None:
    run_ranks(refuse, 4)


def wait_for_a_near_rank() -> None:
    """Rank 3 does not come to its backward; rank 2 waits for it in a gather from near ranks."""
    os.environ[STALL_SECONDS] = "3"
    model, _ = make(communication=zerocore.Communication(regather=2))
    out = model(batch(0)).sum()
    if dist.get_rank() == 3:
        time.sleep(15)
        return
    with pytest.raises(dist.DistBackendError):
        out.backward()


@pytest.mark.nightly
def test_a_missing_near_rank_raises_the_alarm() -> None:
    outcomes = run_to_end(wait_for_a_near_rank, 4, timeout=60, group_timeout=600.0)
    assert [outcome.error for outcome in outcomes[:3]] == [None] * 3


def count_near() -> tuple[int, int, int, int]:
    """Bytes of a step: all that a rank sends, the near part; and both as planned."""
    model, optimizer = make(communication=zerocore.Communication(regather=2))
    for _ in range(3):
        with zerocore.reporting.record_events(model) as events:
            model(batch(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    far = sum(event.nbytes for event in events if event.op in ("all_gather", "reduce_scatter"))
    near = sum(event.nbytes for event in events if event.op == "gather_near")
    assert zerocore.report(model).steps[-1].near_nbytes == near
    planned = zerocore.plan(
        Chain(),
        4,
        communication=zerocore.Communication(regather=2),
        workload=zerocore.Workload(inputs=batch(0)),
    ).stages[3]
    # Of 4 ranks each sends a quarter to each of 3, of which one is near; of 2 the half to one.
    return far * 3 // 4 + near // 2, far // 4 + near // 2, planned.sent_nbytes, planned.near_nbytes


def test_a_plan_says_what_stays_among_near_ranks() -> None:
    for sent, near, planned, planned_near in run_ranks(count_near, 4):
        assert (sent, near) == (planned, planned_near)
    text = str(
        zerocore.plan(
            Chain(),
            4,
            communication=zerocore.Communication(regather=2),
            workload=zerocore.Workload(inputs=torch.ones(3, WIDTH)),
        )
    )
    assert "of it, among near ranks" in text


def alike(num_near: int) -> list[str]:
    model, _ = make(communication=zerocore.Communication(regather=num_near))
    with zerocore.reporting.record_events(model) as events:
        model(batch(0)).sum().backward()
    return sorted({event.op for event in events})


@pytest.mark.parametrize("num_near", [1, 2])
def test_one_rank_and_all_ranks_are_no_near_ranks(num_near: int) -> None:
    for ops in run_ranks(alike, 2, num_near):
        assert "gather_near" not in ops
