"""Forwards that train: backward and step, several times, inside of one call of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks

WIDTH = 8
KINDS = [(stage, units) for stage in (3, 0, 1, 2) for units in (None, [nn.Linear])]


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))


class Net(nn.Module):
    """A generator and a critic; its forward runs a program."""

    def __init__(self) -> None:
        super().__init__()
        self.gen, self.critic = mlp(WIDTH), mlp(1)
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, program: Any, *args: Any) -> Any:
        return program(self, *args)


def batch(number: int) -> Tensor:
    rank = dist.get_rank()
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def go_back(loss: Tensor, owner: nn.Module) -> None:
    """As Lightning over DistributedDataParallel, which averages for each backward of a step."""
    if isinstance(owner, DistributedDataParallel):
        owner.reducer.prepare_for_backward([loss])
    loss.backward()


def two_cycles(net: Net, owner: nn.Module, optimizers: list[Any], step: int) -> list[float]:
    """Trains twice; evaluates behind each step."""
    seen = []
    for number in range(2):
        loss = net.critic(net.gen(batch(2 * step + number)) * net.code).square().mean()
        optimizers[0].zero_grad()
        go_back(loss, owner)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            seen.append(net.critic(net.gen(batch(99)) * net.code).mean().item())
    return [loss.item(), *seen]


def gan(net: Net, owner: nn.Module, optimizers: list[Any], step: int) -> list[float]:
    """The generator's turn and the critic's, with the other one frozen."""
    losses = []
    for turn, optimizer in enumerate(optimizers):
        for number, part in enumerate((net.gen, net.critic)):
            toggle(owner, part, number == turn)
        made = net.gen(batch(step))
        score = net.critic(made if turn == 0 else made.detach() - batch(step))
        optimizer.zero_grad()
        go_back(score.square().mean(), owner)
        optimizer.step()
        losses.append(score.mean().item())
    for part in (net.gen, net.critic):
        toggle(owner, part, True)
    return losses


def toggle(owner: nn.Module, part: nn.Module, is_trained: bool) -> None:
    for group in [g for o in owner.optimizers for g in o.param_groups if g["part"] == id(part)]:
        for param in group["params"]:
            param.requires_grad_(is_trained)


def writes(net: Net, owner: nn.Module, optimizers: list[Any], step: int) -> list[float]:
    """Changes a parameter in place, around a step."""
    with torch.no_grad():
        net.code.mul_(0.9)
    numbers = two_cycles(net, owner, optimizers, step)
    with torch.no_grad():
        net.code.add_(0.1)
    return [*numbers, net.code.sum().item()]


def played(program: Any, system: str, stage: int, units: Any) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    net = Net()
    owner: Any = net
    if system == "ddp":
        owner = DistributedDataParallel(net, find_unused_parameters=True)
    elif system == "fsdp":
        for part in (net.gen, net.critic, net) if units else (net,):
            zerocore.fsdp.fully_shard(part)
    else:
        zerocore.shard(net, stage=stage, units=units)
    parts = (net.gen, net.critic)
    groups = [[{"params": list(part.parameters()), "part": id(part)}] for part in parts]
    owner.optimizers = [
        torch.optim.SGD(groups[0], lr=0.1, momentum=0.9),
        torch.optim.AdamW(groups[1], lr=0.01, eps=1e-5),
    ]
    numbers = []
    for step in range(3):
        numbers += owner(program, owner, owner.optimizers, step)
    return numbers, {} if system == "fsdp" else full_state(net, system)


def full_state(net: Net, system: str) -> dict[str, Tensor]:
    if system == "ddp":
        return dict(net.state_dict())
    return dict(zerocore.full_state_dict(net, rank0_only=False))


def compare(program: Any, stage: int, units: Any) -> None:
    expected, state = played(program, "ddp", stage, units)
    found, found_state = played(program, "zerocore", stage, units)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_state, state)
    if stage == 3 and program is not gan:  # FSDP2 does not freeze parameters in a call
        torch.testing.assert_close(played(program, "fsdp", stage, units)[0], expected)


@pytest.mark.parametrize(("stage", "units"), KINDS)
@pytest.mark.parametrize("program", [two_cycles, gan, writes])
def test_steps_in_a_forward_are_those_of_ddp(program: Any, stage: int, units: Any) -> None:
    run_ranks(compare, 2, program, stage, units)


class Failing(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("in the backward")


def fails(net: Net, depth: int, is_caught: bool, more: bool) -> None:
    """A backward that raises inside of `depth` calls."""
    if depth > 1:
        net(fails, depth - 1, is_caught, more)
        return
    loss = Failing.apply(net.gen(batch(1))).sum()
    if is_caught:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    else:
        loss.backward()
    if more:
        net.critic(net.gen(batch(2)) * net.code).sum().backward()


def goes_on_after(stage: int, units: Any) -> None:
    torch.manual_seed(0)
    net = zerocore.shard(Net(), stage=stage, units=units)
    for depth in (1, 2, 3):
        for _ in range(3):
            with pytest.raises(ZeroDivisionError, match="in the backward"):
                net(fails, depth, False, False)
            net(fails, depth, True, True)
    assert not net._zerocore_state.engine.in_call
    for optimizer in (torch.optim.SGD(net.parameters(), lr=0.1),):
        optimizer.zero_grad()
    compare(two_cycles, stage, units)


@pytest.mark.parametrize(("stage", "units"), KINDS)
def test_a_backward_that_fails_in_a_forward_ends_that_step_alone(stage: int, units: Any) -> None:
    """The calls around it were popped from an empty stack, and the next one was written in front
    of its memory."""
    run_ranks(goes_on_after, 2, stage, units)


def resets(net: Net, depth: int) -> None:
    if depth > 0:
        net(resets, depth - 1)
    else:
        zerocore.reset(net)
    net.gen(batch(1))


def reset_inside(stage: int) -> None:
    torch.manual_seed(0)
    net = zerocore.shard(Net(), stage=stage, units=[nn.Linear])
    for depth in (0, 1, 2) * 3:
        net(resets, depth)
    assert not net._zerocore_state.engine.in_call
    compare(two_cycles, stage, [nn.Linear])


@pytest.mark.parametrize("stage", [3, 0])
def test_a_reset_in_a_forward_drops_the_calls_around_it(stage: int) -> None:
    run_ranks(reset_inside, 2, stage)
