"""Programs: recommenders with tables of rows, and encoders for search."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.contrast import Gather, gathered
from tests.distributed.programs.models import SIZE, Block, Net, Words, adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

ITEMS = 12


class WideAndDeep(nn.Module):
    """A sum of weights of crossed features, and a network over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.bias = nn.EmbeddingBag(30, 1, mode="sum"), nn.Parameter(torch.zeros(1))
        self.deep = nn.ModuleDict(
            {"user": nn.Embedding(6, 4), "item": nn.Embedding(ITEMS, 4), "net": Net(1)}
        )
        nn.init.zeros_(self.wide.weight)

    def forward(self, user: Tensor, item: Tensor, crossed: Tensor, starts: Tensor) -> Tensor:
        x = torch.cat([self.deep["user"](user), self.deep["item"](item)], -1)
        return self.wide(crossed, starts)[:, 0] + self.bias + self.deep["net"](x)[:, 0]


@program("wide and deep: bags of crossed features, Adagrad for one part and AdamW for the other")
def wide_and_deep(run: Run) -> None:
    model = run.shard(WideAndDeep(), [Block])
    module = run.module(model)
    wide = torch.optim.Adagrad([module.wide.weight, module.bias], lr=0.1, eps=1e-5)
    deep = adamw(module.deep.parameters())
    for step in range(3):
        crossed, starts = run.tokens(30, 9, key=step), torch.tensor([0, 2, 2, 7])
        clicks = run.tokens(2, 4, key=30 + step).float()
        scores = model(run.tokens(6, 4, key=step), run.tokens(ITEMS, 4, key=step), crossed, starts)
        loss = F.binary_cross_entropy_with_logits(scores, clicks)
        loss.backward()
        run.average(model)
        for optimizer in (wide, deep):
            optimizer.step()
            optimizer.zero_grad()
        run.record(loss)


class Dlrm(nn.Module):
    """Dense and categorical features, and products of all pairs of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, SIZE, mode="sum") for n in (5, ITEMS, 20))
        self.bottom = nn.Sequential(nn.Linear(4, SIZE), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(SIZE + 6, SIZE), nn.ReLU(), nn.Linear(SIZE, 1))

    def forward(self, dense: Tensor, bags: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = self.bottom(dense)
        vectors = [x, *(table(*bag) for table, bag in zip(self.tables, bags, strict=True))]
        stacked = torch.stack(vectors, 1)
        rows, columns = torch.tril_indices(4, 4, -1)
        products = (stacked @ stacked.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([x, products], 1))[:, 0]


class RowwiseAdagrad(torch.optim.Optimizer):
    """One sum of squares for each row of a table."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "eps": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["sum"] = p.new_zeros(p.shape[0], 1)
                state["sum"].add_(p.grad.pow(2).mean(dim=1, keepdim=True))
                p.addcdiv_(p.grad, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])


@program("DLRM: products of all pairs of embeddings, row-wise Adagrad for tables, SGD for the rest")
def dlrm(run: Run) -> None:
    model = run.shard(Dlrm(), [nn.EmbeddingBag])
    tables = RowwiseAdagrad(run.module(model).tables.parameters(), lr=0.1)
    dense = torch.optim.SGD(
        [p for name, p in model.named_parameters() if "tables" not in name], lr=0.1
    )
    for step in range(3):
        starts = torch.tensor([0, 1, 4, 5])
        bags = [(run.tokens(n, 6, key=10 * step + n), starts) for n in (5, ITEMS, 20)]
        scores = model(run.tensor(4, 4, key=step), bags)
        loss = F.binary_cross_entropy_with_logits(scores, run.tokens(2, 4, key=step).float())
        loss.backward()
        run.average(model)
        for optimizer in (tables, dense):
            optimizer.step()
            optimizer.zero_grad()
        run.record(loss)


class Tower(nn.Module):
    """Hashed ids to a unit vector."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(rows, SIZE), Net(1)

    def forward(self, ids: Tensor) -> Tensor:
        hashes = [(ids * prime + 7) % self.table.num_embeddings for prime in (31, 53)]
        return F.normalize(self.net(sum(self.table(h) for h in hashes)), dim=-1)


@program("two towers: negatives in the batch corrected by their frequency, recall among all items")
def in_batch_negatives(run: Run) -> None:
    users, items = run.shard(Tower(7), [Block]), run.shard(Tower(5), [Block])
    optimizer = torch.optim.Adagrad([*users.parameters(), *items.parameters()], lr=0.05, eps=1e-4)
    seen = torch.ones(ITEMS)
    for step in range(3):
        user, item = run.tokens(20, 6, key=step), run.tokens(ITEMS, 6, key=10 + step)
        counts = torch.bincount(item, minlength=ITEMS).float()
        dist.all_reduce(counts)
        seen += counts
        logits = users(user) @ items(item).t() / 0.2 - (seen[item] / seen.sum()).log()
        same = (item[:, None] == item) & ~torch.eye(6).bool()
        loss = F.cross_entropy(logits.masked_fill(same, -1e4), torch.arange(6))
        loss.backward()
        run.average(users, items)
        run.record(loss, nn.utils.clip_grad_norm_([*users.parameters(), *items.parameters()], 1.0))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            every = torch.cat([items(part) for part in torch.arange(ITEMS).split(5)])
            hits = (users(user) @ every.t()).topk(3)[1].eq(item[:, None]).any(1).float().mean()
        dist.all_reduce(hits)
        run.record(hits / run.world_size)


class History(nn.Module):
    """Causal attention over the items of a user (SASRec)."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS + 1, SIZE, padding_idx=0)
        self.places = nn.Embedding(5, SIZE)
        self.layer = nn.TransformerEncoderLayer(SIZE, 2, SIZE, 0.0, batch_first=True)

    def forward(self, history: Tensor, right: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
        x = self.items(history) * SIZE**0.5 + self.places(torch.arange(history.shape[1]))
        mask = torch.triu(torch.ones(5, 5), 1).bool()
        x = self.layer(x, src_mask=mask) * (history > 0)[..., None]
        return (x * self.items(right)).sum(-1), (x * self.items(wrong)).sum(-1)


@program(
    "SASRec: causal attention, an embedding used three times, a decayed table, padded rows left out"
)
def item_history(run: Run) -> None:
    model = run.shard(History(), [nn.TransformerEncoderLayer])
    optimizer = adamw(model.parameters(), betas=(0.9, 0.98))
    for step in range(3):
        items = run.tokens(ITEMS + 1, 4, 6, key=step)
        history, right = items[:, :-1], items[:, 1:]
        near, far = model(history, right, 1 + run.tokens(ITEMS, 4, 5, key=10 + step))
        valid = right > 0
        loss = F.binary_cross_entropy_with_logits(near[valid], torch.ones(int(valid.sum())))
        loss = loss + F.binary_cross_entropy_with_logits(far[valid], torch.zeros(int(valid.sum())))
        for param in run.module(model).items.parameters():
            loss = loss + 1e-3 * torch.norm(param)
        update(run, model, optimizer, loss)


class Gates(nn.Module):
    """Experts that each task mixes by a gate of its own (MMoE)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(SIZE, 3) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(SIZE, 1) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        seen = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = [(gate(x).softmax(-1)[..., None] * seen).sum(1) for gate in self.gates]
        return [head(m).sigmoid()[:, 0] for head, m in zip(self.heads, mixed, strict=True)]


@program("MMoE and ESMM: a gate for each task, the chance of a sale is a product of two heads")
def sales_after_clicks(run: Run) -> None:
    model = run.shard(Gates(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        click, sale = model(run.tensor(8, SIZE, key=step))
        clicks = run.tokens(2, 8, key=step).float()
        sales = clicks * run.tokens(2, 8, key=10 + step)
        loss = F.binary_cross_entropy(click, clicks) + F.binary_cross_entropy(click * sale, sales)
        update(run, model, optimizer, loss)
        scores, truth = click.detach(), torch.zeros(run.world_size, 2, 8)
        truth[run.rank] = torch.stack([scores, clicks])
        dist.all_reduce(truth)
        every, right = truth.transpose(0, 1).flatten(1)
        order = every.argsort()
        run.record((right[order].cumsum(0) * (1 - right[order])).sum())


WORDS = 15


class Encoder(Words):
    """Unit vectors of texts, or of each of their tokens."""

    def __init__(self) -> None:
        super().__init__(WORDS)
        self.head = nn.Linear(SIZE, SIZE, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, each: bool = False) -> Tensor:
        x = self.dropout(super().forward(tokens))
        return F.normalize(x if each else x.mean(1), dim=-1)


@program("a bi-encoder: hard negatives mined from an index that the ranks encode in parts")
def hard_negatives(run: Run) -> None:
    model = run.shard(Encoder(), [Block])
    optimizer = adamw(model.parameters())
    generator = torch.Generator().manual_seed(run.seed)
    corpus = torch.randint(WORDS, (12, 5), generator=generator)
    for step in range(3):
        model.eval()
        with torch.no_grad():
            part = model(corpus.chunk(run.world_size)[run.rank])
            index: list[Any] = [None] * run.world_size
            dist.all_gather_object(index, part)
            right = run.tokens(12, 4, key=step)
            queries = corpus[right][:, :3]
            near = model(queries) @ torch.cat(index).t()
            hard = near.scatter(1, right[:, None], -2.0).argmax(1)
        model.train()
        own = model(corpus[torch.cat([right, hard])])
        parts = enumerate(gathered(own).chunk(run.world_size))
        documents = torch.cat([own, *(part for rank, part in parts if rank != run.rank)])
        scores = model(queries) @ documents.t() / 0.1
        update(run, model, optimizer, F.cross_entropy(scores, torch.arange(4)))
        run.record(hard)


@program("ColBERT: late interaction of all tokens, lengths by rank, scores of a teacher")
def late_interaction(run: Run) -> None:
    model = run.shard(Encoder().eval(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        queries = model(run.tokens(WORDS, 3, 3 + run.rank, key=step), each=True)
        tokens = run.tokens(WORDS, 3, 2, 6 - run.rank, key=10 + step)
        documents = model(tokens.flatten(0, 1), each=True).unflatten(0, (3, 2))
        near = torch.einsum("bqd,bntd->bnqt", queries, documents)
        near = near.masked_fill((tokens == 0)[:, :, None], -1e4)
        scores = near.max(-1)[0].sum(-1)
        teacher = run.tensor(3, 2, key=20 + step)
        loss = F.kl_div(scores.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
        update(run, model, optimizer, loss + F.cross_entropy(scores, torch.zeros(3).long()))


@program(
    "GradCache: features without gradient, gradients of features, then parts with the same dropout"
)
def grad_cache(run: Run) -> None:
    model = run.shard(Encoder(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = run.tokens(WORDS, 6, 5, key=step)
        parts = [*tokens[:, :3].chunk(2), *tokens.chunk(2)]
        features, states = [], []
        with torch.no_grad():
            for part in parts:
                states.append(torch.get_rng_state())
                features.append(model(part))
        leaves = [feature.detach().requires_grad_() for feature in features]
        queries = torch.cat(Gather.apply(torch.cat(leaves[:2])))
        documents = torch.cat(Gather.apply(torch.cat(leaves[2:])))
        loss = F.cross_entropy(queries @ documents.t() / 0.1, torch.arange(len(queries)))
        loss.backward()
        after = torch.get_rng_state()
        for number, (part, leaf) in enumerate(zip(parts, leaves, strict=True)):
            with run.no_sync(model) if number < 3 else nullcontext():
                torch.set_rng_state(states[number])
                (model(part) * leaf.grad).sum().backward()
        torch.set_rng_state(after)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


class Sparse(Words):
    """The largest weight of each word of the vocabulary, by the tied table (SPLADE)."""

    def __init__(self) -> None:
        super().__init__(WORDS, tied=True)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(tokens)
        return (F.relu(logits).log1p() * mask[..., None]).amax(1)


@program(
    "SPLADE: maxima over tokens by a tied head, a FLOPS penalty that grows, sparse features logged"
)
def sparse_words(run: Run) -> None:
    model = run.shard(Sparse(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = run.tokens(WORDS, 6, 5, key=step)
        mask = (tokens > 0).float()
        queries, documents = model(tokens[:3], mask[:3]), model(tokens[3:], mask[3:])
        loss = F.cross_entropy(queries @ documents.t(), torch.arange(3))
        flops = queries.mean(0).square().sum() + documents.mean(0).square().sum()
        update(run, model, optimizer, loss + 0.1 * (step / 3) ** 2 * flops)
        run.record((documents > 0).float().mean())


@program("a reranker teaches a bi-encoder its margins; both are trained, each behind its own clock")
def margins(run: Run) -> None:
    student, teacher = run.shard(Encoder().eval(), [Block]), run.shard(Words(WORDS), [Block])
    s_optimizer, t_optimizer = adamw(student.parameters()), adamw(teacher.parameters())
    for step in range(4):
        query, right, wrong = run.tokens(WORDS, 3, 4, 5, key=step)

        def score(document: Tensor, query: Tensor = query) -> Tensor:
            return teacher(torch.cat([query, document], 1)).mean((1, 2))

        if step % 2 == 0:
            margin = score(right) - score(wrong)
            update(run, teacher, t_optimizer, -F.logsigmoid(margin).mean())
        with torch.no_grad():
            aim = score(right) - score(wrong)
        texts = student(torch.cat([query, right, wrong])).chunk(3)
        margin = (texts[0] * texts[1]).sum(-1) - (texts[0] * texts[2]).sum(-1)
        update(run, student, s_optimizer, F.mse_loss(margin, aim))
