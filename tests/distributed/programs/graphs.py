"""Programs: which graphs are recorded, which backwards run through them, and in what order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.programs.models import Block, Net, mean_square, sgd, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Experts(nn.Module):
    """All experts run, one of them is used."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor, k: int) -> Tensor:
        h = self.inp(x)
        ys = [expert(h) for expert in self.experts]
        return self.out(ys[k])


class OneExpert(Experts):
    """Only the expert that is used runs."""

    def forward(self, x: Tensor, k: int) -> Tensor:
        return self.out(self.experts[k](self.inp(x)))


class Steps(Net):
    """Runs a chosen number of its blocks."""

    def forward(self, x: Tensor, depth: int = 99) -> Tensor:
        x = self.inp(x)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.out(self.norm(x))


@program("a detached target, and an expert that gets no gradient on one rank", unused=True)
def detached_target_experts(run: Run) -> None:
    model = run.shard(Experts(), [nn.Sequential])
    optimizer = sgd(model)
    for step in range(3):
        k = (run.rank + step) % 2
        target = model(run.tensor(4, 8, key=10 + step), k).detach()
        update(run, model, optimizer, mean_square(model(run.tensor(4, 8, key=step), k) - target))


@program("a detached target under no_grad, and an expert without gradient on one rank", unused=True)
def no_grad_target_experts(run: Run) -> None:
    model = run.shard(Experts(), [nn.Sequential])
    optimizer = sgd(model)
    for step in range(3):
        k = (run.rank + step) % 2
        with torch.no_grad():
            target = model(run.tensor(4, 8, key=10 + step), k)
        update(run, model, optimizer, mean_square(model(run.tensor(4, 8, key=step), k) - target))


@program(
    "a metric's forward without no_grad, and an expert without gradient on one rank", unused=True
)
def metric_experts(run: Run) -> None:
    model = run.shard(Experts(), [nn.Sequential])
    optimizer = sgd(model)
    for step in range(3):
        k = (run.rank + step) % 2
        update(run, model, optimizer, mean_square(model(run.tensor(4, 8, key=step), k)))
        run.record(model(run.tensor(4, 8, key=10 + step), k).mean().item())


@program("experts that all run, of which each rank uses another one", unused=True)
def experts_by_rank(run: Run) -> None:
    model = run.shard(Experts(), [nn.Sequential])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches()):
        update(run, model, optimizer, mean_square(model(x, (run.rank + step) % 2)))


@program("all ranks call one expert, another one in each step", unused=True)
def one_expert_by_step(run: Run) -> None:
    model = run.shard(OneExpert(), [nn.Sequential])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches()):
        update(run, model, optimizer, mean_square(model(x, step % 2)))


@program("a forward for a metric between steps, without no_grad")
def metric_without_no_grad(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        run.record(model(x + 1).mean().item())
        update(run, model, optimizer, mean_square(model(x)))


@program("a loss kept for logging, with its graph, over the steps")
def losses_kept(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    total = torch.zeros(())
    for x in run.batches():
        loss = mean_square(model(x))
        total = total + loss
        update(run, model, optimizer, loss)
    run.record(total)


@program("two forwards, one loss (siamese)")
def siamese(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        a, b = model(x), model(x * 0.9)
        update(run, model, optimizer, (a - b).square().mean() + a.mean() ** 2)


@program("two forwards, then two backwards in the same order")
def two_forwards_two_backwards(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        first, second = mean_square(model(x)), mean_square(model(x + 1))
        with run.no_sync(model):
            first.backward()
        update(run, model, optimizer, second)


@program("two forwards, then two backwards, the second one first, each communicated")
def two_backwards_reversed(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        first, second = mean_square(model(x)), mean_square(model(x + 1))
        second.backward()
        update(run, model, optimizer, first)


@program("backward twice through one graph, with retain_graph")
def retain_graph(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward(retain_graph=True)
        update(run, model, optimizer, loss)


@program("two losses of one forward, two backwards")
def two_losses(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        output = model(x)
        output[:, :4].square().mean().backward(retain_graph=True)
        update(run, model, optimizer, output[:, 4:].abs().mean())


@program("one block called three times in a row", unused=True)
def recurrent_block(run: Run) -> None:
    class Recurrent(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.out(self.blocks[1](x))

    train(run, run.shard(Recurrent(), [Block]))


@program("two blocks called in turn, the outer loop twice", unused=True)
def looped_blocks(run: Run) -> None:
    class Looped(Net):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                for block in self.blocks:
                    x = block(self.inp(x))
            return self.out(x)

    train(run, run.shard(Looped(), [Block]))


@program("an early exit after a number of blocks that depends on the step", unused=True)
def early_exit(run: Run) -> None:
    model = run.shard(Steps(3), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(4)):
        update(run, model, optimizer, mean_square(model(x, 3 - step % 3)))


@program("an early exit that depends on the rank, once all blocks were called", unused=True)
def early_exit_by_rank(run: Run) -> None:
    model = run.shard(Steps(3), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(4)):
        depth = 3 if step == 0 else 1 + (run.rank + step) % 3
        update(run, model, optimizer, mean_square(model(x, depth)))


@program("stochastic depth, the same blocks on all ranks", unused=True)
def stochastic_depth(run: Run) -> None:
    class Dropped(Net):
        step = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for index, block in enumerate(self.blocks):
                if (index + self.step) % 3:
                    x = block(x)
            return self.out(x)

    model = run.shard(Dropped(3), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(4)):
        run.module(model).step = step
        update(run, model, optimizer, mean_square(model(x)))


@program("a layer that nobody uses, under weight decay", unused=True)
def unused_layer(run: Run) -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(8, 8)

    model = run.shard(Unused(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    train(run, model, optimizer)
    run.record([name for name, p in model.named_parameters() if p.grad is not None])


@program("backward(inputs=list(model.parameters()))")
def backward_inputs(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward(inputs=list(model.parameters()))
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("torch.autograd.grad of the parameters, assigned to p.grad")
def autograd_grad_parameters(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        parameters = list(model.parameters())
        for p, g in zip(
            parameters, torch.autograd.grad(mean_square(model(x)), parameters), strict=True
        ):
            p.grad = g
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("a gradient penalty on the inputs, with create_graph")
def gradient_penalty(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        x.requires_grad_()
        output = model(x)
        slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
        loss = output.mean() + (slope.norm(dim=1) - 1).square().mean()
        update(run, model, optimizer, loss)


@program("saliency: torch.autograd.grad of the inputs between steps")
def saliency(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        image = x.clone().requires_grad_()
        run.record(torch.autograd.grad(model(image).sum(), image)[0])


@program("saliency by backward, x.grad read, then zero_grad")
def saliency_backward(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        image = x.clone().requires_grad_()
        model(image).sum().backward()
        run.record(image.grad)
        optimizer.zero_grad()


@program("adversarial training: the gradient of the input moves the input")
def adversarial(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        x.requires_grad_()
        slope = torch.autograd.grad(mean_square(model(x)), x)[0]
        moved = (x + 0.1 * slope.sign()).detach()
        update(run, model, optimizer, mean_square(model(moved)))


@program("backward in two parts through a detached middle")
def detached_middle(run: Run) -> None:
    model = run.shard(nn.Sequential(*(Block() for _ in range(4))), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        net = run.module(model)
        first = net[:2](x)
        middle = first.detach().requires_grad_()
        loss = mean_square(net[2:](middle))
        loss.backward()
        first.backward(middle.grad)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("a slice of the blocks: model[:2](x)")
def sequential_slice(run: Run) -> None:
    model = run.shard(nn.Sequential(*(Block() for _ in range(4))), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        run.record(run.module(model)[:2](x))
        update(run, model, optimizer, mean_square(model(x)))


@program("submodules called directly: model.blocks[0](model.inp(x))")
def direct_calls(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        net: Any = run.module(model)
        update(run, model, optimizer, mean_square(net.out(net.blocks[0](net.inp(x)))))


@program("a forward that raises on all ranks, caught; training goes on", unused=True)
def forward_raises(run: Run) -> None:
    class Fragile(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](self.inp(x))
            if x.shape[0] == 3:
                raise KeyError("a bad batch")
            return self.out(self.blocks[1](x))

    model = run.shard(Fragile(), [Block])
    optimizer = sgd(model)
    for step in range(3):
        try:
            x = run.tensor(3 if step == 1 else 4, 8, key=step)
            update(run, model, optimizer, mean_square(model(x)))
        except KeyError:
            optimizer.zero_grad()


@program("a step whose backward is skipped on all ranks because the loss is bad")
def backward_skipped(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(4)):
        loss = mean_square(model(x))
        if step != 1:
            update(run, model, optimizer, loss)
