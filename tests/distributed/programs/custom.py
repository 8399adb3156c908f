"""Programs: optimizers and gradient surgery written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.distributed.programs.models import Block, Net, mean_square, sgd, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Lion(Optimizer):
    """Sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float = 0.003) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(m.lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                m.lerp_(p.grad, 0.01)


class Lamb(Optimizer):
    """A step scaled by the norms of the parameter and of its update."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad)
                trust = p.norm() / (m.norm() + 1e-6)
                p.add_(m * trust, alpha=-group["lr"])


class ScheduleFree(Optimizer):
    """SGD with momentum as people write it, with buffers from torch.clone."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if "buf" not in self.state[p]:
                    self.state[p]["buf"] = torch.clone(p.grad).detach()
                else:
                    self.state[p]["buf"].mul_(0.9).add_(p.grad)
                p.data.add_(self.state[p]["buf"], alpha=-group["lr"])


@program("Lion, a custom optimizer")
def lion(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model, Lion(model.parameters()))


@program("LAMB: trust ratios from p.norm() and the norm of a momentum buffer")
def lamb(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model, Lamb(model.parameters()))


@program("a custom optimizer that updates p.data")
def custom_data(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model, ScheduleFree(model.parameters()))


@program("SGD by hand under no_grad: p -= lr * p.grad")
def manual_sgd(run: Run) -> None:
    model = run.shard(Net(), [Block])
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()
        run.record(loss)


@program("SGD by hand: p.data -= lr * p.grad.data")
def manual_sgd_data(run: Run) -> None:
    model = run.shard(Net(), [Block])
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        for p in model.parameters():
            p.data -= 0.1 * p.grad.data
        model.zero_grad()
        run.record(loss)


@program("SGD by hand: p.data = p.data - lr * p.grad")
def manual_sgd_assign(run: Run) -> None:
    model = run.shard(Net(), [Block])
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        for p in model.parameters():
            p.data = p.data - 0.1 * p.grad.data
        model.zero_grad()
        run.record(loss)


@program("SGD by hand with p.copy_ and torch._foreach_add_")
def manual_sgd_foreach(run: Run) -> None:
    model = run.shard(Net(), [Block])
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        with torch.no_grad():
            parameters = list(model.parameters())
            torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.1)
            for p in parameters:
                p.copy_(p * 0.99)
        model.zero_grad()
        run.record(loss)


def with_gradients(run: Run, change: Any) -> None:
    """Trains with gradients that are changed before the step."""
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        for p in model.parameters():
            change(p)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("p.grad.mul_")
def grad_scaled(run: Run) -> None:
    with_gradients(run, lambda p: p.grad.mul_(0.5))


@program("p.grad = p.grad * 0.5 + p.detach() * 0.1")
def grad_assigned(run: Run) -> None:
    def change(p: Any) -> None:
        p.grad = p.grad * 0.5 + p.detach() * 0.1

    with_gradients(run, change)


@program("the sign of the gradient: p.grad.sign_()")
def grad_sign(run: Run) -> None:
    with_gradients(run, lambda p: p.grad.add_(0.01 * p.grad.sign()))


@program("NaN in gradients replaced: p.grad.nan_to_num_()")
def grad_nan_to_num(run: Run) -> None:
    with_gradients(run, lambda p: torch.nan_to_num(p.grad, out=p.grad))


@program("each gradient divided by its norm")
def grad_normalised(run: Run) -> None:
    with_gradients(run, lambda p: p.grad.div_(p.grad.norm() + 1e-3))


@program("gradient centralization: minus the mean of each row")
def grad_centralised(run: Run) -> None:
    def change(p: Any) -> None:
        if p.grad.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))

    with_gradients(run, change)


@program("adaptive gradient clipping by rows (AGC)")
def grad_agc(run: Run) -> None:
    def change(p: Any) -> None:
        if p.dim() > 1:
            limit = 0.01 * p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3)
            norm = p.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)
            p.grad.mul_((limit / norm).clamp(max=1.0))

    with_gradients(run, change)


@program("rows of a gradient set to zero: p.grad[0] = 0")
def grad_row_zeroed(run: Run) -> None:
    def change(p: Any) -> None:
        p.grad[0] = 0

    with_gradients(run, change)


@program("the k largest elements of a gradient kept (topk)")
def grad_topk(run: Run) -> None:
    def change(p: Any) -> None:
        threshold = p.grad.abs().flatten().topk(3)[0][-1]
        p.grad.mul_((p.grad.abs() >= threshold).float())

    with_gradients(run, change)


@program("gradients accumulated by hand in buffers of one's own")
def grad_buffers(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    buffers = [torch.zeros_like(p) for p in model.parameters()]
    for x in run.batches():
        mean_square(model(x)).backward()
        run.average(model)
        for buffer, p in zip(buffers, model.parameters(), strict=True):
            buffer += p.grad
            p.grad.copy_(buffer)
        optimizer.step()
        optimizer.zero_grad()


@program("SAM: a step up along the gradient, a second pass, and back")
def sam(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        mean_square(model(x)).backward()
        run.average(model)
        moved = {}
        with torch.no_grad():
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            for p in model.parameters():
                moved[p] = p.grad * (0.05 / (norm + 1e-6))
                p.add_(moved[p])
        optimizer.zero_grad()
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        with torch.no_grad():
            for p, step in moved.items():
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("Lookahead: slow weights pulled to every second step")
def lookahead(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    slow = [p.detach().clone() for p in model.parameters()]
    for step, x in enumerate(run.batches(4)):
        update(run, model, optimizer, mean_square(model(x)))
        if step % 2:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    s += 0.5 * (p - s)
                    p.copy_(s)


@program("weights clipped after each step: p.data.clamp_")
def weight_clipping(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)


@program("each weight divided by its norm after the step")
def weight_renormalised(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        with torch.no_grad():
            for p in model.parameters():
                p.div_(p.norm().clamp(min=1.0))


@program("rows of a weight normalised: F.normalize(w, dim=1)")
def weight_rows_normalised(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        with torch.no_grad():
            w = run.module(model).out.weight
            w.copy_(nn.functional.normalize(w, dim=1))


@program("small weights pruned by a threshold, masks applied after each step")
def weight_masks(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    masks = [(p.detach().abs() > 0.1).float() for p in model.parameters()]
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        with torch.no_grad():
            for mask, p in zip(masks, model.parameters(), strict=True):
                p.mul_(mask)


@program("weights below the median pruned: a quantile of each parameter")
def weight_quantile(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_((p.abs() > p.abs().flatten().quantile(0.5)).float())
    train(run, model)
