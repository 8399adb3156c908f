"""Programs: dropped or zeroed gradients, averages by hand, flat buffers, states before a step."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.distributed.programs.models import Block, Net, SometimesTwo, mean_square, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run
from tests.distributed.values import views_of


@program("micro-batches that zero_grad() drops, one of which alone used a layer", unused=True)
def accumulation_dropped(run: Run) -> None:
    model = run.shard(SometimesTwo(), [Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    for step in range(3):
        with run.no_sync(model):
            mean_square(model(run.tensor(4, 8, key=2 * step), step == 1)).backward()
        if step == 1:  # its loss is a spike
            optimizer.zero_grad()
        loss = mean_square(model(run.tensor(4, 8, key=2 * step + 1), step == 0))
        loss.backward()
        run.record(loss)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("zero_grad(set_to_none=False), a layer used once by one rank, and its decay", unused=True)
def zeroed_gradients(run: Run) -> None:
    model = run.shard(SometimesTwo(), [Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    for step in range(4):
        loss = mean_square(model(run.tensor(4, 8, key=step), step == 1 and run.rank == 1))
        loss.backward()
        run.record(loss)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def train(run: Run, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss = mean_square(model(run.tensor(4, 8, key=step)))
    loss.backward()
    run.record(loss)
    run.average(model)
    optimizer.step()
    optimizer.zero_grad()


@program("model averaging: each step ends with all_reduce(p.data) and a division, as local SGD")
def averaged_weights(run: Run) -> None:
    model = run.shard(nn.Sequential(Block(), Block()), [Block])
    for param in model.parameters():  # as the loops of before DistributedDataParallel begin
        dist.broadcast(param.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        train(run, model, optimizer, step)
        for param in model.parameters():
            dist.all_reduce(param.data)
            param.data /= dist.get_world_size()


@program("an optimizer that begins from the weights; its state dict is read before a step")
def state_dict_before_a_step(run: Run) -> None:
    model = run.shard(nn.Sequential(Block(), Block()), [Block])
    optimizer = FromWeights(model.parameters())
    for step in range(3):
        get_optimizer_state_dict(model, optimizer)  # a trainer asks what there is to save
        train(run, model, optimizer, step)


class FromWeights(torch.optim.Optimizer):
    """Averages weights with a faster sequence, which begins at them, as schedule-free SGD does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["z"] = param.clone()
            state["z"].sub_(param.grad, alpha=0.05)
            param.lerp_(state["z"], 0.5)


@program("gradients that are views of a flat buffer, which the program clips and zeroes")
def flat_gradients(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer, params = sgd(model), list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in params))
    for p, view in zip(params, views_of(flat, params), strict=True):
        p.grad = view
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        run.record(loss, flat.norm())
        flat.mul_(0.1 / flat.norm())
        optimizer.step()
        flat.zero_()


@program("weights that are views of a flat buffer, which the program decays")
def flat_weights(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer, params = sgd(model), list(model.parameters())
    flat = torch.linspace(-0.5, 0.5, sum(p.numel() for p in params))
    for p, view in zip(params, views_of(flat, params), strict=True):
        p.data = view
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        optimizer.step()
        flat.mul_(0.9)
        optimizer.zero_grad()
        run.record(loss, flat.norm())


@program("weights set to views of one vector, to try steps along a line")
def line_search(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer, params = sgd(model), list(model.parameters())
    vector = torch.linspace(-0.5, 0.5, sum(p.numel() for p in params))
    x = run.tensor(4, 8)
    for scale in (1.0, 0.9, 0.8):
        nn.utils.vector_to_parameters(vector * scale, params)
        run.record(mean_square(model(x)).detach())
    mean_square(model(x)).backward()
    run.average(model)
    optimizer.step()


@program("the best model kept by copy.deepcopy, trained on, and loaded back")
def best_model_copied(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
    best = copy.deepcopy(run.module(model))
    run.module(best).blocks[0].up.weight.data[0].clamp_(max=0.0)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
    run.module(model).load_state_dict(best.state_dict())
    run.record(model(run.tensor(4, 8)))


@program("a gradient penalty over micro-batches under no_sync, clipped")
def penalty_accumulated(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step in range(3):
        for part in range(2):
            with run.no_sync(model) if part == 0 else nullcontext():
                x = run.tensor(4, 8, key=2 * step + part).requires_grad_()
                output = model(x)
                slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
                loss = output.mean() + (slope.norm(dim=1) - 1).square().mean()
                loss.backward()
                run.record(loss)
        run.average(model)
        run.record(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
