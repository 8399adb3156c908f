"""Programs: the optimizers of torch.optim and their switches."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from tests.distributed.programs.models import Block, Net, adamw, mean_square, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def optimized(run: Run, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Trains with one optimizer."""
    model = run.shard(Net(), [Block])
    train(run, model, make(model.parameters()), steps=4)


@program("SGD with Nesterov momentum and weight decay")
def sgd_nesterov(run: Run) -> None:
    optimized(run, lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1))


@program("Adam with amsgrad")
def adam(run: Run) -> None:
    optimized(run, lambda p: optim.Adam(p, 3e-3, eps=1e-5, amsgrad=True))


@program("AdamW")
def adamw_plain(run: Run) -> None:
    optimized(run, lambda p: optim.AdamW(p, 3e-3, eps=1e-5))


@program("AdamW with foreach=True")
def adamw_foreach(run: Run) -> None:
    optimized(run, lambda p: optim.AdamW(p, 3e-3, eps=1e-5, foreach=True))


@program("AdamW with foreach=False, parameter by parameter")
def adamw_loop(run: Run) -> None:
    optimized(run, lambda p: optim.AdamW(p, 3e-3, eps=1e-5, foreach=False))


@program("AdamW with fused=True")
def adamw_fused(run: Run) -> None:
    optimized(run, lambda p: optim.AdamW(p, 3e-3, eps=1e-5, fused=True))


@program("SGD with maximize=True")
def sgd_maximize(run: Run) -> None:
    optimized(run, lambda p: optim.SGD(p, 0.01, maximize=True))


@program("Adagrad")
def adagrad(run: Run) -> None:
    optimized(run, lambda p: optim.Adagrad(p, 0.01, eps=1e-5))


@program("Adadelta")
def adadelta(run: Run) -> None:
    optimized(run, lambda p: optim.Adadelta(p, 0.5, eps=1e-4))


@program("Adamax")
def adamax(run: Run) -> None:
    optimized(run, lambda p: optim.Adamax(p, 3e-3, eps=1e-5))


@program("NAdam")
def nadam(run: Run) -> None:
    optimized(run, lambda p: optim.NAdam(p, 3e-3, eps=1e-5))


@program("RAdam")
def radam(run: Run) -> None:
    optimized(run, lambda p: optim.RAdam(p, 3e-3, eps=1e-5))


@program("RMSprop, centered, with momentum")
def rmsprop(run: Run) -> None:
    optimized(run, lambda p: optim.RMSprop(p, 1e-3, eps=1e-4, momentum=0.5, centered=True))


@program("ASGD")
def asgd(run: Run) -> None:
    optimized(run, lambda p: optim.ASGD(p, 0.05))


@program("Rprop")
def rprop(run: Run) -> None:
    optimized(run, lambda p: optim.Rprop(p, 0.01))


@program("Adafactor, which keeps rows and columns of matrices")
def adafactor(run: Run) -> None:
    optimized(run, lambda p: optim.Adafactor(p, 0.01))


@program("LBFGS with a closure")
def lbfgs(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x = run.tensor(4, 8, shared=True)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        run.record(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)


@program("SGD with a closure")
def sgd_closure(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for x in run.batches():

        def closure(x: Any = x) -> Any:
            optimizer.zero_grad()
            loss = mean_square(model(x))
            loss.backward()
            run.average(model)
            return loss

        run.record(optimizer.step(closure))


@program("Muon for the matrices of the blocks, AdamW for the rest")
def muon(run: Run) -> None:
    model = run.shard(Net(), [Block])
    named = list(model.named_parameters())
    matrices = [p for n, p in named if "blocks" in n and n.endswith("weight")]
    rest = [p for n, p in named if not ("blocks" in n and n.endswith("weight"))]
    first, second = optim.Muon(matrices, lr=0.01), adamw(rest)
    for x in run.batches():
        mean_square(model(x)).backward()
        run.average(model)
        first.step()
        second.step()
        model.zero_grad()


@program("Muon as the system has it, AdamW for the rest, under a schedule")
def muon_of_system(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizers = run.muon(model, lr=0.02)
    schedules = [optim.lr_scheduler.CosineAnnealingLR(each, 4) for each in optimizers]
    for x in run.batches(4):
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
        run.record(loss)


@program("the same with micro-batches, and the optimizers' state_dict loaded in between")
def muon_accumulates(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizers = run.muon(model, lr=0.02)
    for step in range(3):
        first, second = run.batches(2, 3 + step, 8)
        with run.no_sync(model):
            (mean_square(model(first)) / 2).backward()
        (mean_square(model(second)) / 2).backward()
        run.average(model)
        for each in optimizers:
            each.step()
        model.zero_grad()
        if step == 1:
            saved = [copy.deepcopy(each.state_dict()) for each in optimizers]
            optimizers = run.muon(model, lr=0.5)
            for each, state in zip(optimizers, saved, strict=True):
                each.load_state_dict(state)


@program("SparseAdam and an embedding with sparse=True")
def sparse_embedding(run: Run) -> None:
    model = run.shard(nn.Sequential(nn.Embedding(11, 8, sparse=True)))
    optimizer = optim.SparseAdam(list(model.parameters()), lr=0.1, eps=1e-5)
    for step in range(2):
        loss = mean_square(model(run.tokens(11, 4, key=step)))
        loss.backward()
        for p in model.parameters():
            if p.grad is not None and p.grad.is_sparse and run.module(model) is model:
                p.grad = p.grad.to_dense()
        run.average(model)
        for p in model.parameters():
            p.grad = p.grad.to_sparse(1) if not p.grad.is_sparse else p.grad
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("an optimizer's state_dict saved and loaded into a new one, on each rank")
def optimizer_round_trip(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    train(run, model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(torch.load(file, weights_only=False))
    train(run, model, optimizer)


@program("the same, with torch.load's default (weights_only)")
def optimizer_round_trip_safe(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    train(run, model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(torch.load(file))
    train(run, model, optimizer)


@program("the optimizer state of rank 0 saved, and loaded by all ranks")
def optimizer_state_of_rank_0(run: Run) -> None:
    import torch.distributed as dist

    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    train(run, model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    saved = [file.getvalue()]
    dist.broadcast_object_list(saved)  # rank 0's
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(torch.load(io.BytesIO(saved[0]), weights_only=False))
    train(run, model, optimizer)


@program("the learning rate changed by hand, and momentum reset")
def groups_by_hand(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(run, model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    optimizer.state.clear()
    train(run, model, optimizer)


@program("an optimizer built before sharding")
def optimizer_before(run: Run) -> None:
    net = Net()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    train(run, run.shard(net, [Block]), optimizer)


@program("optimizer.step() inside of the full parameters' context")
def step_unsharded(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        with run.unsharded(model):
            optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("two optimizers over two parts of the model")
def two_optimizers(run: Run) -> None:
    model = run.shard(Net(), [Block])
    blocks = set(run.module(model).blocks.parameters())
    first = optim.SGD([p for p in model.parameters() if p in blocks], lr=0.1)
    second = adamw([p for p in model.parameters() if p not in blocks])
    for x in run.batches():
        update(run, model, first, mean_square(model(x)))
        mean_square(model(x)).backward()
        run.average(model)
        second.step()
        second.zero_grad()
        first.zero_grad()


@program("a whole step inside of the full parameters' context, twice")
def train_unsharded(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with run.unsharded(model):
        for x in run.batches(2):
            update(run, model, optimizer, mean_square(model(x)))
    train(run, model, optimizer, steps=1)
