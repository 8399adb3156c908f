"""Programs: the loop itself, accumulation, schedules, clipping, scaling."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tests.distributed.programs.models import (
    Block,
    Net,
    SometimesTwo,
    Words,
    adamw,
    mean_square,
    sgd,
    train,
    train_words,
    update,
)
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


@program("three steps of SGD")
def plain_loop(run: Run) -> None:
    train(run, run.shard(Net(), [Block]))


@program("a language model, three steps")
def language_model(run: Run) -> None:
    train_words(run, run.shard(Words(), [Block]))


@program("gradients of three micro-batches, communicated each time")
def accumulation(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step in range(2):
        for micro in range(3):
            loss = mean_square(model(run.tensor(4, 8, key=step * 3 + micro))) / 3
            loss.backward()
            run.record(loss)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("gradients of three micro-batches, two of them under no_sync")
def accumulation_no_sync(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step in range(2):
        for micro in range(2):
            with run.no_sync(model):
                mean_square(model(run.tensor(4, 8, key=step * 3 + micro))).backward()
        mean_square(model(run.tensor(4, 8, key=step * 3 + 2))).backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("micro-batches under no_sync, a layer that one rank uses in the first alone", unused=True)
def no_sync_some_ranks(run: Run) -> None:
    model = run.shard(SometimesTwo(), [Block])
    optimizer = sgd(model)
    for step in range(3):
        for micro in range(3):
            both = step > 0 and micro == 0 and run.rank == 1
            x = run.tensor(4, 8, key=step * 3 + micro)
            with run.no_sync(model) if micro < 2 else nullcontext():
                loss = mean_square(model(x, both))
                loss.backward()
            run.record(loss)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("an L2 penalty in the loss behind a micro-batch under no_sync")
def penalty_after_no_sync(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step in range(2):
        with run.no_sync(model):
            mean_square(model(run.tensor(4, 8, key=2 * step))).backward()
        loss = mean_square(model(run.tensor(4, 8, key=2 * step + 1)))
        loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("a forward under no_sync, its backward outside")
def no_sync_forward_only(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        with run.no_sync(model):
            loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("clip_grad_norm_ of all gradients, the norm logged")
def clip_norm(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        mean_square(model(x)).backward()
        run.average(model)
        run.record(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()


@program("clip_grad_norm_ with the norm inf and with 1")
def clip_other_norms(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x, p in zip(run.batches(2), (float("inf"), 1.0), strict=True):
        mean_square(model(x)).backward()
        run.average(model)
        run.record(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=p))
        optimizer.step()
        optimizer.zero_grad()


@program("clip_grad_norm_ of one block's gradients at a time")
def clip_per_block(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        mean_square(model(x)).backward()
        run.average(model)
        for block in run.module(model).blocks:
            run.record(nn.utils.clip_grad_norm_(block.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()


@program("clip_grad_value_")
def clip_value(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        mean_square(model(x)).backward()
        run.average(model)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


def scheduled(run: Run, make: Any, metric: bool = False) -> None:
    """Trains with a scheduler that steps with each batch."""
    model = run.shard(Net(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    for x in run.batches(4):
        update(run, model, optimizer, mean_square(model(x)))
        scheduler.step(1.0) if metric else scheduler.step()
        run.record(*(group["lr"] for group in optimizer.param_groups))


@program("OneCycleLR, which also moves the momentum")
def schedule_one_cycle(run: Run) -> None:
    scheduled(run, lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=6))


@program("CosineAnnealingLR")
def schedule_cosine(run: Run) -> None:
    scheduled(run, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4))


@program("ReduceLROnPlateau")
def schedule_plateau(run: Run) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    scheduled(run, lambda o: plateau(o, factor=0.5, patience=0), metric=True)


@program("warm-up and decay with SequentialLR")
def schedule_sequential(run: Run) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [2])

    scheduled(run, make)


@program("GradScaler: scale, unscale_, clip, step, update")
def grad_scaler(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for x in run.batches():
        scaler.scale(mean_square(model(x))).backward()
        run.average(model)
        scaler.unscale_(optimizer)
        run.record(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.record(scaler.get_scale())


@program("GradScaler.unscale_ before an AdamW whose eps shows a scale that is left")
def grad_scaler_adamw(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x in run.batches():
        scaler.scale(mean_square(model(x))).backward()
        run.average(model)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@program("GradScaler over two micro-batches, clip_grad_value_, weights decayed by hand after AdamW")
def grad_scaler_values(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=0.1, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x in run.batches():
        for part in (x, x.flip(0) + 1.0):
            scaler.scale(mean_square(model(part)) / 2).backward()
        run.average(model)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
            run.record(mean_square(model(x)))


@program("GradScaler where one rank's loss is infinite once")
def grad_scaler_overflow(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, x in enumerate(run.batches()):
        bad = float("inf") if step == 1 and run.rank == 0 else 1.0
        scaler.scale(mean_square(model(x)) * bad).backward()
        run.average(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.record(scaler.get_scale())


@program("one rank's loss is NaN once; the step is skipped if a gradient is not finite")
def skip_nonfinite(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches()):
        bad = float("nan") if step == 1 and run.rank == 1 else 1.0
        (mean_square(model(x)) * bad).backward()
        run.average(model)
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()


@program("torch.isnan(p.grad).any() of each parameter")
def nan_check(run: Run) -> None:
    model = run.shard(Net(), [Block])
    mean_square(model(run.tensor(4, 8))).backward()
    run.average(model)
    for p in model.parameters():
        run.record(bool(torch.isnan(p.grad).any()))


@program("zero_grad(set_to_none=False)")
def zero_grad_keeps(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    for x in run.batches():
        optimizer.zero_grad(set_to_none=False)
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        optimizer.step()
        run.record(loss)


@program("p.grad = None by hand in place of zero_grad")
def grad_none_by_hand(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    for x in run.batches():
        for p in model.parameters():
            p.grad = None
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        optimizer.step()
        run.record(loss)


@program("autocast to bfloat16")
def autocast(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mean_square(model(x).float())
        loss.backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)
