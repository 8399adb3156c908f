"""Programs: networks whose calls follow the data of each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, adamw, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

WORDS = 11


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
