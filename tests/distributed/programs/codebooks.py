"""Programs: codebooks, key encoders and targets that a forward moves by itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, Net, adamw, mean_square, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

CODES = 5


class Codebook(nn.Module):
    """Nearest codes, moved to the mean of their vectors in forward; all ranks move alike."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        codes = torch.randn(CODES, SIZE)
        if kind == "buffer":
            self.register_buffer("codes", codes)
        else:
            self.codes = nn.Parameter(codes, requires_grad=kind == "trained")
        self.register_buffer("counts", torch.ones(CODES))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        picked = torch.cdist(x.detach(), self.codes.detach()).argmin(-1)
        codes = F.embedding(picked, self.codes)
        loss = F.mse_loss(x, codes.detach())
        if self.kind == "trained":
            loss = loss + F.mse_loss(codes, x.detach())
        elif self.training:
            self.move(x.detach(), picked)
        return x + (codes - x).detach(), loss

    @torch.no_grad()
    def move(self, x: Tensor, picked: Tensor) -> None:
        chosen = F.one_hot(picked, CODES).float()
        counts, sums = chosen.sum(0), chosen.t() @ x
        dist.all_reduce(counts)
        dist.all_reduce(sums)
        self.counts.lerp_(counts, 0.5)
        means = sums / counts.clamp(min=1)[:, None]
        self.codes.copy_(torch.where(counts[:, None] > 0, self.codes.lerp(means, 0.5), self.codes))


class Vq(nn.Module):
    """Encoder, codebook, decoder."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encoder, self.book, self.decoder = Block(), Codebook(kind), Block()

    def forward(self, x: Tensor) -> Tensor:
        codes, loss = self.book(self.encoder(x))
        return F.mse_loss(self.decoder(codes), x) + 0.25 * loss


def train_codes(run: Run, kind: str, units: Any, eval_between: bool = False) -> None:
    model = run.shard(Vq(kind), units)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for x in run.batches(4):
        loss = model(x)
        if eval_between:
            model.eval()
            with torch.no_grad():
                run.record(model(x + 1))
            model.train()
        update(run, model, optimizer, loss)


@program("VQ-VAE: a codebook of buffers that follows means in forward")
def vq_buffers(run: Run) -> None:
    train_codes(run, "buffer", [Block])


@program("VQ-VAE: a codebook that is a frozen parameter, changed in place in forward")
def vq_frozen_parameter(run: Run) -> None:
    train_codes(run, "frozen", [Block])


@program("the same, the codebook a unit of its own")
def vq_frozen_unit(run: Run) -> None:
    train_codes(run, "frozen", [Block, Codebook])


@program("the same, with an evaluation between forward and backward")
def vq_frozen_eval(run: Run) -> None:
    train_codes(run, "frozen", [Block], eval_between=True)


@program("VQ-VAE: a codebook trained by gradients, straight through")
def vq_trained(run: Run) -> None:
    train_codes(run, "trained", [Block])


class Momentum(nn.Module):
    """A query encoder and a key encoder that follows it at the start of each forward."""

    def __init__(self, queue: bool) -> None:
        super().__init__()
        self.query = Net()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, SIZE) if queue else None)

    @torch.no_grad()
    def follow(self) -> None:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data = k.data * 0.5 + q.data * 0.5

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            self.follow()
            key = self.key(x + 0.1)
        if self.queue is None:
            return 2 - 2 * F.cosine_similarity(query, key).mean()
        logits = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.t()], 1)
        self.queue = torch.cat([key, self.queue])[:8]
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class MomentumInPlace(Momentum):
    """The same with k.mul_().add_() behind the query's call."""

    @torch.no_grad()
    def follow(self) -> None:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.mul_(0.5).add_(q, alpha=0.5)


def train_momentum(run: Run, net: nn.Module, units: Any) -> None:
    model = run.shard(net, units)
    optimizer = adamw(run.module(model).query.parameters())
    for x in run.batches(4):
        update(run, model, optimizer, model(x))


@program("MoCo in one module: k.data = ... in forward, a queue of keys")
def moco_in_forward(run: Run) -> None:
    train_momentum(run, Momentum(queue=True), [Block])


@program("MoCo in one module: k.mul_().add_() in forward, encoders as units")
def moco_units(run: Run) -> None:
    train_momentum(run, MomentumInPlace(queue=True), [Net])


@program("BYOL in one module, one unit: the target moves behind the online network's call")
def byol_in_forward(run: Run) -> None:
    train_momentum(run, MomentumInPlace(queue=False), None)


@program("DINO: a teacher with a centre, gradients of the last layer dropped in the first steps")
def dino(run: Run) -> None:
    net = Net()
    teacher = run.shard(copy.deepcopy(net).requires_grad_(False), [Block])
    model = run.shard(net, [Block])
    centre, optimizer = torch.zeros(SIZE), adamw(model.parameters(), weight_decay=0.1)
    for step, x in enumerate(run.batches(4)):
        target = teacher(x)
        soft = ((target - centre) / 0.5).softmax(-1)
        loss = -(soft * model(x + 0.1).log_softmax(-1)).sum(-1).mean()
        loss.backward()
        run.average(model)
        if step < 2:
            for p in run.module(model).out.parameters():
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)
        with torch.no_grad():
            mean = target.mean(0)
            dist.all_reduce(mean)
            centre.lerp_(mean / run.world_size, 0.1)
            for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
                t.mul_(0.9).add_(p.detach(), alpha=0.1)


@program("codes that nobody uses begin again at a batch's vectors, between steps")
def vq_restart(run: Run) -> None:
    model = run.shard(Vq("buffer"), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(4)):
        update(run, model, optimizer, model(x))
        book = run.module(model).book
        fresh = run.tensor(CODES, SIZE, key=50 + step, shared=True)
        book.codes = torch.where(book.counts[:, None] < 1.0, fresh, book.codes)


@program("weights that a forward pre-hook pulls to the unit sphere, in place")
def renormalised_in_forward(run: Run) -> None:
    def pull(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight.div_(module.weight.norm(dim=1, keepdim=True))

    net = Net()
    net.out.register_forward_pre_hook(pull)
    model = run.shard(net, [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))


@program("an average of the weights kept in buffers of the model, moved in forward")
def average_in_buffers(run: Run) -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(SIZE, SIZE)
            self.register_buffer("average", self.layer.weight.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.average.lerp_(self.layer.weight.detach(), 0.5)
            return x + torch.tanh(self.layer(x)) + F.linear(x, self.average)

    model = run.shard(Net(2, Averaged), [Averaged])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))


class Normalised(Block):
    """Replaces its weights by unit rows at the start of each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = F.normalize(self.up.weight.data, dim=1)
        return super().forward(x)


@program("prototypes normalised in forward: self.weight.data = F.normalize(self.weight.data)")
def data_normalised_in_forward(run: Run) -> None:
    model = run.shard(Net(2, Normalised), [Normalised])
    optimizer = adamw(model.parameters())
    for x in run.batches(4):
        update(run, model, optimizer, mean_square(model(x)))
        with torch.no_grad():
            run.record(model(x + 1))


class DataCodes(Vq):
    """Codes of an embedding that follow sums and counts, written through `.data`."""

    def __init__(self) -> None:
        super().__init__("buffer")
        self.book = Assigned()


class Assigned(nn.Module):
    """The codebook of VQ-VAE-2: sums and counts of vectors in buffers, codes from them."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(CODES, SIZE).requires_grad_(False)
        self.register_buffer("counts", torch.ones(CODES))
        self.register_buffer("sums", self.codes.weight.detach().clone())

    def forward(self, x: Tensor) -> Any:
        flat = x.detach()
        picked = torch.cdist(flat, self.codes.weight.detach()).argmin(-1)
        if self.training:
            chosen = F.one_hot(picked, CODES).to(flat.dtype)
            for kept, found in ((self.counts, chosen.sum(0)), (self.sums, chosen.t() @ flat)):
                dist.all_reduce(found)
                kept.data.mul_(0.9).add_(found, alpha=0.1)
            self.codes.weight.data.copy_(self.sums / self.counts.clamp(min=0.1)[:, None])
        codes = self.codes(picked).detach()
        return x + (codes - x).detach(), F.mse_loss(x, codes)


@program("VQ-VAE: the codes of an embedding follow sums and counts: weight.data.copy_ in forward")
def vq_data(run: Run) -> None:
    model = run.shard(DataCodes(), [Block])
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for x in run.batches(4):
        update(run, model, optimizer, model(x))
