"""Programs: models that learn from models, and from their own guesses."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, Net, adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def divergence(student: Tensor, teacher: Tensor, heat: float = 2.0) -> Tensor:
    """How far the student's softened answers are from the teacher's."""
    log_p, q = (student / heat).log_softmax(-1), (teacher / heat).softmax(-1)
    return F.kl_div(log_p, q, reduction="batchmean") * heat**2


@program("deep mutual learning: two models, each also learns from the other's detached answers")
def mutual_learning(run: Run) -> None:
    models = [run.shard(Net(depth), [Block]) for depth in (1, 2)]
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True) for m in models
    ]
    schedules = [torch.optim.lr_scheduler.MultiStepLR(o, [2]) for o in optimizers]
    for step in range(3):
        x, truth = run.tensor(6, SIZE, key=step), run.tokens(SIZE, 6, key=step)
        answers = [model(x) for model in models]
        losses = [
            F.cross_entropy(own, truth) + divergence(own, other.detach(), 1.0)
            for own, other in zip(answers, answers[::-1], strict=True)
        ]
        for model, optimizer, schedule, loss in zip(
            models, optimizers, schedules, losses, strict=True
        ):
            update(run, model, optimizer, loss)
            schedule.step()


class Exits(Net):
    """Answers behind each block, with the features before them."""

    def __init__(self) -> None:
        super().__init__(3)
        self.exits = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:  # type: ignore[override]
        x, answers, features = self.inp(x), [], []
        for block, head in zip(self.blocks, [*self.exits, self.out], strict=True):
            x = block(x)
            features.append(x)
            answers.append(head(self.norm(x)))
        return answers, features


@program("self-distillation: earlier exits learn from the last one's answers and features")
def own_teacher(run: Run) -> None:
    model = run.shard(Exits(), [Block])
    optimizer = adamw(model.parameters())
    right = torch.zeros(3)
    for step in range(3):
        truth = run.tokens(SIZE, 6, key=step)
        answers, features = model(run.tensor(6, SIZE, key=step))
        loss = F.cross_entropy(answers[-1], truth)
        for answer, feature in zip(answers[:-1], features[:-1], strict=True):
            loss = loss + 0.7 * F.cross_entropy(answer, truth)
            loss = loss + 0.3 * divergence(answer, answers[-1].detach(), 3.0)
            loss = loss + 0.03 * F.mse_loss(feature, features[-1].detach())
        update(run, model, optimizer, loss)
        right += torch.stack([(a.argmax(-1) == truth).float().sum() for a in answers])
    dist.all_reduce(right)
    run.record(right)


class Connectors(nn.Module):
    """A layer for each pair of features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))

    def forward(self, own: list[Tensor], others: list[Tensor]) -> Tensor:
        loss = torch.zeros(())
        for layer, mine, other in zip(self.layers, own, others, strict=True):
            aim = F.normalize(other.square(), dim=-1)
            loss = loss + (F.normalize(layer(mine).square(), dim=-1) - aim).square().mean()
        return loss


@program("attention transfer: blocks of a deeper frozen teacher by hooks, connectors of their own")
def attention_transfer(run: Run) -> None:
    teacher = run.shard(Net(4).requires_grad_(False).eval(), [Block])
    student, connectors = run.shard(Net(2), [Block]), run.shard(Connectors())
    own: list[Tensor] = []
    others: list[Tensor] = []
    for block in run.module(student).blocks:
        block.register_forward_hook(lambda module, args, output: own.append(output))
    for block in run.module(teacher).blocks[1::2]:
        block.register_forward_hook(lambda module, args, output: others.append(output))
    optimizer = adamw([*student.parameters(), *connectors.parameters()])
    for step in range(3):
        x, truth = run.tensor(6, SIZE, key=step), run.tokens(SIZE, 6, key=step)
        own.clear()
        others.clear()
        with torch.no_grad():
            soft = teacher(x)
        answer = student(x)
        loss = F.cross_entropy(answer, truth) + divergence(answer, soft, 4.0)
        loss = loss + connectors(own, others)
        loss.backward()
        run.average(student, connectors)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program(
    "FixMatch: confident guesses on weak views teach strong views, an average of weights guesses"
)
def fix_match(run: Run) -> None:
    net = Net()
    guesser = run.shard(copy.deepcopy(net).requires_grad_(False).eval(), [Block])
    model = run.shard(net, [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.9**s)
    for step in range(4):
        known, unknown = run.tensor(4, SIZE, key=step), run.tensor(8, SIZE, key=10 + step)
        with torch.no_grad():
            sure, guess = guesser(unknown + 0.1 * torch.randn(8, SIZE)).softmax(-1).max(-1)
        mask = (sure > 0.2).float()
        strong = unknown + 0.5 * torch.randn(8, SIZE)
        answers = model(torch.cat([known, strong]))
        loss = F.cross_entropy(answers[:4], run.tokens(SIZE, 4, key=step))
        loss = loss + (F.cross_entropy(answers[4:], guess, reduction="none") * mask).mean()
        update(run, model, optimizer, loss)
        schedule.step()
        run.record(mask.mean())
        with torch.no_grad():
            for kept, param in zip(guesser.parameters(), model.parameters(), strict=True):
                kept.data.mul_(0.9).add_(param.data, alpha=0.1)


@program("co-teaching: two models, each picks the samples of small loss that the other learns from")
def co_teaching(run: Run) -> None:
    models = [run.shard(Net(1), [Block]) for _ in range(2)]
    optimizers = [adamw(model.parameters()) for model in models]
    for step in range(3):
        x, truth = run.tensor(8, SIZE, key=step), run.tokens(SIZE, 8, key=step)
        losses = [F.cross_entropy(model(x), truth, reduction="none") for model in models]
        kept = 8 - 2 * step
        picks = [loss.detach().argsort()[:kept] for loss in losses]
        for model, optimizer, loss, pick in zip(
            models, optimizers, losses, picks[::-1], strict=True
        ):
            update(run, model, optimizer, loss[pick].mean())
        run.record(len(set(picks[0].tolist()) & set(picks[1].tolist())))
