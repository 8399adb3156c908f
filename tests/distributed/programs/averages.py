"""Programs: averages of weights, target networks, and edits through .data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.distributed.programs.models import Block, Net, mean_square, sgd, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


@program("an exponential average in copies: shadow.lerp_(p, 0.5)")
def ema_lerp(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    shadow = [p.detach().clone() for p in model.parameters()]
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        for s, p in zip(shadow, model.parameters(), strict=True):
            s.lerp_(p.detach(), 0.5)
    with torch.no_grad():
        for s, p in zip(shadow, model.parameters(), strict=True):
            p.copy_(s)


@program("an exponential average with .data, swapped in for evaluation and back")
def ema_swap(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        backup = {}
        for name, p in model.named_parameters():
            shadow[name] = 0.5 * shadow[name] + 0.5 * p.data
            backup[name] = p.data.clone()
            p.data.copy_(shadow[name])
        with torch.no_grad():
            run.record(model(x))
        for name, p in model.named_parameters():
            p.data.copy_(backup[name])


@program("an exponential average swapped in by p.data = shadow")
def ema_swap_assign(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        backup = {}
        for name, p in model.named_parameters():
            shadow[name] = 0.5 * shadow[name] + 0.5 * p.data
            backup[name] = p.data
            p.data = shadow[name]
        with torch.no_grad():
            run.record(model(x))
        for name, p in model.named_parameters():
            p.data = backup[name]


@program("AveragedModel of the sharded model")
def averaged_model(run: Run) -> None:
    model = run.shard(Net(), [Block])
    average = AveragedModel(run.module(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        average.update_parameters(run.module(model))
    run.record(average(run.tensor(4, 8)))


@program("AveragedModel made before sharding")
def averaged_model_before(run: Run) -> None:
    net = Net()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    model = run.shard(net, [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        average.update_parameters(run.module(model))
    run.record(average(run.tensor(4, 8)))


@program("stochastic weight averaging with SWALR and update_bn")
def swa(run: Run) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    twin = copy.deepcopy(net)
    model, average = run.shard(net), run.shard(twin)
    optimizer = sgd(model)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for count, x in enumerate(run.batches()):
        update(run, model, optimizer, mean_square(model(x)))
        schedule.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.add_((p - a) / (count + 1))
    update_bn(list(run.batches(2)), average)


def momentum_pair(run: Run, move: Any) -> None:
    """A query model that is trained and a key model that follows it."""
    net = Net()
    key = run.shard(copy.deepcopy(net), [Block])
    query = run.shard(net, [Block])
    optimizer = sgd(query)
    for x in run.batches():
        with torch.no_grad():
            for q, k in zip(query.parameters(), key.parameters(), strict=True):
                move(q, k)
            target = key(x)
        update(run, query, optimizer, (query(x) - target - 1).square().mean())


@program("MoCo: k.data = k.data * m + q.data * (1 - m)")
def momentum_assign(run: Run) -> None:
    def move(q: Any, k: Any) -> None:
        k.data = k.data * 0.9 + q.data * 0.1

    momentum_pair(run, move)


@program("BYOL: k.data.mul_(m).add_(q.data, alpha=1 - m)")
def momentum_in_place(run: Run) -> None:
    momentum_pair(run, lambda q, k: k.data.mul_(0.9).add_(q.data, alpha=0.1))


@program("mean teacher: k.lerp_(q, 1 - m) under no_grad")
def momentum_lerp(run: Run) -> None:
    momentum_pair(run, lambda q, k: k.lerp_(q, 0.1))


@program("a target network refreshed by load_state_dict of the online one's state_dict")
def target_load(run: Run) -> None:
    net = Net()
    target = run.shard(copy.deepcopy(net), [Block])
    model = run.shard(net, [Block])
    optimizer = sgd(model)
    for x in run.batches():
        with torch.no_grad():
            aim = target(x)
        update(run, model, optimizer, (model(x) - aim - 1).square().mean())
        run.module(target).load_state_dict(run.module(model).state_dict())


@program("an unsharded teacher that follows the full state")
def teacher_from_full_state(run: Run) -> None:
    net = Net()
    teacher = copy.deepcopy(net)
    model = run.shard(net, [Block])
    optimizer = sgd(model)
    for x in run.batches():
        with torch.no_grad():
            aim = teacher(x)
        update(run, model, optimizer, (model(x) - aim - 1).square().mean())
        full = run.full_state(model)
        for name, value in teacher.state_dict().items():
            value.lerp_(full[name], 0.5)
    run.record(teacher(run.tensor(4, 8)))


@program("noise of one seed added to the weights between forward and backward")
def weights_changed_before_backward(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    loss = mean_square(model(run.tensor(4, 8)))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    try:
        loss.backward()
    except RuntimeError:
        run.record("refused")
    optimizer.zero_grad()


@program("in-place .data edits between steps: p.data.mul_(0.9)")
def data_scaled(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        for p in model.parameters():
            p.data.mul_(0.9)


@program("one weight filled through .data: model.out.weight.data.fill_")
def data_filled(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    run.module(model).out.weight.data.fill_(0.03)
    train(run, model)


@program("one row of a weight set under no_grad: w[0] = 0")
def row_set(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    with torch.no_grad():
        run.module(model).out.weight[0] = 0
    train(run, model)


@program("p.data = p.data.clone() for all parameters")
def data_cloned(run: Run) -> None:
    model = run.shard(Net(), [Block])
    for p in model.parameters():
        p.data = p.data.clone()
    train(run, model)


@program("weights of two models averaged under no_grad (model soup)")
def soup(run: Run) -> None:
    first, second = run.shard(Net(), [Block]), run.shard(Net(), [Block])
    with torch.no_grad():
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            a.add_(b).div_(2)
    train(run, first)


class Online(nn.Module):
    """Encoder and predictor, so its units are cut at other elements than the encoder's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = Net(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.predictor(self.encoder(x))


@program("BYOL: a target without predictor follows, in units of other sizes")
def momentum_other_units(run: Run) -> None:
    online = Online()
    target = run.shard(copy.deepcopy(online.encoder).requires_grad_(False), [nn.Linear])
    model = run.shard(online, [Block])
    optimizer, net = sgd(model), run.module(model)
    for x in run.batches():
        with torch.no_grad():
            aim = target(x + 0.1)
        update(run, model, optimizer, (model(x) - aim).square().mean())
        with torch.no_grad():
            for k, q in zip(target.parameters(), net.encoder.parameters(), strict=True):
                k.lerp_(q, 0.1)


@program("an average in copy.deepcopy(list(model.parameters())), as diffusion models keep it")
def deepcopied_parameters(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    average = copy.deepcopy(list(model.parameters()))
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        for a, p in zip(average, model.parameters(), strict=True):
            a.detach().mul_(0.5).add_(p.detach(), alpha=0.5)
    with torch.no_grad():
        for a, p in zip(average, model.parameters(), strict=True):
            p.copy_(a)
