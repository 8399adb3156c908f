"""Training scripts around experts and pipelines, beside one process and FSDP2."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerocore
from tests.distributed.harness import run_ranks
from tests.sharding.experts import loss_of, spread_model, whole_model
from tests.sharding.test_experts import EVEN, LAYOUTS, mesh_of, own_of, sharded
from tests.sharding.test_pipelines import NUM_MICRO, batch, build

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
STEPS, SAVED = 4, 2


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)


def train_step(
    model: nn.Module, optimizer: Any, ranks: Any, number: int, experts_by: float = 1.0
) -> None:
    """Two losses of one forward each, with an evaluation between forward and backward."""
    first = loss_of(model, ranks, number)
    with torch.no_grad():
        loss_of(model, ranks, number + 50)
    second = loss_of(model, ranks, number + 20)
    (first + second).backward()
    for name, param in model.named_parameters():
        if ".experts." in name and experts_by != 1.0:
            param.grad.div_(experts_by)
    optimizer.step()
    optimizer.zero_grad()


def resume_experts(stage: int, folder: str) -> None:
    truth = whole_model()
    reference = adamw(truth)
    model = sharded(*LAYOUTS["2x2"], stage)
    optimizer = adamw(model)
    for number in range(SAVED):
        train_step(model, optimizer, [dist.get_rank()], number)
    zerocore.Checkpoints(folder, model, optimizer).save(SAVED)
    model = sharded(*LAYOUTS["1x4"], stage)  # resumed with other experts on each rank
    optimizer = adamw(model)
    assert zerocore.Checkpoints(folder, model, optimizer).load() == SAVED
    for number in range(SAVED, STEPS):
        train_step(model, optimizer, [dist.get_rank()], number)
    for number in range(STEPS):
        train_step(truth, reference, range(4), number)
    found = zerocore.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(found, dict(truth.state_dict()), **CLOSE)
    theirs = beside_fsdp2()
    for name, value in theirs.items():
        torch.testing.assert_close(value, own_of(name, found[name], (2, 2), EVEN), **CLOSE)


def beside_fsdp2() -> dict[str, Tensor]:
    """FSDP2 without the resume. On gloo it takes no divisor of its own, so that is done by hand."""
    mesh = mesh_of((2, 2))
    model: Any = spread_model(mesh.get_group("ep"), EVEN)
    for block in model.blocks:
        fully_shard(block.experts, mesh=mesh["edp"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = adamw(model)
    for number in range(STEPS):
        train_step(model, optimizer, [dist.get_rank()], number, experts_by=2.0)
    return {name: param.full_tensor() for name, param in model.state_dict().items()}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_experts_resume_on_another_mesh(stage: int, tmp_path: Any) -> None:
    run_ranks(resume_experts, 4, stage, str(tmp_path))


def pipelined(wrap: Any, kind: str) -> list[nn.Module]:
    """Trains two stages a rank with an evaluation of the schedule between the steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, stages = mesh["pp"].get_local_rank(), []
    for index in (rank, rank + 2):
        part = build()[2 * index : 2 * index + 2]
        where = torch.device("cpu")
        module = wrap(part, mesh["dp"])
        stages.append(pipelining.PipelineStage(module, index, 4, where, group=mesh.get_group("pp")))
    schedule = getattr(pipelining, kind)(stages, NUM_MICRO, loss_fn=nn.functional.mse_loss)
    optimizers = [torch.optim.SGD(stage.submod.parameters(), lr=0.5) for stage in stages]
    for number in range(STEPS):
        x, target = batch(number, mesh["dp"].get_local_rank())
        inputs = (x,) if rank == 0 else ()
        wanted = {"target": target} if rank == 1 else {}
        schedule.step(*inputs, **wanted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        schedule.eval(*inputs, **wanted)
    return [stage.submod for stage in stages]


def shard_stage(part: nn.Module, mesh: Any) -> nn.Module:
    return zerocore.shard(part, group=mesh, units=[nn.Sequential])


def by_fsdp2(part: nn.Module, mesh: Any) -> Any:
    """With full parameters between forward and backward, as it is wrong otherwise."""
    return fully_shard(part, mesh=mesh, reshard_after_forward=False)


def train_beside_fsdp2() -> None:
    """DDP is not there: after an evaluation its reducer ends such a step with an internal error."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(STEPS):
        for replica in range(2):
            x, target = batch(number, replica)
            (nn.functional.mse_loss(model(x), target) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model.state_dict()
    for kind in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        for part in pipelined(shard_stage, kind):
            for key, value in zerocore.full_state_dict(part, rank0_only=False).items():
                torch.testing.assert_close(value, expected[key], **CLOSE)
    for part in pipelined(by_fsdp2, "ScheduleInterleavedZeroBubble"):
        for key, value in part.state_dict().items():
            torch.testing.assert_close(value.full_tensor(), expected[key], **CLOSE)


def test_pipelines_evaluate_between_steps() -> None:
    run_ranks(train_beside_fsdp2, 4, timeout=120.0)


def run_example(name: str, options: tuple[str, ...]) -> str:
    """The text that this rank prints."""
    sys.argv = [name, "--steps", "20", *options]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["experts", "context", "tensor_parallel", "pipeline"])
def test_examples_learn(name: str) -> None:
    """As the page has them; torchrun gives each rank its place."""
    options = ("--stages" if name == "pipeline" else "--parts", "2")
    printed = run_ranks(run_example, 4, f"{name}.py", options, launch="torchrun", timeout=120)
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", "".join(printed))]
    assert len(losses) == 2 and losses[1] < losses[0]
