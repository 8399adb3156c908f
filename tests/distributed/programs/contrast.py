"""Programs: representations learned by comparing, with features of other ranks in the loss."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, Net, adamw, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Gather(torch.autograd.Function):
    """Features of all ranks; each gets the sum of what the ranks' losses say about its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        stacked = torch.stack(grads)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


@torch.no_grad()
def gathered(x: Tensor) -> Tensor:
    """Features of all ranks, without gradient."""
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class Towers(nn.Module):
    """Unit features of pictures and words, a scale, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures, self.words = Net(1), Net(1)
        self.scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.bias = nn.Parameter(torch.tensor(-2.0))

    def forward(self, pictures: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a, b = F.normalize(self.pictures(pictures), dim=-1), F.normalize(self.words(words), dim=-1)
        return a, b, self.scale.exp(), self.bias


@program("CLIP: features gathered without gradient, the rank's own put back, the scale clamped")
def clip_local(run: Run) -> None:
    towers = Towers()
    towers.bias.requires_grad_(False)
    model = run.shard(towers, [Block])
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for n, p in named if p.ndim >= 2], "weight_decay": 0.2},
    ]
    optimizer = adamw(groups, lr=0.02)
    for step in range(3):
        a, b, scale, _ = model(run.tensor(4, SIZE, key=step), run.tensor(4, SIZE, key=10 + step))
        parts_a, parts_b = (list(gathered(x).chunk(run.world_size)) for x in (a, b))
        parts_a[run.rank], parts_b[run.rank] = a, b  # with its graph
        logits = scale * torch.cat(parts_a) @ torch.cat(parts_b).t()
        truth = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, truth) + F.cross_entropy(logits.t(), truth)) / 2
        update(run, model, optimizer, loss)
        with torch.no_grad():
            run.module(model).scale.clamp_(0, math.log(10.05))
        run.record(run.module(model).scale.item())


@program("SimCLR: features gathered by a Function with a backward, own keys masked, LARS")
def simclr(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = Lars(model.parameters(), lr=0.3)
    for step in range(3):
        x = run.tensor(4, SIZE, key=step)
        views = [F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=-1) for _ in range(2)]
        every = torch.cat([torch.cat(Gather.apply(view)) for view in views])
        logits = (every @ every.t() / 0.5).masked_fill(torch.eye(len(every)).bool(), -1e4)
        half = len(every) // 2
        truth = torch.cat([torch.arange(half) + half, torch.arange(half)])
        update(run, model, optimizer, F.cross_entropy(logits, truth))


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rates: steps of matrices scaled by norms of weight and gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "weight_decay": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                slope = p.grad
                if slope is None:
                    continue
                if p.ndim > 1:
                    slope = slope.add(p, alpha=group["weight_decay"])
                    size, steep = torch.norm(p), torch.norm(slope)
                    one = torch.ones_like(size)
                    trust = torch.where(
                        size > 0, torch.where(steep > 0, 0.1 * size / steep, one), one
                    )
                    slope = slope.mul(trust)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                state["mu"].mul_(group["momentum"]).add_(slope)
                p.add_(state["mu"], alpha=-group["lr"])


class Neighbour(torch.autograd.Function):
    """The features of the rank before; gradients go back to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return passed_on(x, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return passed_on(grads[0], -1)


def passed_on(x: Tensor, by: int) -> Tensor:
    """Sends to the rank that is ``by`` further, and receives from the other side."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x.contiguous(), (rank + by) % size),
        dist.P2POp(dist.irecv, received, (rank - by) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@program("SigLIP: sigmoid losses of pairs, the words' features sent around a ring of ranks")
def siglip(run: Run) -> None:
    model = run.shard(Towers(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        a, b, scale, bias = model(run.tensor(4, SIZE, key=step), run.tensor(4, SIZE, key=10 + step))
        sign = 2 * torch.eye(4) - 1
        loss = -F.logsigmoid(sign * (scale * a @ b.t() + bias)).sum() / 4
        for _ in range(run.world_size - 1):
            b = Neighbour.apply(b)
            loss = loss - F.logsigmoid(-(scale * a @ b.t() + bias)).sum() / 4
        update(run, model, optimizer, loss)


@torch.no_grad()
def sinkhorn(scores: Tensor) -> Tensor:
    """Assignments of all ranks' samples with equal shares of the prototypes."""
    share = (scores / 0.1).exp().t()
    total = share.sum()
    dist.all_reduce(total)
    share /= total
    for _ in range(3):
        rows = share.sum(1, keepdim=True)
        dist.all_reduce(rows)
        share /= rows * share.shape[0]
        share /= share.sum(0, keepdim=True) * share.shape[1] * dist.get_world_size()
    return (share / share.sum(0, keepdim=True)).t()


class Prototypes(nn.Module):
    """Features and their scores against prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.prototypes = Net(1), nn.Linear(SIZE, 6, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = F.normalize(self.body(x), dim=-1)
        return features, self.prototypes(features)


@program("SwAV: prototypes normalised before each step, Sinkhorn over ranks, a queue, frozen first")
def swav(run: Run) -> None:
    model = run.shard(Prototypes(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    queue = torch.zeros(0, SIZE)
    for step in range(4):
        with torch.no_grad():
            weight = run.module(model).prototypes.weight.data.clone()
            run.module(model).prototypes.weight.copy_(F.normalize(weight, dim=1))
        x = run.tensor(4, SIZE, key=step)
        features, scores = model(torch.cat([x, x + 0.1 * torch.randn_like(x)]))
        with torch.no_grad():
            table = run.module(model).prototypes.weight
            known = torch.cat([queue @ table.t(), scores.detach()])
            aims = sinkhorn(known)[-8:]
            queue = torch.cat([features.detach()[:4], queue])[:6]
        swapped = torch.cat([aims[4:], aims[:4]])
        loss = -(swapped * (scores / 0.1).log_softmax(-1)).sum(-1).mean()
        loss.backward()
        run.average(model)
        if step == 0:
            for name, param in model.named_parameters():
                if "prototypes" in name:
                    param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("Barlow Twins: a correlation matrix that all ranks sum in place, within the graph")
def barlow_twins(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model, lr=0.02)
    norm = nn.BatchNorm1d(SIZE, affine=False)
    for step in range(3):
        x = run.tensor(6, SIZE, key=step)
        first, second = model(x), model(x + 0.1 * torch.randn_like(x))
        correlation = norm(first).t() @ norm(second)
        correlation.div_(6 * run.world_size)
        dist.all_reduce(correlation)
        diagonal = torch.diagonal(correlation)
        others = correlation.square().sum() - diagonal.square().sum()
        update(run, model, optimizer, (diagonal - 1).square().sum() + 0.02 * others)


@program("VICReg: variance and covariance of gathered features, a projector with a rate of its own")
def vicreg(run: Run) -> None:
    body, projector = run.shard(Net(), [Block]), run.shard(nn.Linear(SIZE, SIZE, bias=False))
    optimizer = torch.optim.SGD(
        [{"params": body.parameters()}, {"params": projector.parameters(), "lr": 0.2}],
        lr=0.05,
        momentum=0.9,
    )
    for step in range(3):
        x = run.tensor(4, SIZE, key=step)
        views = [projector(body(x + 0.1 * torch.randn_like(x))) for _ in range(2)]
        loss = 25 * F.mse_loss(*views)
        for view in views:
            every = torch.cat(Gather.apply(view))
            every = every - every.mean(0)
            loss = loss + F.relu(1 - (every.var(0) + 1e-4).sqrt()).mean()
            covariance = every.t() @ every / (len(every) - 1)
            loss = loss + (covariance.square().sum() - covariance.diag().square().sum()) / SIZE
        loss.backward()
        run.average(body, projector)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


class Masked(nn.Module):
    """A masked autoencoder: visible patches are encoded, a token stands for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(4, SIZE), nn.Linear(SIZE, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, SIZE))
        self.place = nn.Parameter(torch.randn(1, 8, SIZE), requires_grad=False)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block() for _ in range(1))

    def forward(self, patches: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        order = noise.argsort(1)
        back, kept = order.argsort(1), order[:, :3]
        index = kept[..., None].expand(-1, -1, SIZE)
        x = (self.inp(patches) + self.place).gather(1, index)
        for block in self.encoder:
            x = block(x) + x.mean(1, keepdim=True)
        x = torch.cat([x, self.token.expand(len(x), 5, -1)], 1)
        x = x.gather(1, back[..., None].expand(-1, -1, SIZE)) + self.place
        for block in self.decoder:
            x = block(x) + x.mean(1, keepdim=True)
        return self.out(x), (back >= 3).float()


@program("a masked autoencoder: patches shuffled, a learned token, a frozen table of places")
def masked_autoencoder(run: Run) -> None:
    model = run.shard(Masked(), [Block])
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), betas=(0.9, 0.95))
    for step in range(3):
        patches = run.tensor(4, 8, 4, key=step)
        made, masked = model(patches, torch.rand(4, 8))
        mean, spread = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
        error = (made - (patches - mean) / (spread + 1e-6).sqrt()).square().mean(-1)
        update(run, model, optimizer, (error * masked).sum() / masked.sum())


@program("data2vec: targets are means of a following teacher's blocks, taken by hooks")
def data2vec(run: Run) -> None:
    net = Net(3)
    teacher = copy.deepcopy(net).requires_grad_(False)
    model = run.shard(net, [Block])
    head = run.shard(nn.Linear(SIZE, SIZE))
    seen: list[Tensor] = []
    for block in teacher.blocks[1:]:
        block.register_forward_hook(lambda module, args, output: seen.append(output))
    optimizer = adamw([*model.parameters(), *head.parameters()])
    for step in range(3):
        x, masked = run.tensor(6, SIZE, key=step), torch.rand(6, SIZE) < 0.4
        seen.clear()
        with torch.no_grad():
            teacher(x)
            aim = torch.stack([F.layer_norm(output, (SIZE,)) for output in seen]).mean(0)
        loss = F.smooth_l1_loss(head(model(x.masked_fill(masked, 0.0))), aim, beta=0.5)
        loss.backward()
        run.average(model, head)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)
        state = run.full_state(model)
        for name, value in teacher.state_dict().items():
            value.lerp_(state[name], 0.1 * (1 + step))
