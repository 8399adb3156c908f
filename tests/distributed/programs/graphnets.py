"""Programs: networks whose sizes or calls follow each rank's own graphs, trees or samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, adamw, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

HEADS = 2
WORDS = 11


def graph(run: Run, step: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Features of nodes, and edges with a loop at each node; some 3 edges a node."""
    edges = torch.stack([run.tokens(nodes, 2 * nodes, key=step + end) for end in (0, 100)])
    return run.tensor(nodes, SIZE, key=step), torch.cat(
        [edges, torch.arange(nodes).repeat(2, 1)], 1
    )


class Messages(nn.Module):
    """Sums of messages over edges, normalised by degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degrees = torch.zeros(len(x)).scatter_add_(0, target, torch.ones(len(target)))
        weight = (degrees[source] * degrees[target]).rsqrt()
        messages = self.linear(x)[source] * weight[:, None]
        return x + F.relu(self.norm(torch.zeros_like(x).index_add_(0, target, messages)))


class Molecules(nn.Module):
    """A batch of graphs, each with a virtual node, and a number for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Messages() for _ in range(2))
        self.virtual, self.mix = nn.Embedding(1, SIZE), nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 1)
        nn.init.zeros_(self.virtual.weight)

    def forward(self, x: Tensor, edges: Tensor, owner: Tensor, count: int) -> Tensor:
        virtual = self.virtual(torch.zeros(count, dtype=torch.long))
        for layer in self.layers:
            x = layer(x + virtual[owner], edges)
            virtual = virtual + torch.tanh(
                self.mix(torch.zeros_like(virtual).index_add(0, owner, x))
            )
        sizes = torch.bincount(owner, minlength=count).clamp(min=1)
        return self.head(torch.zeros(count, SIZE).index_add(0, owner, x) / sizes[:, None])[:, 0]


@program(
    "a GCN with a virtual node: messages by index_add, batches of graphs of the rank's own sizes"
)
def graph_convolution(run: Run) -> None:
    model = run.shard(Molecules(), [Messages])
    optimizer = adamw(model.parameters())
    for step in range(3):
        x, edges = graph(run, step, nodes=7 + 2 * run.rank + step)
        owner = torch.arange(len(x)) * 3 // len(x)
        update(run, model, optimizer, F.l1_loss(model(x, edges, owner, 3), run.tensor(3, key=step)))


class Attention(nn.Module):
    """Attention over the edges of each node (GATv2)."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE)
        self.score = nn.Parameter(torch.randn(HEADS, SIZE // HEADS))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        sent = self.source(x).unflatten(-1, (HEADS, -1))[source]
        pair = F.leaky_relu(sent + self.target(x).unflatten(-1, (HEADS, -1))[target], 0.2)
        scores = (pair * self.score).sum(-1)
        index = target[:, None].expand_as(scores)
        most = torch.zeros(len(x), HEADS).scatter_reduce(
            0, index, scores, "amax", include_self=False
        )
        weights = (scores - most[target]).exp()
        total = torch.zeros(len(x), HEADS).scatter_add(0, index, weights)
        weights = F.dropout(weights / total[target], 0.2, self.training)
        heads = torch.zeros(len(x), HEADS, SIZE // HEADS)
        return F.elu(heads.index_add(0, target, weights[..., None] * sent).flatten(1))


class Stack(nn.Module):
    """Layers that are given features and edges, and a head."""

    def __init__(self, kinds: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(SIZE, kinds)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x)


@program(
    "a GAT: softmax over edges by scatter_reduce, labels of some nodes, early stopping by rank 0"
)
def graph_attention(run: Run) -> None:
    model = run.shard(Stack(), [Attention])
    optimizer = adamw(model.parameters(), weight_decay=0.05)
    best, patience = torch.tensor(float("inf")), 0
    x, edges = graph(run, 0, nodes=8 + run.rank)
    truth, known = run.tokens(3, len(x)), torch.arange(len(x)) % 2 == 0
    for _ in range(6):
        update(run, model, optimizer, F.cross_entropy(model(x, edges)[known], truth[known]))
        model.eval()
        with torch.no_grad():
            held_out = F.cross_entropy(model(x, edges)[~known], truth[~known])
        model.train()
        dist.broadcast(held_out, src=0)
        patience = 0 if held_out < best else patience + 1
        best = torch.minimum(best, held_out)
        if patience == 2:
            break
    run.record(best, patience)


class Sampled(nn.Module):
    """GraphSAGE over an embedding of all nodes: a layer for each hop of sampled neighbours."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(nodes, SIZE)
        self.own = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.others = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))

    def forward(self, hops: list[Tensor], counts: list[Tensor]) -> Tensor:
        rows = [self.embed(hop) for hop in hops]
        for own, others in zip(self.own, self.others, strict=True):
            mixed = []
            for depth in range(len(rows) - 1):
                owner = torch.arange(len(rows[depth])).repeat_interleave(counts[depth])
                total = torch.zeros_like(rows[depth]).index_add(0, owner, rows[depth + 1])
                mean = total / counts[depth].clamp(min=1)[:, None]
                mixed.append(F.normalize(F.relu(own(rows[depth]) + others(mean)), dim=-1))
            rows = mixed
        return rows[0]


@program("GraphSAGE: sampled neighbours, some nodes with none, negatives, links predicted")
def sampled_neighbours(run: Run) -> None:
    nodes = 20
    model = run.shard(Sampled(nodes), [nn.Linear])
    optimizer = adamw(model.parameters(), lr=0.02)
    for step in range(3):
        hops, counts = [run.tokens(nodes, 6 + 3 * run.rank, key=step)], []
        for depth in range(2):
            counts.append(run.tokens(3, len(hops[-1]), key=10 * step + depth))
            hops.append(run.tokens(nodes, int(counts[-1].sum()), key=20 * step + depth))
        source, target, wrong = model(hops, counts).chunk(3)
        near, far = (source * target).sum(-1), (source * wrong).sum(-1)
        update(run, model, optimizer, -F.logsigmoid(near).mean() - F.logsigmoid(-far).mean())


class Potential(nn.Module):
    """An energy of atoms from their distances (SchNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(4, SIZE)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(6, SIZE), nn.Softplus(), nn.Linear(SIZE, SIZE))
            for _ in range(2)
        )
        self.head = nn.Sequential(nn.Linear(SIZE, SIZE), nn.SiLU(), nn.Linear(SIZE, 1))

    def forward(self, kinds: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        places.requires_grad_()
        source, target = (~torch.eye(len(kinds)).bool()).nonzero(as_tuple=True)
        distances = (places[source] - places[target]).norm(dim=-1)
        basis = (-((distances[:, None] - torch.arange(6) / 2) ** 2)).exp()
        x = self.kinds(kinds)
        for layer in self.filters:
            x = x + torch.zeros_like(x).index_add(0, target, x[source] * layer(basis))
        energy = self.head(x).sum()
        forces = -torch.autograd.grad(energy, places, create_graph=self.training)[0]
        return energy, forces


@program(
    "a potential of molecules: forces are gradients within the forward, energy and forces in loss"
)
def forces(run: Run) -> None:
    model = run.shard(Potential(), [nn.Sequential])
    optimizer = sgd(model, lr=0.01)
    for step in range(3):
        atoms = 4 + run.rank + step
        kinds, places = run.tokens(4, atoms, key=step), run.tensor(atoms, 3, key=step)
        energy, force = model(kinds, places)
        loss = energy.square() / atoms + F.mse_loss(force, run.tensor(atoms, 3, key=20 + step))
        update(run, model, optimizer, loss)
        model.eval()
        run.record(model(kinds, places.detach())[1].detach())
        model.train()


class Ponders(nn.Module):
    """Calls its block until all samples have halted."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.out = nn.Linear(SIZE, SIZE), Block(), nn.Linear(SIZE, SIZE)
        self.halt = nn.Linear(SIZE, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        x, total, left, times = self.inp(x), torch.zeros(()), torch.ones(len(x)), 0
        answer, ponder = torch.zeros_like(x), torch.zeros(())
        while times == 0 or (times < 6 and bool((left > 0.2).any())):
            x = self.block(x)
            share = left * self.halt(x).sigmoid()[:, 0]
            answer, left = answer + share[:, None] * x, left - share
            ponder, times = ponder + left.mean(), times + 1
        return self.out(answer + left[:, None] * x) + total, ponder, times


@program(
    "adaptive computation: a block called until the rank's samples halt, a price for each call"
)
def pondering(run: Run) -> None:
    model = run.shard(Ponders(), [Block])
    optimizer = sgd(model)
    for step in range(4):
        scale = 3.0 if run.rank == step % 2 else 0.3
        answer, ponder, times = model(scale * run.tensor(3, SIZE, key=step))
        update(run, model, optimizer, (answer - 1).square().mean() + 0.01 * ponder)
        run.record(times)


class Trees(nn.Module):
    """Folds trees bottom-up, by calls of itself (a recursive network)."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = (
            nn.Embedding(WORDS, SIZE),
            nn.Sequential(nn.Linear(2 * SIZE, SIZE), nn.Tanh()),
        )
        self.kinds = nn.Linear(SIZE, 2)

    def fold(self, tree: Any) -> Tensor:
        if isinstance(tree, int):
            return self.leaf(torch.tensor(tree))
        return self.join(torch.cat([self.fold(part) for part in tree]))

    def forward(self, trees: list[Any]) -> Tensor:
        return self.kinds(torch.stack([self.fold(tree) for tree in trees]))


def tree_of(words: list[int], by: int) -> Any:
    """A tree whose shape depends on the number."""
    if len(words) == 1:
        return words[0]
    cut = 1 + by % (len(words) - 1)
    return tree_of(words[:cut], by + 1), tree_of(words[cut:], by + 2)


@program("recursive networks over trees: the calls follow the trees of each rank")
def folded_trees(run: Run) -> None:
    model = run.shard(Trees(), [nn.Sequential])
    optimizer = adamw(model.parameters())
    for step in range(3):
        words = run.tokens(WORDS, 2, 4 + run.rank + step, key=step).tolist()
        trees = [tree_of(row, index + run.rank) for index, row in enumerate(words)]
        loss = F.cross_entropy(model(trees), run.tokens(2, 2, key=step))
        update(run, model, optimizer, loss)


class Layouts(nn.Module):
    """Modules in the order that a question asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: Block() for name in ("find", "relate", "count")})
        self.head = nn.Linear(SIZE, 3)

    def forward(self, x: Tensor, layouts: list[list[str]]) -> Tensor:
        rows = []
        for row, names in zip(x, layouts, strict=True):
            for name in names:
                row = self.parts[name](row)
            rows.append(row)
        return self.head(torch.stack(rows))


@program(
    "module networks: each sample has a layout of its own, some modules are not called", unused=True
)
def module_networks(run: Run) -> None:
    model = run.shard(Layouts(), [Block])
    optimizer = adamw(model.parameters())
    names = ("find", "relate", "count")
    for step in range(4):
        picks = run.tokens(3, 2, 2, key=step).tolist()
        layouts = [[names[i] for i in row[: 1 + step % 2]] for row in picks]
        loss = F.cross_entropy(model(run.tensor(2, SIZE, key=step), layouts), run.tokens(3, 2))
        update(run, model, optimizer, loss)
        run.record(layouts)
