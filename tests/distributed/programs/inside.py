"""Programs: what a forward or a backward does beside computing: it trains, writes and moves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import (
    SIZE,
    Block,
    Net,
    SometimesTwo,
    Words,
    mean_square,
    sgd,
    train,
    train_words,
    update,
)
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class ActNorm(nn.Module):
    """Scale and shift, which the first batch of all ranks sets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.zeros(SIZE))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_set:
            moments = torch.stack([x.detach().mean(0), x.detach().square().mean(0)])
            dist.all_reduce(moments)
            mean, square = moments / dist.get_world_size()
            self.scale.data.copy_((square - mean.square() + 0.1).rsqrt())
            self.shift.data.copy_(-mean)
            self.is_set.fill_(True)
        return (x + self.shift) * self.scale, self.scale.abs().log().sum()


class Coupling(nn.Module):
    """One half of the numbers moves the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = ActNorm(), nn.Linear(SIZE // 2, SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, volume = self.norm(x)
        kept, moved = x.chunk(2, dim=-1)
        shift, scale = torch.tanh(self.net(kept)).chunk(2, dim=-1)
        return torch.cat([moved * scale.exp() + shift, kept], -1), volume + scale.sum(-1)


class Flow(nn.Module):
    """A normalising flow."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Coupling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(len(x))
        for step in self.steps:
            x, more = step(x)
            volume = volume + more
        return volume - 0.5 * x.square().sum(-1)


@program("a flow whose ActNorm takes scale and shift from the first batch: .data.copy_ in forward")
def actnorm_flow(run: Run) -> None:
    model = run.shard(Flow(), [Coupling])
    train(run, model, loss=lambda log_prob: -log_prob.mean())
    with torch.no_grad():
        run.record(model(run.tensor(4, SIZE, key=20)))


class Masked(Block):
    """Keeps a pattern of zeros in its weights at the start of each forward."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("mask", torch.rand(2 * SIZE, SIZE, generator=generator) < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data.mul_(self.mask)
        return super().forward(x)


@program("masked autoregression: self.weight.data.mul_(mask) in each forward")
def masked_in_forward(run: Run) -> None:
    train(run, run.shard(Net(2, Masked), [Masked]))


class ZeroRow(Block):
    """A row that stays zero, by the `.data` of a view."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight[0].data.fill_(0.0)
        self.down.weight.t().data.clamp_(-0.2, 0.2)
        return super().forward(x)


@program("the padding's row filled in forward by a view: self.weight[0].data.fill_(0)")
def view_filled_in_forward(run: Run) -> None:
    train(run, run.shard(Net(2, ZeroRow), [ZeroRow]))


class CodeBlock(Block):
    """Adds a vector that follows the gradients that pass, in their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(SIZE), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.code
        return Moves.apply(y, self) if y.requires_grad else y


class Moves(torch.autograd.Function):
    """The identity, whose backward moves a frozen parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: CodeBlock) -> Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        mean = grad.mean(0)
        dist.all_reduce(mean)
        with torch.no_grad():
            ctx.owner.code.lerp_(1.0 + mean / dist.get_world_size(), 0.5)
        return grad, None


@program("a frozen parameter that a Function's backward moves, under no_grad")
def moved_in_backward(run: Run) -> None:
    train(run, run.shard(Net(2, CodeBlock), [CodeBlock]))


class Energy(nn.Module):
    """Reads its own weight twice, detached and not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(torch.tanh(F.linear(x, self.weight.detach())), self.weight)


@program("a layer that reads its own weight detached, then with a gradient")
def own_weight_detached(run: Run) -> None:
    train(run, run.shard(Net(2, Energy), [Energy]))


class SelfTraining(nn.Module):
    """A forward that trains generator and critic, two rounds of each batch, as Lightning's manual
    optimisation does inside of the call that DistributedDataParallel sees."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Net(), Net()
        self.optimizers: list[Any] = []

    def forward(self, x: Tensor, run: Run) -> Tensor:
        for _ in range(2):
            self.step(run, 1, F.softplus(self.critic(self.generator(x).detach())).mean())
            self.step(run, 0, F.softplus(-self.critic(self.generator(x))).mean())
        with torch.no_grad():
            return self.critic(self.generator(x)).mean()

    def step(self, run: Run, number: int, loss: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        run.average((self.generator, self.critic)[number])
        self.optimizers[number].step()
        run.record(loss)


@program("a GAN that trains inside of one call, two rounds of both, then evaluates", unused=True)
def trains_inside(run: Run) -> None:
    model = run.shard(SelfTraining(), [Block])
    net = run.module(model)
    net.optimizers = [sgd(net.generator), sgd(net.critic)]
    for x in run.batches(2):
        run.record(model(x, run))


@program("weights scaled through .data behind the forward, before the backward")
def data_before_backward(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        loss = mean_square(model(x))
        run.module(model).out.weight.data.mul_(0.9)
        update(run, model, optimizer, loss)


@program("a loss summed over the ranks for the log, between forward and backward")
def loss_logged(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        loss = mean_square(model(x))
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        run.record(logged)
        update(run, model, optimizer, loss)


class Weighted(Net):
    """Weights what comes in by a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([0.5] * SIZE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.table)


@program("a model that is made on the meta device and filled, after another one was sharded")
def made_on_meta_after(run: Run) -> None:
    train(run, run.shard(Net(), [Block]))
    with torch.device("meta"):
        second = Weighted()
    run.record(float(second.table.is_meta))
    second.to_empty(device="cpu")
    for number, tensor in enumerate((*second.parameters(), *second.buffers())):
        values = torch.arange(tensor.numel()).view(tensor.shape)
        tensor.detach().copy_(torch.cos(values + number) / 2)
    train(run, run.shard(second, [Block]))


@program("an embedding with a hook on rank 0 alone, by which the backward reads its weight")
def hooked_embedding(run: Run) -> None:
    words = Words()
    if run.rank == 0:
        words.embed.register_forward_hook(lambda table, _, found: found * table.weight.norm())
    train_words(run, run.shard(words, [nn.Embedding, nn.Linear]))


@program("one backward of two forwards, each on a way of the rank's own", unused=True)
def joint_ways(run: Run) -> None:
    model = run.shard(SometimesTwo(), [Block])
    optimizer = sgd(model)
    for step in range(4):
        first, second = run.tensor(4, 8, key=2 * step), run.tensor(4, 8, key=2 * step + 1)
        ways = (step + run.rank) % 2 == 0, (step // 2 + run.rank) % 2 == 0
        loss = mean_square(model(first, ways[0])) + mean_square(model(second, ways[1]))
        update(run, model, optimizer, loss)
