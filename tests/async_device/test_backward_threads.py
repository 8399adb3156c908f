"""Backwards on several threads of autograd: outputs on the CPU, several models at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.async_device.training import WIDTH, Block, make_model, start, train
from tests.distributed.harness import run_ranks


class Slow(torch.autograd.Function):
    """The identity, whose gradient is late on the thread that computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.02)
        return grads[0]


class HostBlock(Block):
    """Takes and returns CPU tensors. The gradient of a weight comes after its input's."""

    def forward(self, x: Tensor) -> Tensor:
        weight = Slow.apply(self.up.weight)
        there = x.to(weight.device)
        hidden: Tensor = self.down(nn.functional.linear(there, weight, self.up.bias).tanh())
        return (there + hidden).cpu() * 1.0


def host_model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(HostBlock() for _ in range(4))).to(device)


def train_host_blocks(on_device: bool) -> list[Any]:
    """Returns the losses at each stage, and the events of a step."""
    device, cpu = start(on_device)[0], torch.device("cpu")
    results: list[Any] = []
    for stage in range(4):
        model = zerocore.shard(host_model(device), stage=stage, units=[HostBlock])
        results.append(torch.stack(train(model, cpu)).tolist())
        with zerocore.reporting.record_events(model) as events:
            train(model, cpu, steps=1)
        results.append([(event.op, event.unit) for event in events])
    return results


def test_units_with_outputs_on_the_cpu() -> None:
    expected = run_ranks(train_host_blocks, 2, False, launch="torchrun")
    assert run_ranks(train_host_blocks, 2, True, launch="torchrun") == expected


class Checkpointed(nn.Module):
    """Checkpoints a block whose autograd node runs on the CPU's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.block = HostBlock()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=True)


def recompute_on_the_cpu() -> None:
    device, _ = start(on_device=True)
    model = zerocore.shard(Checkpointed().to(device), units=[HostBlock])
    for _ in range(2):
        loss = model(torch.ones(4, WIDTH, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match=r"unit 'block' .* node of another device"):
            loss.backward()


def test_a_checkpoint_on_the_cpu_is_refused() -> None:
    run_ranks(recompute_on_the_cpu, 2, launch="torchrun")


class Leaky(Block):
    """A unit that lets a tensor out as an attribute, beside its output."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept: Tensor = self.down(self.up(x).tanh())
        return x + self.kept


def backward_of_another() -> None:
    """A model learns the shape of its own backwards, not of another model's before them."""
    start(on_device=False)
    torch.manual_seed(0)
    model: Any = zerocore.shard(nn.Sequential(Leaky(), Block(), Block()), units=[Block])
    other = zerocore.shard(make_model(torch.device("cpu")), units=[Block])
    for step in range(4):
        x = torch.ones(4, WIDTH)
        loss = model(x).sum()
        other(x).sum().backward()
        (loss if step < 3 else model[0].kept.sum()).backward()


def test_a_backward_of_another_model_says_nothing_of_a_model() -> None:
    run_ranks(backward_of_another, 2, launch="torchrun")


def two_models(device: torch.device, stage: int) -> list[nn.Module]:
    """Makes one model on the device and one on the CPU."""
    devices = (device, torch.device("cpu"))
    return [zerocore.shard(make_model(each), stage=stage, units=[Block]) for each in devices]


def loss_of(models: list[nn.Module], device: torch.device) -> Tensor:
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    there, here = models[0](x.to(device)), models[1](x)
    loss: Tensor = there.cpu().square().mean() + here.square().mean()
    return loss


def train_two(on_device: bool) -> list[float]:
    """Trains two models in one backward."""
    device, _ = start(on_device)
    losses = []
    for stage in (0, 2, 3):
        models = two_models(device, stage)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        for _ in range(6):
            loss = loss_of(models, device)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_two_models_in_one_backward_on_a_rank() -> None:
    expected = run_ranks(train_two, 1, False, launch="torchrun")
    assert run_ranks(train_two, 1, True, launch="torchrun") == expected


def refuse_two() -> None:
    """Neighbouring ranks begin the backward with different models of two."""
    device, _ = start(on_device=True)
    models = two_models(device, 3)
    outputs = []
    for number, (model, where) in enumerate(zip(models, (device, "cpu"), strict=True)):
        x = torch.ones(4, WIDTH, device=where)
        model(x).sum().backward()
        outputs.append(model(x))
        for _ in range(25 if dist.get_rank() % 2 == number else 0):
            outputs[number] = Slow.apply(outputs[number])
    loss = outputs[1].sum() + outputs[0].cpu().sum()
    with pytest.raises(RuntimeError, match=r"^two sharded models run backward at a time"):
        loss.backward()


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_models_in_one_backward_on_several_ranks_are_refused(world_size: int) -> None:
    """The error comes before the group's timeout, which is torch's default."""
    run_ranks(refuse_two, world_size, launch="torchrun")
