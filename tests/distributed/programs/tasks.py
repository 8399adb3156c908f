"""Programs: several losses, augmentations, and schedules of what is trained."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, Net, adamw, mean_square, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Tasks(nn.Module):
    """One body and a head for each task."""

    def __init__(self, tasks: int = 3) -> None:
        super().__init__()
        self.body = Net()
        self.heads = nn.ModuleList(nn.Linear(SIZE, 2) for _ in range(tasks))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.body(x)
        return x, [head(x) for head in self.heads]


def task_losses(run: Run, answers: list[Tensor], step: int) -> Tensor:
    """Of different sizes."""
    losses = [
        (1 + 2 * task) * F.mse_loss(answer, run.tensor(4, 2, key=10 * step + task))
        for task, answer in enumerate(answers)
    ]
    return torch.stack(losses)


class Uncertain(nn.Module):
    """Losses weighed by learned uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(3))

    def forward(self, losses: Tensor) -> Tensor:
        return (losses * (-self.logs).exp() + 0.5 * self.logs).sum()


@program("tasks weighed by learned uncertainties, in a module of their own with another rate")
def uncertain_tasks(run: Run) -> None:
    model, weights = run.shard(Tasks(), [Block]), run.shard(Uncertain())
    groups = [{"params": model.parameters()}, {"params": weights.parameters(), "lr": 0.1}]
    optimizer = adamw(groups, weight_decay=0.0)
    for step in range(3):
        losses = task_losses(run, model(run.tensor(4, SIZE, key=step))[1], step)
        loss = weights(losses)
        loss.backward()
        run.average(model, weights)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss, run.module(weights).logs.detach())


@program("CAGrad: weights of tasks from gradients of the shared features, solved by a few steps")
def conflict_averse(run: Run) -> None:
    model = run.shard(Tasks(), [Block])
    optimizer = sgd(model, lr=0.05)
    for step in range(3):
        features, answers = model(run.tensor(4, SIZE, key=step))
        losses = task_losses(run, answers, step)
        grads = [torch.autograd.grad(x, features, retain_graph=True)[0].flatten() for x in losses]
        table = torch.stack(grads)
        gram = table @ table.t()
        dist.all_reduce(gram)
        gram = gram / run.world_size
        w = torch.zeros(3, requires_grad=True)
        size = 0.5 * gram.mean().clamp(min=1e-8).sqrt()
        for _ in range(3):
            share = w.softmax(0)
            value = (share @ gram).mean() + size * (share @ gram @ share + 1e-6).sqrt()
            w.data -= torch.autograd.grad(value, w)[0]
        share = w.detach().softmax(0)
        scale = size / (share @ gram @ share + 1e-6).sqrt()
        update(run, model, optimizer, losses.mean() + (scale * share * losses).sum())
        run.record(share)


@program(
    "dynamic weights: each task by how fast its mean loss falls, one task left out in turn",
    unused=True,
)
def falling_losses(run: Run) -> None:
    model = run.shard(Tasks(), [Block])
    optimizer = adamw(model.parameters())
    history: list[Tensor] = []
    for step in range(4):
        losses = task_losses(run, model(run.tensor(4, SIZE, key=step))[1], step)
        weights = torch.ones(3)
        if len(history) > 1:
            weights = 3 * (history[-1] / history[-2] / 2.0).softmax(0)
        kept = [task for task in range(3) if (task + step) % 3 != 0]
        update(run, model, optimizer, sum((weights[t] * losses[t] for t in kept), torch.zeros(())))
        mean = losses.detach().clone()
        dist.all_reduce(mean)
        history.append(mean / run.world_size)
        run.record(weights)


@program("mixup and cutmix with draws of one seed, smoothed labels, two targets in one loss")
def mixed_samples(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    draws = torch.Generator().manual_seed(run.seed)
    for step in range(4):
        x, truth = run.tensor(6, SIZE, key=step), run.tokens(SIZE, 6, key=step)
        order, share = torch.randperm(6, generator=draws), torch.rand((), generator=draws)
        if step % 2 == 0:
            x = share * x + (1 - share) * x[order]
        else:
            cut = int(SIZE * share)
            x = torch.cat([x[:, :cut], x[order, cut:]], 1)
            share = torch.tensor(cut / SIZE)
        answer = model(x)
        first = F.cross_entropy(answer, truth, label_smoothing=0.1)
        second = F.cross_entropy(answer, truth[order], label_smoothing=0.1)
        update(run, model, optimizer, share * first + (1 - share) * second)


@program("a growing batch: more and larger micro-batches for each step, the rate grows with them")
def growing_batch(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters(), lr=1e-3)
    for step in range(4):
        parts, size = 1 + step, 2 * (1 + step // 2)
        optimizer.param_groups[0]["lr"] = 1e-3 * (parts * size / 2) ** 0.5
        total = torch.zeros(())
        for part in range(parts):
            last = part == parts - 1
            with nullcontext() if last else run.no_sync(model):
                loss = mean_square(model(run.tensor(size, SIZE, key=10 * step + part)) - 1) / parts
                loss.backward()
            total += loss.detach()
        run.average(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.record(total, norm)


@program("SAM over micro-batches: the step up from the first one's gradient, the others there")
def sharpness_accumulated(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        mean_square(model(run.tensor(4, SIZE, key=10 * step)) - 1).backward()
        run.average(model)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        steps = [0.05 * p.grad / (norm + 1e-8) for p in model.parameters()]
        with torch.no_grad():
            for param, e in zip(model.parameters(), steps, strict=True):
                param.add_(e)
        optimizer.zero_grad()
        for part in range(1, 3):
            with run.no_sync(model) if part == 1 else nullcontext():
                loss = mean_square(model(run.tensor(4, SIZE, key=10 * step + part)) - 1) / 2
                loss.backward()
        run.average(model)
        with torch.no_grad():
            for param, e in zip(model.parameters(), steps, strict=True):
                param.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss, norm)


class Grown(nn.Module):
    """Levels that are switched on one by one, faded in."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(Block() for _ in range(3))
        self.outs = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor, level: int, share: float) -> Tensor:
        for block in self.levels[:level]:
            x = block(x)
        before = self.outs[level - 1](x)
        if share == 0.0 or level == 3:
            return before
        return (1 - share) * before + share * self.outs[level](self.levels[level](x))


@program(
    "progressive growing: levels switched on one by one and faded in, an optimizer for each stage",
    unused=True,
)
def progressive_growing(run: Run) -> None:
    model = run.shard(Grown(), [Block])
    for level in (1, 2, 3):
        module = run.module(model)
        used = [*module.levels[: level + 1].parameters(), *module.outs[: level + 1].parameters()]
        optimizer = torch.optim.Adam(used, lr=5e-3, betas=(0.0, 0.99), eps=1e-5)
        for step in range(2):
            answer = model(run.tensor(4, SIZE, key=10 * level + step), level, step / 2)
            update(run, model, optimizer, mean_square(answer - 1))


class Search(nn.Module):
    """A choice among operations, mixed by a Gumbel softmax of learned weights."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = nn.ModuleList([Block(), nn.Linear(SIZE, SIZE), nn.Identity()])
        self.alpha = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, heat: float) -> Tensor:
        weights = F.gumbel_softmax(self.alpha, heat, hard=True)
        return self.head(sum(w * op(x) for w, op in zip(weights, self.operations, strict=True)))


@program("architecture search: weights and choices in turn, with an optimizer and batches for each")
def architecture_search(run: Run) -> None:
    model = run.shard(Search(), [Block])
    named = list(model.named_parameters())
    weights = torch.optim.SGD([p for n, p in named if "alpha" not in n], lr=0.1, momentum=0.9)
    choices = torch.optim.Adam([p for n, p in named if "alpha" in n], lr=0.1, eps=1e-4)
    for step in range(4):
        for optimizer, key in ((choices, 20 + step), (weights, step)):
            loss = mean_square(model(run.tensor(4, SIZE, key=key), 2.0 * 0.8**step) - 1)
            loss.backward()
            run.average(model)
            optimizer.step()
            model.zero_grad()
            run.record(loss)
    run.record(run.module(model).alpha.detach().softmax(0))


@program("R-Drop: each sample twice in one batch with dropout, a divergence of both answers")
def dropped_twice(run: Run) -> None:
    model = run.shard(nn.Sequential(Net(1), nn.Dropout(0.2), nn.Linear(SIZE, 4)), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        x, truth = run.tensor(4, SIZE, key=step), run.tokens(4, 4, key=step)
        first, second = model(torch.cat([x, x])).log_softmax(-1).chunk(2)
        loss = F.nll_loss(first, truth) + F.nll_loss(second, truth)
        both = F.kl_div(first, second, log_target=True, reduction="batchmean")
        both = both + F.kl_div(second, first, log_target=True, reduction="batchmean")
        update(run, model, optimizer, loss / 2 + both / 4)


@program("virtual adversaries: a direction by the gradient of a divergence, then a loss along it")
def virtual_adversary(run: Run) -> None:
    model = run.shard(Net(1), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        x, truth = run.tensor(4, SIZE, key=step), run.tokens(SIZE, 4, key=step)
        with torch.no_grad():
            share = model(x).softmax(-1)
        direction = F.normalize(torch.randn_like(x), dim=-1)
        for _ in range(2):
            direction.requires_grad_()
            far = F.kl_div(model(x + 0.1 * direction).log_softmax(-1), share, reduction="batchmean")
            far.backward()
            direction = F.normalize(direction.grad, dim=-1)  # type: ignore[arg-type]
            model.zero_grad()
        answers = model(torch.cat([x, x + 0.5 * direction]))
        loss = F.cross_entropy(answers[:4], truth)
        loss = loss + F.kl_div(answers[4:].log_softmax(-1), share, reduction="batchmean")
        update(run, model, optimizer, loss)


@program("hard samples: losses of all ranks gathered, those below the common median left out")
def hard_samples(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        x, truth = run.tensor(6, SIZE, key=step), run.tokens(SIZE, 6, key=step)
        losses = F.cross_entropy(model(x), truth, reduction="none")
        every: list[Any] = [torch.zeros(6) for _ in range(run.world_size)]
        dist.all_gather(every, losses.detach())
        hard = losses >= torch.cat(every).median()
        count = torch.tensor(float(hard.sum()))
        dist.all_reduce(count)
        update(run, model, optimizer, (losses * hard).sum() * run.world_size / count)


@program(
    "layers with rates that fall with depth, thawed from the top, weights decayed to the start",
    unused=True,
)
def discriminative_rates(run: Run) -> None:
    model = run.shard(Net(3), [Block])
    module = run.module(model)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    parts = [module.inp, *module.blocks, nn.ModuleList([module.norm, module.out])]
    rates = [0.1 * 0.7 ** (len(parts) - 1 - depth) for depth in range(len(parts))]
    groups: list[dict[str, Any]] = [
        {"params": list(part.parameters()), "lr": rate}
        for part, rate in zip(parts, rates, strict=True)
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=6)
    for step in range(5):
        for depth, part in enumerate(parts):
            part.requires_grad_(depth >= len(parts) - 1 - step)
        loss = mean_square(model(run.tensor(4, SIZE, key=step)) - 1)
        loss.backward()
        run.average(model)
        with torch.no_grad():
            for name, param in module.named_parameters():
                if param.grad is not None:
                    param.grad.add_(param - start[name], alpha=0.01)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.record(loss)
