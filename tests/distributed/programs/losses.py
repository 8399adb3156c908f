"""Programs: what goes into the loss besides the model's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.programs.models import Block, Net, mean_square, sgd, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class AuxBlock(nn.Module):
    """Keeps a loss of its own as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.g, self.g2 = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.a(x))
        self.aux = self.g2(torch.tanh(self.g(x))).square().mean()
        return y


class Router(nn.Module):
    """Two experts for each row, chosen by a gate; the balance loss goes to a list."""

    def __init__(self, collected: list[Tensor] | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.collected = collected if collected is not None else []

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), -1)
        self.collected.append(weights.mean(0).square().sum())
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (outputs * weights.unsqueeze(-2)).sum(-1)


COLLECTED: list[Tensor] = []


class GlobalRouter(Router):
    """Its balance loss goes to a list of the module."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), -1)
        COLLECTED.append(weights.mean(0).square().sum())
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (outputs * weights.unsqueeze(-2)).sum(-1)


@program("a loss kept as an attribute of a block")
def auxiliary_attribute(run: Run) -> None:
    model = run.shard(Net(3, AuxBlock), [AuxBlock])
    optimizer = sgd(model)
    for x in run.batches():
        loss = mean_square(model(x)) + sum(b.aux for b in run.module(model).blocks)
        update(run, model, optimizer, loss)


@program("only the losses kept as attributes, not the output", unused=True)
def auxiliary_only(run: Run) -> None:
    model = run.shard(Net(3, AuxBlock), [AuxBlock])
    optimizer = sgd(model)
    for x in run.batches():
        model(x)
        update(run, model, optimizer, sum(b.aux for b in run.module(model).blocks))


@program("attribute losses with a backward of their own, after that of the output")
def auxiliary_second_backward(run: Run) -> None:
    model = run.shard(Net(2, AuxBlock), [AuxBlock])
    optimizer = sgd(model)
    for x in run.batches():
        output = model(x)
        aux = sum(b.aux for b in run.module(model).blocks)
        with run.no_sync(model):
            mean_square(output).backward(retain_graph=True)
        aux.backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("a router's balance loss collected in a list that all blocks share")
def auxiliary_list(run: Run) -> None:
    collected: list[Tensor] = []
    model = run.shard(Net(2, lambda: Router(collected)), [Router])
    optimizer = sgd(model)
    for x in run.batches():
        collected.clear()
        update(run, model, optimizer, mean_square(model(x)) + 0.1 * sum(collected))


@program("a router's balance loss collected in a global list")
def auxiliary_global(run: Run) -> None:
    model = run.shard(Net(2, GlobalRouter), [GlobalRouter])
    optimizer = sgd(model)
    for x in run.batches():
        COLLECTED.clear()
        update(run, model, optimizer, mean_square(model(x)) + 0.1 * sum(COLLECTED))


@program("a router's balance loss collected by a forward hook on its gate")
def auxiliary_hook(run: Run) -> None:
    model = run.shard(Net(2, Router), [Router])
    optimizer = sgd(model)
    seen: list[Tensor] = []
    for block in run.module(model).blocks:
        block.gate.register_forward_hook(lambda module, args, output: seen.append(output))
    for x in run.batches():
        seen.clear()
        loss = mean_square(model(x)) + 0.1 * sum(logits.logsumexp(-1).mean() for logits in seen)
        update(run, model, optimizer, loss)


def penalised(run: Run, penalty: Any, steps: int = 3) -> None:
    """Trains with a penalty over the parameters in the loss."""
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches(steps):
        update(run, model, optimizer, mean_square(model(x)) + 0.1 * penalty(model))


@program("an L2 penalty over all parameters in the loss")
def penalty_l2(run: Run) -> None:
    penalised(run, lambda model: sum(p.pow(2).sum() for p in model.parameters()))


@program("an L1 penalty over all parameters in the loss")
def penalty_l1(run: Run) -> None:
    penalised(run, lambda model: sum(p.abs().sum() for p in model.parameters()))


@program("a penalty on norms: sum of p.norm()")
def penalty_norm(run: Run) -> None:
    penalised(run, lambda model: sum(p.norm() for p in model.parameters()))


@program("a penalty on the norm of all parameters as one vector")
def penalty_vector(run: Run) -> None:
    penalised(run, lambda model: torch.cat([p.flatten() for p in model.parameters()]).norm())


@program("an orthogonality penalty, w @ w.t(), outside of the forward")
def penalty_orthogonal(run: Run) -> None:
    def penalty(model: nn.Module) -> Tensor:
        weights = [block.up.weight for block in run.module(model).blocks]
        return sum((w @ w.t() - torch.eye(16)).square().sum() for w in weights)

    penalised(run, penalty)


@program("the penalty's backward by itself, before that of the loss")
def penalty_own_backward(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        with run.no_sync(model):
            (0.1 * sum(p.square().sum() for p in model.parameters())).backward()
        update(run, model, optimizer, mean_square(model(x)))


@program("elastic weight consolidation against a snapshot of the parameters")
def penalty_ewc(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x in run.batches():
        moved = ((p - old[name]).square().sum() for name, p in model.named_parameters())
        update(run, model, optimizer, mean_square(model(x)) + 0.5 * sum(moved))


@program("Fisher information from squared gradients, then the penalty it weighs")
def penalty_fisher(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    mean_square(model(run.tensor(4, 8, key=9))).backward()
    run.average(model)
    fisher = {name: p.grad.clone().pow(2) for name, p in model.named_parameters()}
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    for x in run.batches():
        terms = (
            (fisher[name] * (p - old[name]).square()).sum() for name, p in model.named_parameters()
        )
        update(run, model, optimizer, mean_square(model(x)) + sum(terms))


@program("a distance to a plain copy of the weights made before")
def penalty_to_pretrained(run: Run) -> None:
    net = Net()
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    model = run.shard(net, [Block])
    optimizer = sgd(model)
    for x in run.batches():
        named = run.module(model).named_parameters()
        distance = sum((p - start[name]).square().sum() for name, p in named)
        update(run, model, optimizer, mean_square(model(x)) + 0.1 * distance)


@program("distillation from an unsharded teacher")
def distillation(run: Run) -> None:
    teacher = Net().eval()
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        with torch.no_grad():
            target = teacher(x)
        update(run, model, optimizer, nn.functional.mse_loss(model(x), target))


@program("distillation from a sharded teacher")
def distillation_sharded(run: Run) -> None:
    teacher = run.shard(Net(), [Block])
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        with torch.no_grad():
            target = teacher(x)
        update(run, model, optimizer, nn.functional.mse_loss(model(x), target))


@program("deep supervision: the loss of every block's output")
def deep_supervision(run: Run) -> None:
    class Deep(Net):
        def forward(self, x: Tensor) -> Any:
            x, outputs = self.inp(x), []
            for block in self.blocks:
                x = block(x)
                outputs.append(self.out(self.norm(x)))
            return outputs

    train(run, run.shard(Deep(), [Block]), loss=lambda ys: sum(y.square().mean() for y in ys))


@program("a learned temperature that only the loss uses")
def parameter_in_loss(run: Run) -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = Net(), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model = run.shard(Contrast(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        scale = run.module(model).scale
        update(run, model, optimizer, mean_square(model(x)) * scale.exp())


def curvature(weight: Tensor) -> Tensor:
    """A penalty for a script."""
    return (weight[1:] - weight[:-1]).square().mean()


@program("a scripted penalty of a weight, and torch.tensor(p) for the log")
def scripted_penalty(run: Run) -> None:
    penalty = torch.jit.script(curvature)
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        weight = run.module(model).out.weight
        update(run, model, optimizer, mean_square(model(x)) + penalty(weight))
        with torch.no_grad():
            run.record(torch.tensor(run.module(model).out.weight))
