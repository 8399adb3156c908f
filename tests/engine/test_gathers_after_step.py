"""Gathers at stages 1 and 2 begin when a step ends: what a rank then reads, it reads alone."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.scripts import run_program
from zerocore.common.alarm import STALL_SECONDS
from zerocore.model.state import state_of

WIDTH = 8
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
GATHERING = pytest.mark.parametrize("stage", [1, 2])


class Net(nn.Module):
    """Three units: blocks and what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def make(stage: int, **options: Any) -> tuple[Any, nn.Module]:
    """A sharded model and a plain one with the same values."""
    torch.manual_seed(0)
    plain = Net()
    model = zerocore.shard(copy.deepcopy(plain), stage=stage, units=["Linear"], **options)
    return model, plain


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


def backward(model: nn.Module) -> None:
    model(inputs()).square().mean().backward()


def gathered(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """The units that are gathered meanwhile."""
    with zerocore.reporting.record_events(model) as events:
        run()
    return [event.unit for event in events if event.op == "all_gather"]


COMPUTED: tuple[Callable[[Tensor], Any], ...] = (
    lambda p: p.detach().abs().mean(),
    lambda p: p.float().mean(),
    lambda p: p.detach().half().float().norm(),
    lambda p: (p.detach() * 2 + 1).square().sum(),
    lambda p: (p.detach() - p.detach().mean()).abs().max(),
    lambda p: (p.detach() > 0).float().mean(),
    lambda p: torch.isnan(p.detach()).any(),
    lambda p: torch.where(p.detach() > 0, p.detach(), 0.5).std(),
    lambda p: p.data.view(-1).abs().sum(),
    lambda p: p.data.clone().flatten().exp()[1:3].sum(),
    lambda p: p.detach().abs().cpu().flatten().tolist()[1],
    lambda p: torch.histc(p.detach().abs(), 4).max(),
    lambda p: torch.equal(p.detach() * 2, p.detach() + p.detach()),
)


def check_alone(model: nn.Module, plain: nn.Module) -> None:
    """Rank 0 reads what it can; the others wait for it in a barrier."""
    if dist.get_rank() == 0:
        data = io.BytesIO()
        torch.save(model.state_dict(), data)
        torch.testing.assert_close(torch.load(io.BytesIO(data.getvalue())), plain.state_dict())
        state = model.state_dict()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.norm().item() == pytest.approx(q.norm().item())
            assert float(p.detach().norm()) == pytest.approx(float(q.norm()))
            assert p.detach().cpu().numpy() == pytest.approx(q.detach().cpu().numpy())
            assert state[name].numpy() == pytest.approx(q.detach().numpy())
            with torch.no_grad():
                assert p.mean().item() == pytest.approx(q.mean().item())
                assert p.max().item() == pytest.approx(q.max().item())
                torch.testing.assert_close(torch.histc(p, 4), torch.histc(q, 4))
                torch.testing.assert_close(torch.histc(state[name], 4), torch.histc(q, 4))
                torch.testing.assert_close(p[0] + 0, q[0] + 0)
                for read in COMPUTED:
                    assert float(read(p)) == pytest.approx(float(read(q)))
                norms = torch._foreach_norm([p, p])
                assert norms[1].item() == pytest.approx(float(q.norm()))
            torch.testing.assert_close(torch.tensor(p.detach().tolist()), q.detach())
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(model(inputs()), plain(inputs()))
    dist.barrier()


def read_alone(stage: int, kind: str) -> None:
    model, plain = make(stage)
    optimizers = [make_optimizer(kind, each) for each in (model, plain)]
    for _ in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            backward(each)
            if kind == "clipped":
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        check_alone(model, plain)


def make_optimizer(kind: str, model: nn.Module) -> Any:
    params = model.parameters()
    if kind == "zerocore" and zerocore.is_sharded(model):
        return zerocore.optim.AdamW(params, weight_decay=0.01)
    return torch.optim.SGD(params, 0.1, 0.9) if kind == "clipped" else torch.optim.AdamW(params)


@STAGES
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_rank_0_reads_alone(stage: int, world_size: int) -> None:
    for kind in ("torch", "zerocore", "clipped") if world_size < 8 else ("torch",):
        run_ranks(read_alone, world_size, stage, kind)


def compute_across_steps(stage: int) -> None:
    """Values of before a step, and those that are changed in place, are what they are."""
    model, plain = make(stage)
    found: list[list[Any]] = []
    for each in (model, plain):
        params = list(each.parameters())
        optimizer = torch.optim.SGD(params, 0.1)
        averages = [p.detach() * 1 for p in params]
        numbers = []
        for _ in range(12):
            before = [p.detach().abs() for p in params]
            doubled = [p.detach().abs() for p in params]
            [value.mul_(2) for value in doubled[::2]]
            backward(each)
            optimizer.step()
            optimizer.zero_grad()
            [value.mul_(2) for value in doubled[1::2]]
            averages = [a * 0.9 + p.detach() * 0.1 for a, p in zip(averages, params, strict=True)]
            for values in (before, doubled, averages):
                numbers += [float(value.sum()) for value in values]
        found.append(numbers)
        if each is model:
            depths = [value.recipe.depth for value in averages if hasattr(value, "recipe")]
            assert all(depth <= 8 for depth in depths)
    assert found[0] == pytest.approx(found[1])


@STAGES
def test_values_of_before_a_step(stage: int) -> None:
    run_ranks(compute_across_steps, 2, stage)


WEIGHTS, BIASES = slice(0, None, 2), slice(1, None, 2)


def count_gathers(stage: int) -> None:
    """Each unit once a step, behind the last optimizer that updates it, else in the forward."""
    model, plain = make(stage)
    names = [unit.name for unit in state_of(model).units]
    for each in (model, plain):
        train_by_parts(each, names if each is model else None)
    for (name, value), other in zip(
        zerocore.full_state_dict(model, rank0_only=False).items(),
        plain.state_dict().values(),
        strict=True,
    ):
        torch.testing.assert_close(value, other, msg=name)


def train_by_parts(model: Any, names: list[str] | None) -> None:
    params = list(model.parameters())
    both = [torch.optim.SGD(params[part], 0.1, momentum=0.9) for part in (WEIGHTS, BIASES)]
    one = torch.optim.AdamW(params)

    def meanwhile(run: Callable[[], Any], expected: list[str]) -> None:
        if names is None:
            run()
        else:
            assert gathered(model, run) == expected

    for number in range(4):
        for index in range(3):
            last = index == 2
            with nullcontext() if last or names is None else zerocore.no_sync(model):
                meanwhile(lambda: backward(model), [])
        if number % 2:
            meanwhile(one.step, names or [])
        else:
            meanwhile(both[0].step, [])
            meanwhile(both[1].step, names or [])
        one.zero_grad()
        backward(model)
        meanwhile(both[0].step, [])  # biases stay: the forward gathers
        one.zero_grad()
        meanwhile(lambda: model(inputs()), names or [])
        with torch.no_grad():
            for param in params:
                param.mul_(0.9)  # behind gathers that read it
        meanwhile(lambda: model(inputs()), names or [])
        backward(model)
        one.step()
        with torch.no_grad():
            for param in params:
                param.mul_(0.9)  # while gathers read it
        meanwhile(lambda: model(inputs()), names or [])
        one.zero_grad()


@GATHERING
@pytest.mark.parametrize("world_size", [2, 4])
def test_each_change_is_gathered_once(stage: int, world_size: int) -> None:
    run_ranks(count_gathers, world_size, stage)


def step_apart(stage: int, how: str) -> str:
    """Rank 1 does without its step, or raises in it; what this rank hears."""
    os.environ[STALL_SECONDS] = "4"
    model, _ = make(stage)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    error = ""
    try:
        for number in range(3):
            backward(model)
            if number == 1 and dist.get_rank() == 1:
                if how == "raises":
                    optimizer.param_groups[0]["lr"] = "no number"
                    with pytest.raises(TypeError):
                        optimizer.step()
                    optimizer.param_groups[0]["lr"] = 0.1
            else:
                optimizer.step()
            optimizer.zero_grad()
    except (ValueError, RuntimeError) as caught:
        error = str(caught)
    return error


@GATHERING
@pytest.mark.parametrize("how", ["skips", "raises"])
def test_a_rank_that_does_not_step(stage: int, how: str) -> None:
    """No hang: an error on each rank that names a unit."""
    errors = run_ranks(step_apart, 2, stage, how)
    assert all("blocks.0" in error or "head" in error for error in errors), errors


PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
from tests.engine.test_gathers_after_step import backward, make

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
model, _ = make(int(sys.argv[1]))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
backward(model)
if rank == 0:
    time.sleep(2)
optimizer.step()
if rank == 0:
    torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.mark.parametrize("stage", [2])
def test_the_others_end_behind_their_last_step(stage: int, tmp_path: Path) -> None:
    """Rank 0 gets their parts, although it steps later than they end."""
    path = tmp_path / "model.pt"
    outcomes = run_program(PROGRAM, 2, str(stage), str(path))
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert all(torch.isfinite(value).all() for value in torch.load(path).values())
