"""Programs: weights that go to where they are used while a model trains."""

from __future__ import annotations

import torch
from torch import nn

from tests.distributed.programs.models import Block, Net, adamw, mean_square, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def sampled(run: Run, engine: nn.Module, key: int) -> None:
    """An engine with the weights that it was given computes a batch."""
    with torch.no_grad():
        run.record(engine(run.tensor(4, 8, key=key)))


@program("weights exported to an engine between the micro-batches of a step")
def export_between_micro_batches(run: Run) -> None:
    model, engine = run.shard(Net(), [Block]), Net()
    optimizer = adamw(model.parameters())
    for step in range(3):
        with run.no_sync(model):
            (mean_square(model(run.tensor(4, 8, key=2 * step))) / 2).backward()
        engine.load_state_dict(run.exported(model))  # gradients are held back
        sampled(run, engine, 20 + step)
        update(run, model, optimizer, mean_square(model(run.tensor(4, 8, key=2 * step + 1))) / 2)


@program("weights exported to an engine between a forward and its backward")
def export_before_backward(run: Run) -> None:
    model, engine = run.shard(Net(), [Block]), Net()
    optimizer = adamw(model.parameters())
    for step, x in enumerate(run.batches()):
        loss = mean_square(model(x))
        engine.load_state_dict(run.exported(model))
        sampled(run, engine, 20 + step)
        update(run, model, optimizer, loss)


@program("a rollout while the model is parked, between backward and step, gradients clipped after")
def parked_before_step(run: Run) -> None:
    model, engine = run.shard(Net(), [Block]), Net()
    optimizer = adamw(model.parameters())
    for step, x in enumerate(run.batches(4)):
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        with run.parked(model, optimizer):
            engine.load_state_dict(run.exported(model))
            sampled(run, engine, 20 + step)
        run.record(loss, nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()


@program("an engine that is given weights behind each second step, from a model half frozen")
def export_of_a_frozen_half(run: Run) -> None:
    net = Net()
    net.blocks[0].requires_grad_(False)
    model, engine = run.shard(net, [Block]), Net()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step, x in enumerate(run.batches(4)):
        update(run, model, optimizer, mean_square(model(x)))
        if step % 2 == 1:
            engine.load_state_dict(run.exported(model))
            sampled(run, engine, 20 + step)
