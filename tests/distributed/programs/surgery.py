"""Programs: gradients that are replaced, kept and combined between a backward and the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.programs.models import Block, Net, adamw, mean_square, sgd
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def with_gradients(run: Run, change: Any, keep: bool = False, steps: int = 4) -> None:
    """Trains with gradients that `change(p, step)` has changed; `keep` zeroes them in place."""
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(steps)):
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        for p in model.parameters():
            change(p, step)
        run.record(loss, *(p.grad for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep)


@program("Grokfast: p.grad.data = p.grad.data + a slow average of it")
def grokfast(run: Run) -> None:
    slow: dict[Any, Tensor] = {}

    def change(p: Any, step: int) -> None:
        if p not in slow:
            slow[p] = p.grad.data.detach()
        slow[p] = slow[p] * 0.9 + p.grad.data.detach() * 0.1
        p.grad.data = p.grad.data + slow[p] * 2.0

    with_gradients(run, change)


@program("Grokfast with a window: p.grad.data = p.grad.data + the mean of the last ones")
def grokfast_window(run: Run) -> None:
    last: dict[Any, list[Tensor]] = {}

    def change(p: Any, step: int) -> None:
        window = last.setdefault(p, [])
        window.append(p.grad.data.detach().clone())
        p.grad.data = p.grad.data + sum(window[-2:]) / 2

    with_gradients(run, change)


@program("p.grad.data = t, with zero_grad(set_to_none=False)")
def grad_data_kept(run: Run) -> None:
    def change(p: Any, step: int) -> None:
        p.grad.data = p.grad.data * 1.5

    with_gradients(run, change, keep=True)


@program("p.grad.data = t in the first of two micro-batches, the second one adds to it")
def grad_data_accumulated(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches(4):
        mean_square(model(x)).backward()
        run.average(model)
        for p in model.parameters():
            p.grad.data = p.grad.data * 0.5
        halved = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        mean_square(model(2 * x)).backward()
        run.average(model)
        for p, half in zip(model.parameters(), halved, strict=True):
            p.grad += half
        optimizer.step()
        optimizer.zero_grad()


@program("p.grad.data = a full tensor, the same on all ranks")
def grad_data_full(run: Run) -> None:
    def change(p: Any, step: int) -> None:
        p.grad.data = torch.full(p.shape, 0.01 * (step + 1))

    with_gradients(run, change)


@program("p.grad.set_(t)")
def grad_set(run: Run) -> None:
    def change(p: Any, step: int) -> None:
        with torch.no_grad():
            p.grad.set_(p.grad * 0.5)

    with_gradients(run, change)


@program("p.grad = p.grad.clone(), changed behind that")
def grad_cloned(run: Run) -> None:
    def change(p: Any, step: int) -> None:
        p.grad = p.grad.clone()
        p.grad.mul_(0.5)

    with_gradients(run, change)


@program("p.grad.detach_() before the step, zeroed in place behind it")
def grad_detached(run: Run) -> None:
    with_gradients(run, lambda p, step: p.grad.detach_().mul_(0.5), keep=True)


@program("del p.grad in place of zero_grad")
def grad_deleted(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        mean_square(model(x)).backward()
        run.average(model)
        optimizer.step()
        for p in model.parameters():
            del p.grad


def pcgrad(run: Run, keep: Any) -> None:
    """Two tasks' gradients are kept and combined; what `keep` gives of each is not cloned."""
    model = run.shard(Net(), [Block])
    parameters, optimizer = list(model.parameters()), sgd(model)
    for x in run.batches():
        kept = []
        for sign in (1.0, -1.0):
            optimizer.zero_grad()
            mean_square(model(x) + sign).backward()
            run.average(model)
            kept.append([keep(p.grad) for p in parameters])
        first, second = kept
        dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        square = sum((b * b).sum() for b in second)
        run.record(dot, square)
        for p, a, b in zip(parameters, first, second, strict=True):
            p.grad = (a + b - torch.clamp(dot, max=0.0) / square * b).view_as(p)
        optimizer.step()
        optimizer.zero_grad()


@program("PCGrad over two tasks whose p.grad is kept over zero_grad, not cloned")
def pcgrad_kept(run: Run) -> None:
    pcgrad(run, lambda grad: grad)


@program("the same, p.grad.detach() being kept")
def pcgrad_detached(run: Run) -> None:
    pcgrad(run, lambda grad: grad.detach())


@program("the same, p.grad.data.view(-1) being kept")
def pcgrad_flat(run: Run) -> None:
    pcgrad(run, lambda grad: grad.data.view(-1))


@program("the same, p.grad.clone() being kept")
def pcgrad_cloned(run: Run) -> None:
    pcgrad(run, lambda grad: grad.clone())


@program("gradients of the step before kept, and added as a momentum by hand")
def grad_of_last_step(run: Run) -> None:
    last: dict[Any, Any] = {}

    def change(p: Any, step: int) -> None:
        now = p.grad
        if p in last:
            p.grad = now + 0.5 * last[p]
        last[p] = now

    with_gradients(run, change)


@program("gradients of micro-batches averaged by hand: cloned, zeroed, summed, assigned")
def grad_per_micro_batch(run: Run) -> None:
    model = run.shard(Net(), [Block])
    parameters, optimizer = list(model.parameters()), sgd(model)
    for x in run.batches():
        total: list[Any] = [0.0] * len(parameters)
        for part in x.split(2):
            mean_square(model(part)).backward()
            run.average(model)
            total = [t + p.grad.clone() for t, p in zip(total, parameters, strict=True)]
            optimizer.zero_grad()
        for p, t in zip(parameters, total, strict=True):
            p.grad = t / 2
        optimizer.step()
        optimizer.zero_grad()


@program("noise on gradients, the same on all ranks: p.grad.data.add_(torch.randn_like(p.grad))")
def grad_noise(run: Run) -> None:
    torch.manual_seed(7)
    with_gradients(run, lambda p, step: p.grad.data.add_(torch.randn_like(p.grad), alpha=0.01))


@program("the sign of the gradient assigned: p.grad.data = p.grad.data.sign()")
def grad_data_sign(run: Run) -> None:
    def change(p: Any, step: int) -> None:
        p.grad.data = p.grad.data.sign() * 0.01 + p.grad.data

    with_gradients(run, change)


@program("gradients moved away and back: kept in a list, p.grad = None, assigned before the step")
def grad_put_back(run: Run) -> None:
    model = run.shard(Net(), [Block])
    parameters, optimizer = list(model.parameters()), sgd(model)
    for x in run.batches():
        mean_square(model(x)).backward()
        run.average(model)
        kept = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        for p, g in zip(parameters, kept, strict=True):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()


@program("GradNorm: weights of tasks learned from the norms of their gradients")
def gradnorm(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer, weights = sgd(model), torch.ones(2)
    shared = run.module(model).out.weight
    for x in run.batches():
        norms = []
        for task in range(2):
            mean_square(model(x) + task).mul(weights[task]).backward()
            run.average(model)
            norms.append(shared.grad.norm())
            optimizer.zero_grad()
        run.record(*norms)
        weights = 2 * nn.functional.softmax(-torch.stack([n.detach() for n in norms]), 0)
        output = model(x)
        loss = sum(mean_square(output + task) * weights[task] for task in range(2))
        loss.backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("gradients clipped behind p.grad.data = t, by the global norm")
def grad_data_clipped(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches(4):
        mean_square(model(x)).backward()
        run.average(model)
        for p in model.parameters():
            p.grad.data = p.grad.data * 3.0
        run.record(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()


@program("moments changed right behind step(), through references kept from the first step")
def moments_by_hand(run: Run) -> None:
    model = run.shard(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), [nn.Linear])
    optimizer = adamw(model.parameters())
    kept: list[Any] = []
    for x in run.batches(4, 4, 256):
        mean_square(model(x)).backward()
        run.average(model)
        optimizer.step()
        kept = kept or [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        for moment, p in zip(kept, model.parameters(), strict=True):
            moment.mul_(0.5)
            optimizer.state[p]["exp_avg_sq"].mul_(0.9)
        optimizer.zero_grad()
