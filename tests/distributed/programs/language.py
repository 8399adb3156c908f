"""Programs: language models."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, Words, adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

WORDS = 11


class Layer(nn.Module):
    """Attention with a mask and normalised queries and keys, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = (
            nn.Linear(SIZE, 3 * SIZE, bias=False),
            nn.Linear(SIZE, SIZE, bias=False),
        )
        self.first, self.last = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE, bias=False), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.first(x if memory is None else torch.cat([memory, x], 1))
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        q = q[:, :, -x.shape[1] :]
        q, k = F.normalize(q, dim=-1) * 4, F.normalize(k, dim=-1)
        heads = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.last(x))))


class Causal(nn.Module):
    """A small decoder; the caller says which tokens see which."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, SIZE), nn.Embedding(8, SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(SIZE), nn.Linear(SIZE, WORDS, bias=False)

    def hidden(self, tokens: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)

    def forward(self, tokens: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        return 5 * torch.tanh(self.head(self.hidden(tokens, places, mask)) / 5)


def triangle(size: int) -> Tensor:
    """A causal mask: a token sees itself and those before."""
    return torch.ones(size, size).tril().bool()


@program(
    "packed texts: masks of blocks, places begin again, losses over all ranks' tokens, a z-loss"
)
def packed_texts(run: Run) -> None:
    model = run.shard(Causal(), [Layer])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens, starts = (
            run.tokens(WORDS, 1, 10, key=step),
            run.tokens(3, 1, 10, key=10 + step) == 0,
        )
        starts[:, 0] = True
        text = starts.long().cumsum(1)
        places = torch.arange(10) - torch.where(starts, torch.arange(10), 0).cummax(1)[0]
        mask = (text[:, :, None] == text[:, None]) & triangle(10)
        logits = model(tokens, places.clamp(max=7), mask[:, None])[:, :-1]
        inside = (text[:, 1:] == text[:, :-1]).float()
        count = inside.sum()
        dist.all_reduce(count)
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        losses = losses + 1e-3 * logits.logsumexp(-1).square()
        update(run, model, optimizer, (losses * inside).sum() * run.world_size / count)


class Ahead(Causal):
    """Modules that each predict one token further, with the same table and the same head."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = nn.ModuleList(Layer() for _ in range(2))
        self.merge = nn.ModuleList(nn.Linear(2 * SIZE, SIZE, bias=False) for _ in range(2))

    def forward(self, tokens: Tensor, places: Tensor, mask: Tensor) -> list[Tensor]:  # type: ignore[override]
        size = tokens.shape[1] - 2
        x = self.hidden(tokens[:, :size], places[:size], mask[:size, :size])
        logits = [self.head(x)]
        for depth, (layer, merge) in enumerate(zip(self.ahead, self.merge, strict=True)):
            known = self.embed(tokens[:, depth + 1 :][:, :size])
            x = layer(merge(torch.cat([x, known], -1)), mask[:size, :size])
            logits.append(self.head(self.norm(x)))
        return logits


@program("heads for several tokens: modules one after the other share table, norm and head")
def tokens_ahead(run: Run) -> None:
    model = run.shard(Ahead(), [Layer])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = run.tokens(WORDS, 2, 8, key=step)
        every = model(tokens, torch.arange(8), triangle(8))
        losses = [
            F.cross_entropy(logits[:, :5].flatten(0, 1), tokens[:, depth + 1 :][:, :5].flatten())
            for depth, logits in enumerate(every)
        ]
        update(run, model, optimizer, losses[0] + 0.3 * (losses[1] + losses[2]) / 2)
        run.record(*losses)


class Experts(nn.Module):
    """Two of four experts for each token, and one for all; biases even the loads out."""

    bias: Tensor
    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared = nn.Linear(SIZE, 4, bias=False), Block()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(SIZE, SIZE), nn.SiLU()) for _ in range(4)
        )
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("load", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        scores = self.gate(flat).sigmoid()
        chosen = (scores + self.bias).topk(2, -1)[1]
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=4)
        total = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                total = total.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return self.shared(x) + total.view_as(x)


@program(
    "experts without a balance loss: biases follow loads of all ranks, idle experts not called",
    unused=True,
)
def balanced_experts(run: Run) -> None:
    model = run.shard(
        nn.Sequential(nn.Embedding(WORDS, SIZE), Experts(), Experts()), [nn.Sequential]
    )
    optimizer = adamw(model.parameters())
    for step in range(4):
        x = model(run.tokens(WORDS, 1, 2, key=step))
        update(run, model, optimizer, (x - 1).square().mean())
        for module in run.module(model).modules():
            if isinstance(module, Experts):
                dist.all_reduce(module.load)
                module.bias += 0.05 * (module.load.mean() - module.load).sign()
                run.record(module.load.max() / module.load.mean())
                module.load.zero_()


class Depths(nn.Module):
    """A layer for the half of the tokens that a router chooses, weighed by its score."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layer = nn.Linear(SIZE, 1), Layer()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x)[..., 0]
        chosen = scores.topk(x.shape[1] // 2, 1)[1].sort(1)[0]
        index = chosen[..., None].expand(-1, -1, SIZE)
        some = x.gather(1, index)
        change = self.layer(some, triangle(some.shape[1])) - some
        which = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        loss = F.binary_cross_entropy_with_logits(scores, which)
        weight = scores.gather(1, chosen).sigmoid()[..., None]
        return x.scatter_add(1, index, weight * change), loss


@program("mixture of depths: a router chooses the tokens of each layer, and learns its own choice")
def chosen_depths(run: Run) -> None:
    layers = nn.ModuleList(Depths() for _ in range(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers, self.head = (
                nn.Embedding(WORDS, SIZE),
                layers,
                nn.Linear(SIZE, WORDS),
            )

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            x, extra = self.embed(tokens), torch.zeros(())
            for layer in self.layers:
                x, loss = layer(x)
                extra = extra + loss
            return self.head(x), extra

    model = run.shard(Model(), [Depths])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = run.tokens(WORDS, 2, 8, key=step)
        logits, extra = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        update(run, model, optimizer, loss + 0.01 * extra)


class Adapted(nn.Module):
    """A frozen weight and a product of two thin ones, merged from time to time."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(inner.weight.detach(), requires_grad=False)
        self.a = nn.Parameter(torch.empty(2, inner.in_features))
        self.b = nn.Parameter(torch.zeros(inner.out_features, 2))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.a), self.b)

    @torch.no_grad()
    def merge(self) -> None:
        """The product goes into the weight, and begins again."""
        self.weight.data += self.b @ self.a
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        nn.init.zeros_(self.b)


@program(
    "ReLoRA: adapters merged and made again in mid-run, most of their moments dropped, rates again"
)
def relora(run: Run) -> None:
    net = Words()
    for block in net.blocks:
        for name in ("up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    model = run.shard(net, [Block])
    optimizer = adamw([p for p in model.parameters() if p.requires_grad], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    for step in range(4):
        tokens = run.tokens(WORDS, 2, 6, key=step)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        update(run, model, optimizer, loss)
        schedule.step()
        if step == 1:
            for module in run.module(model).modules():
                if isinstance(module, Adapted):
                    module.merge()
                    for param in (module.a, module.b):
                        for key in ("exp_avg", "exp_avg_sq"):
                            moment = optimizer.state[param][key]
                            moment.mul_((moment.abs() > moment.abs().mean()).float())


class Electra(nn.Module):
    """A small generator, and a discriminator that has its table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, SIZE)
        self.generator, self.discriminator = Layer(), nn.ModuleList(Layer() for _ in range(2))
        self.bias, self.judge = nn.Parameter(torch.zeros(WORDS + 1)), nn.Linear(SIZE, 1)

    def forward(self, tokens: Tensor, masked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        every = torch.ones(tokens.shape[1], tokens.shape[1]).bool()
        hidden = self.generator(self.embed(tokens.masked_fill(masked, WORDS)), every)
        logits = F.linear(hidden, self.embed.weight, self.bias)[masked]
        noise = -torch.rand(logits.shape).clamp(min=1e-6).log()
        sampled = (logits.detach() - noise.log()).argmax(-1)
        replaced = tokens.masked_scatter(masked, sampled)
        x = self.embed(replaced)
        for layer in self.discriminator:
            x = layer(x, every)
        return logits, self.judge(x)[..., 0], (replaced != tokens).float()


@program(
    "ELECTRA: replaced tokens are sampled within the forward, generator and judge share a table"
)
def electra(run: Run) -> None:
    model = run.shard(Electra(), [Layer])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens, masked = run.tokens(WORDS, 3, 7, key=step), torch.rand(3, 7) < 0.3
        logits, judged, wrong = model(tokens, masked)
        loss = F.cross_entropy(logits, tokens[masked])
        loss = loss + 5 * F.binary_cross_entropy_with_logits(judged, wrong)
        update(run, model, optimizer, loss)


class Segments(Causal):
    """Layers that also see the hidden states of the segment before."""

    def forward(self, tokens: Tensor, memories: Any) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
        x, kept = self.embed(tokens) + self.places(torch.arange(tokens.shape[1])), []
        for layer, memory in zip(self.layers, memories, strict=True):
            kept.append(x.detach())
            past = 0 if memory is None else memory.shape[1]
            mask = torch.cat([torch.ones(len(x[0]), past).bool(), triangle(len(x[0]))], 1)
            x = layer(x, mask, memory)
        return self.head(self.norm(x)), kept


@program("segments that see hidden states of the ones before, over steps, up to the ends of texts")
def segments(run: Run) -> None:
    model = run.shard(Segments(), [Layer])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-5)
    memories: list[Any] = [None, None]
    for step in range(4):
        tokens = run.tokens(WORDS, 2, 5, key=step)
        if step % 3 == run.rank:
            memories = [None, None]
        logits, memories = model(tokens[:, :-1], memories)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        update(run, model, optimizer, loss)
