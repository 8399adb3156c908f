"""Programs: models that learn from models, from their own guesses, and how to learn."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, Net, adamw, mean_square, sgd, update
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


def task(run: Run, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Few samples to learn from, and others that judge; this rank's task."""
    x, turn = run.tensor(10, SIZE, key=step), run.tensor(SIZE, SIZE, key=20 + step)
    y = torch.tanh(x @ turn / 3)
    return x[:6], y[:6], x[6:], y[6:]


class Maml(nn.Module):
    """Steps along gradients within the forward, and the loss behind them."""

    def __init__(self, net: nn.Module, second_order: bool) -> None:
        super().__init__()
        self.net, self.second_order = net, second_order

    def forward(self, x: Tensor, y: Tensor, new_x: Tensor, new_y: Tensor) -> Tensor:
        fast: dict[str, Tensor] = dict(self.net.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(self.net, fast, (x,)), y)
            slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=self.second_order)
            fast = {n: p - 0.1 * s for (n, p), s in zip(fast.items(), slopes, strict=True)}
        return F.mse_loss(functional_call(self.net, fast, (new_x,)), new_y)


@program("MAML: inner steps by functional_call within the forward, second derivatives")
def maml(run: Run) -> None:
    model = run.shard(Maml(Net(1), second_order=True))
    optimizer = adamw(model.parameters())
    for step in range(3):
        update(run, model, optimizer, model(*task(run, step)))


@program("the same of first order, blocks as units")
def maml_first_order(run: Run) -> None:
    model = run.shard(Maml(Net(1), second_order=False), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        update(run, model, optimizer, model(*task(run, step)))


@program("Reptile: a task's steps from the weights and back, towards the mean of all ranks' ends")
def reptile(run: Run) -> None:
    model = run.shard(Net(1), [Block])
    for step in range(3):
        x, y, new_x, new_y = task(run, step)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        inner = sgd(model)
        for _ in range(3):
            update(run, model, inner, F.mse_loss(model(x), y))
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(start[name] + 0.5 * (param - start[name]))
            run.record(F.mse_loss(model(new_x), new_y))


@program(
    "prototypes: means of each class's features, the ways of an episode differ by rank and step"
)
def prototypes(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(3):
        ways = 2 + (run.rank + step) % 3
        features = model(run.tensor(ways * 5, SIZE, key=step)).unflatten(0, (ways, 5))
        centres, queries = features[:, :3].mean(1), features[:, 3:].flatten(0, 1)
        scores = -torch.cdist(queries, centres).square()
        truth = torch.arange(ways).repeat_interleave(2)
        update(run, model, optimizer, F.cross_entropy(scores, truth))
        schedule.step()


class Reweighted(nn.Module):
    """Weights of samples from how a step on them would change a clean batch's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(1)

    def forward(self, x: Tensor, y: Tensor, clean_x: Tensor, clean_y: Tensor) -> Tensor:
        weights = torch.zeros(len(x), requires_grad=True)
        params = dict(self.net.named_parameters())
        losses = (self.net(x) - y).square().mean(1)
        slopes = torch.autograd.grad(
            (weights * losses).sum(), list(params.values()), create_graph=True
        )
        fast = {n: p - 0.1 * s for (n, p), s in zip(params.items(), slopes, strict=True)}
        clean = F.mse_loss(functional_call(self.net, fast, (clean_x,)), clean_y)
        useful = F.relu(-torch.autograd.grad(clean, weights)[0])
        useful = useful / useful.sum().clamp(min=1e-6)
        return (useful * (self.net(x) - y).square().mean(1)).sum()


@program("learning to reweight: weights of samples by a virtual step, then the true one")
def reweighted(run: Run) -> None:
    model = run.shard(Reweighted(), [Block])
    optimizer = sgd(model)
    for step in range(3):
        update(run, model, optimizer, model(*task(run, step)))


@program(
    "test-time adaptation: norms alone learn from entropy, weights and optimizer reset after it",
    unused=True,
)
def adapted_at_test(run: Run) -> None:
    model = run.shard(Normed(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(2):
        update(run, model, optimizer, mean_square(model(run.tensor(4, SIZE, key=step)) - 1))
    model.requires_grad_(False)
    tuned = []
    for module in run.module(model).modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
            tuned += list(module.parameters())
    adapter = torch.optim.SGD(tuned, lr=0.5, momentum=0.9)
    kept = copy.deepcopy(run.module(model).state_dict())
    kept_steps = copy.deepcopy(adapter.state_dict())
    for episode in range(2):
        for step in range(2):
            share = model(run.tensor(4, SIZE, key=10 + 2 * episode + step)).softmax(-1)
            loss = -(share * share.log()).sum(-1).mean()
            update(run, model, adapter, loss)
        with torch.no_grad():
            run.record(model(run.tensor(4, SIZE, key=30 + episode)))
        run.module(model).load_state_dict(kept)
        adapter.load_state_dict(kept_steps)
    run.record([p.grad is None for p in model.parameters()])


class Normed(Net):
    """Norms behind each block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x))
        return self.out(self.norm(x))


class Ridge(nn.Module):
    """Features, and a ridge regression solved in closed form for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.scale, self.ridge = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor, new_x: Tensor, new_y: Tensor) -> Tensor:
        features, new = self.net(torch.cat([x, new_x])).split([len(x), len(new_x)])
        kernel = features @ features.t() + self.ridge.exp() * torch.eye(len(x))
        solved = features.t() @ torch.linalg.solve(kernel, y)
        return F.mse_loss(self.scale * new @ solved, new_y)


@program("a ridge regression solved within the forward for each task, its penalty learned")
def ridge_tasks(run: Run) -> None:
    model = run.shard(Ridge(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        update(run, model, optimizer, model(*task(run, step)))
