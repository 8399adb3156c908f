"""Stages of a pipeline that are sharded: which schedules train right, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks

WIDTH, NUM_LAYERS, NUM_MICRO, NUM_SAMPLES, NUM_STEPS = 8, 8, 4, 8, 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers)


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return tuple(torch.randn(2, NUM_SAMPLES, WIDTH, generator=generator).unbind())  # type: ignore[return-value]


def reference(num_replicas: int) -> dict[str, Tensor]:
    """One process with the whole model and all replicas' batches."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(NUM_STEPS):
        for replica in range(num_replicas):
            x, target = batch(step, replica)
            (nn.functional.mse_loss(model(x), target) / num_replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def make_stages(mesh: Any, stage: int, num_stages: int, is_v: bool) -> list[Any]:
    """This rank's stages, sharded over the ranks that hold the same ones."""
    from torch.distributed.pipelining import PipelineStage

    rank, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
    layers = NUM_LAYERS // num_stages
    stages = []
    mine = [rank, num_stages - 1 - rank] if is_v else range(rank, num_stages, size)
    for index in mine:
        part = build()[index * layers : (index + 1) * layers]
        zerocore.shard(part, stage=stage, group=mesh["dp"])
        stages.append(
            PipelineStage(part, index, num_stages, torch.device("cpu"), group=mesh.get_group("pp"))
        )
    return stages


def run(mesh: Any, stage: int, kind: str) -> list[dict[str, Tensor]]:
    """Trains with a schedule; the states of this rank's stages, keys as in the whole model."""
    from torch.distributed import pipelining

    schedule_class: Any = getattr(pipelining, kind)
    multi = "Interleaved" in kind or "ZBV" in kind
    num_stages = mesh["pp"].size() * (2 if multi else 1)
    stages = make_stages(mesh, stage, num_stages, "ZBV" in kind)
    loss: Any = nn.functional.mse_loss
    schedule = schedule_class(stages if multi else stages[0], NUM_MICRO, loss_fn=loss)
    optimizers = [torch.optim.SGD(s.submod.parameters(), lr=0.5) for s in stages]
    for step in range(NUM_STEPS):
        x, target = batch(step, mesh["dp"].get_local_rank())
        first = (x,) if any(s.is_first for s in stages) else ()
        last = {"target": target} if any(s.is_last for s in stages) else {}
        schedule.step(*first, **last)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [zerocore.full_state_dict(s.submod, rank0_only=False) for s in stages]


def train_right(kind: str, num_replicas: int) -> None:
    mesh = init_device_mesh("cpu", (2, num_replicas), mesh_dim_names=("pp", "dp"))
    expected = reference(num_replicas)
    for stage in range(4):
        print(kind, stage, flush=True)
        for state in run(mesh, stage, kind):
            for key, value in state.items():
                torch.testing.assert_close(value, expected[key], msg=f"stage {stage}: {key}")


@pytest.mark.parametrize("num_replicas", [*by_night(2), 1])
@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_schedules_that_train_right(kind: str, num_replicas: int) -> None:
    run_ranks(train_right, 2 * num_replicas, kind, num_replicas, timeout=120.0)


def train_refused(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    for stage in (0, 3):
        with pytest.raises(RuntimeError, match=r"'\d.0.weight' is sharded.*zero bubble.*1F1B"):
            run(mesh, stage, kind)
        dist.barrier()  # no rank waits for another one


@pytest.mark.parametrize("kind", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_schedules_that_are_refused(kind: str) -> None:
    run_ranks(train_refused, 2, kind)


def split_by_hand() -> None:
    from torch.distributed.pipelining import stage

    model = zerocore.shard(build())
    x = torch.ones(1, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="zero bubble"):
        stage.stage_backward_input([model(x).sum()], None, [x], model.parameters())
    plain = build()
    stage.stage_backward_input([plain(x).sum()], None, [x], plain.parameters())
    assert x.grad is not None


def test_a_split_backward_of_another_schedule() -> None:
    run_ranks(split_by_hand, 1)
