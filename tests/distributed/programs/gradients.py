"""Programs: gradients that are filtered, projected, mixed and moved by hand before the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.distributed.programs.models import SIZE, Block, Net, adamw, mean_square, sgd
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

Filter = Callable[[Any], None]


def filtered(run: Run, change: Filter, steps: int = 4) -> None:
    """Trains with gradients of the whole model that are changed before the step."""
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters(), weight_decay=0.1)
    for x in run.batches(steps):
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        change(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


def tasks(run: Run) -> tuple[Any, Optimizer]:
    """A model of two heads, trained by SGD."""
    model = run.shard(TwoHeads(), [Block])
    return model, sgd(model)


class TwoHeads(Net):
    """A shared body, a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(SIZE, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        features = super().forward(x)
        return [head(features) for head in self.heads]


@program("p.grad.data written in place: mul_, add_ and copy_")
def grad_data_in_place(run: Run) -> None:
    def change(model: Any) -> None:
        for p in model.parameters():
            p.grad.data.mul_(0.5).add_(p.data, alpha=0.01)
            p.grad.data.copy_(p.grad.data * 2)

    filtered(run, change)


@program("the sign of gradients, assigned: p.grad = p.grad.sign()")
def grad_sign_assigned(run: Run) -> None:
    def change(model: Any) -> None:
        for p in model.parameters():
            p.grad = (p.grad + 1e-3).sign()

    filtered(run, change)


@program("gradients centralised over the whole matrix: p.grad.sub_(p.grad.mean())")
def grad_centralised_whole(run: Run) -> None:
    def change(model: Any) -> None:
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean())

    filtered(run, change)


@program("the part of each gradient along its weight taken out, its norm kept")
def grad_orthogonal(run: Run) -> None:
    def change(model: Any) -> None:
        for p in model.parameters():
            w, g = p.data.view(-1), p.grad.data.view(-1)
            rest = g - torch.dot(w, g) / (torch.dot(w, w) + 1e-6) * w
            rest = rest * (g.norm() / (rest.norm() + 1e-6))
            p.grad.copy_(rest.view_as(p.grad))

    filtered(run, change)


@program("clipping by hand: the total of p.grad.data.norm(), p.grad.data.mul_(...)")
def clip_by_hand(run: Run) -> None:
    def change(model: Any) -> None:
        norms = [p.grad.data.norm(2) for p in model.parameters()]
        total = torch.stack(norms).norm(2)
        run.record(total)
        for p in model.parameters():
            p.grad.data.mul_((0.05 / (total + 1e-6)).clamp(max=1.0))

    filtered(run, change)


@program("clipping by a history of norms (ZClip)")
def clip_by_history(run: Run) -> None:
    norms: list[float] = []

    def change(model: Any) -> None:
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        norms.append(min(total.item(), 0.8 * (norms[-1] if norms else 1.0)))
        nn.utils.clip_grads_with_norm_(model.parameters(), norms[-1], total)

    filtered(run, change)


@program("gradients of a random half set to zero, with masks of one seed")
def grad_dropout(run: Run) -> None:
    def change(model: Any) -> None:
        for p in model.parameters():
            p.grad.mul_(torch.bernoulli(torch.full_like(p.grad, 0.5)))

    filtered(run, change)


@program("variance reduction: the difference to the gradient before (MARS)")
def grad_difference(run: Run) -> None:
    before: dict[Any, Tensor] = {}

    def change(model: Any) -> None:
        for p in model.parameters():
            now = p.grad.detach().clone()
            p.grad.add_(now - before.get(p, now), alpha=0.5)
            before[p] = now

    filtered(run, change)


@program("PCGrad: the gradients of two tasks, each projected on what the other one allows")
def pcgrad(run: Run) -> None:
    model, optimizer = tasks(run)
    for x in run.batches():
        outputs = model(x)
        found = []
        for index in range(2):
            optimizer.zero_grad()
            (outputs[index] - index).square().mean().backward(retain_graph=index == 0)
            run.average(model)
            grads = [p.grad if p.grad is not None else 0 * p for p in model.parameters()]
            found.append([g.detach().clone() for g in grads])
        first, second = found
        product = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        square = sum((b * b).sum() for b in second)
        scale = (product / square).clamp(max=0.0)
        run.record(product)
        for p, a, b in zip(model.parameters(), first, second, strict=True):
            p.grad = a - scale * b + b
        optimizer.step()
        optimizer.zero_grad()


@program("MGDA: the shortest mixture of the gradients of two batches")
def mgda(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        found = []
        for goal in (0.0, 1.0):
            optimizer.zero_grad()
            (model(x) - goal).square().mean().backward()
            run.average(model)
            found.append([p.grad.clone() for p in model.parameters()])
        first, second = found
        apart = sum((b - a).square().sum() for a, b in zip(first, second, strict=True))
        along = sum(((b - a) * b).sum() for a, b in zip(first, second, strict=True))
        share = (along / apart).clamp(0, 1)
        run.record(share)
        for p, a, b in zip(model.parameters(), first, second, strict=True):
            p.grad.copy_(share * a + (1 - share) * b)
        optimizer.step()
        optimizer.zero_grad()


class Sam(Optimizer):
    """Two steps around another optimizer, with the old weights in the state."""

    def __init__(self, params: Any, adaptive: bool) -> None:
        super().__init__(params, {"rho": 0.05, "adaptive": adaptive})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def ascend(self) -> None:
        each = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norms = [((p.abs() if g["adaptive"] else 1.0) * p.grad).norm(p=2) for g, p in each]
        scale = 0.05 / (torch.norm(torch.stack(norms), p=2) + 1e-6)
        for group, p in each:
            self.state[p]["old_p"] = p.data.clone()
            p.add_((torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base.step()
        self.zero_grad()


def sam_steps(run: Run, adaptive: bool) -> None:
    model = run.shard(Net(), [Block])
    optimizer = Sam(model.parameters(), adaptive)
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        optimizer.ascend()
        mean_square(model(x)).backward()
        run.average(model)
        optimizer.descend()
        run.record(loss)


@program("SAM as an optimizer around SGD: p.data = state['old_p'] after the second backward")
def sam_optimizer(run: Run) -> None:
    sam_steps(run, False)


@program("the same, adaptive: steps scaled by the weights")
def sam_adaptive(run: Run) -> None:
    sam_steps(run, True)


@program("accumulation where the gradients of each micro-batch are clipped by themselves")
def clip_each_micro_batch(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step in range(3):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for part in range(2):
            mean_square(model(run.tensor(4, 8, key=2 * step + part))).backward()
            run.average(model)
            run.record(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad
            model.zero_grad()
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total
        optimizer.step()
        model.zero_grad()


@program("a gradient that exploded is replaced by zeros: p.grad = torch.zeros_like(p)")
def grad_replaced_by_zeros(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters(), weight_decay=0.1)
    for step, x in enumerate(run.batches(4)):
        loss = mean_square(model(x)) * (1e4 if step == 1 else 1.0)
        loss.backward()
        run.average(model)
        for p in model.parameters():
            if p.grad.norm() > 100:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)
