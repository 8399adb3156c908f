"""Programs: modules that are moved, cast and initialised after they were sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.distributed.programs.models import Block, Net, sgd, train
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def moved(run: Run, move: Callable[[Any], Any]) -> None:
    """Moves the model, then trains it, with an optimizer built after it."""
    model = run.shard(Net(), [Block])
    move(model)
    train(run, model)


@program("model.to('cpu')")
def to_cpu(run: Run) -> None:
    moved(run, lambda model: model.to("cpu"))


@program("model.to('cpu:0')")
def to_cpu_0(run: Run) -> None:
    moved(run, lambda model: model.to("cpu:0"))


@program("model.to('cpu:0') after the optimizer was built")
def to_cpu_0_late(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    model.to(torch.device("cpu", 0))
    train(run, model, optimizer)


@program("model.float() of a float model")
def to_float(run: Run) -> None:
    moved(run, lambda model: model.float())


@program("model.to(torch.float64) after sharding")
def to_double(run: Run) -> None:
    model = run.shard(Net(), [Block])
    model.double()
    optimizer = sgd(model)
    for x in run.batches(2):
        loss = model(x.double()).square().mean()
        loss.backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("model.cpu().train().requires_grad_()")
def chained_moves(run: Run) -> None:
    moved(run, lambda model: model.cpu().train().requires_grad_(True))


@program("model.to(memory_format=torch.channels_last) after sharding")
def to_channels_last(run: Run) -> None:
    model = run.shard(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)))
    model.to(memory_format=torch.channels_last)
    optimizer = sgd(model)
    for x in run.batches(2, 2, 3, 8, 8):
        loss = model(x).square().mean()
        loss.backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("model._apply(lambda t: t.clone()), as share_memory and quantizers do")
def apply_clone(run: Run) -> None:
    moved(run, lambda model: model._apply(lambda t: t.clone()))


@program("one block moved: model.blocks[0].to('cpu:0')")
def block_to_cpu_0(run: Run) -> None:
    model = run.shard(Net(), [Block])
    run.module(model).blocks[0].to("cpu:0")
    train(run, model)


@program("model.share_memory()")
def share_memory(run: Run) -> None:
    moved(run, lambda model: model.share_memory())


def fill(model: nn.Module) -> None:
    """Values that do not depend on how a parameter is laid out."""
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            p.fill_(0.02 * (index + 1))


@program("to_empty(device='cpu') and weights filled again")
def to_empty_filled(run: Run) -> None:
    model = run.shard(Net(), [Block])
    model.to_empty(device="cpu")
    fill(model)
    train(run, model)


@program("sharded on the meta device, then to_empty and weights filled")
def meta_to_empty(run: Run) -> None:
    if type(run).__name__ in ("Run", "DdpRun"):  # replicas cannot begin on meta
        model = run.shard(Net(), [Block])
    else:
        with torch.device("meta"):
            net = Net()
        model = run.shard(net, [Block])
        model.to_empty(device="cpu")
    fill(model)
    train(run, model)


@program("reset_parameters of one layer between steps, the same seed on all ranks")
def reset_layer(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    torch.manual_seed(4)
    run.module(model).out.reset_parameters()
    train(run, model)


@program("nn.init.constant_ of one bias between steps")
def init_bias(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    nn.init.constant_(run.module(model).out.bias, 0.3)
    train(run, model)
