"""Gathers that nobody reads: which backwards read a unit's parameters, and what is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks
from zerocore.planning.prediction import planned_events

WIDTH, WORDS, STEPS = 8, 32, 4
Way = Callable[["Table", Tensor], Any]


class Table(nn.Embedding):
    """The unit in question: what its call does is `way`, which is given the unit and indices."""

    def __init__(self, way: Way) -> None:
        super().__init__(WORDS, WIDTH)
        self.way = way
        self.register_buffer("scale", torch.full((1,), 3.0))

    def forward(self, index: Tensor) -> Any:
        return self.way(self, index)


class Model(nn.Module):
    """A table, two blocks and a head, which may be the table again."""

    def __init__(self, way: Way, tied: bool) -> None:
        super().__init__()
        self.table = Table(way)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, index: Tensor, around: Callable[..., Any]) -> Tensor:
        x = around(self.table, index)
        x = x[0] + x[1] if isinstance(x, tuple) else x
        for block in self.blocks:
            x = torch.tanh(block(x))
        result: Tensor = self.head(x)
        return result


class Stash(torch.autograd.Function):
    """Keeps the weight where no graph shows it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0] * ctx.weight.norm(), torch.zeros_like(ctx.weight)


def look_up(table: Table, index: Tensor) -> Tensor:
    return F.embedding(index, table.weight)


def scaled(table: Table, index: Tensor) -> Tensor:
    return (look_up(table, index) * table.scale).unsqueeze(0).squeeze(0)


def twice(table: Table, index: Tensor) -> tuple[Tensor, Tensor]:
    return look_up(table, index), look_up(table, index + 1)


def multiplied(table: Table, index: Tensor) -> Tensor:
    return look_up(table, index) * table.weight[0]


def hooked(table: Table, index: Tensor) -> Tensor:
    found, weight = look_up(table, index), table.weight
    found.register_hook(lambda grad: grad * weight.norm())
    return found


def hooked_on_rank_0(table: Table, index: Tensor) -> Tensor:
    return (look_up if dist.get_rank() else hooked)(table, index) * 1.0


def stashed(table: Table, index: Tensor) -> Tensor:
    result: Tensor = Stash.apply(look_up(table, index), table.weight)
    return result


def again_inside(reentrant: bool) -> Way:
    # A reentrant checkpoint needs an input that requires a gradient.
    def run(table: Table, index: Tensor) -> Any:
        one = torch.ones(1, requires_grad=True)
        return checkpoint(lambda one: look_up(table, index) * one, one, use_reentrant=reentrant)

    return run


def as_it_is(table: Table, index: Tensor) -> Any:
    return table(index)


def again_around(table: Table, index: Tensor) -> Any:
    return checkpoint(table, index, use_reentrant=False)


def with_hooks_around(table: Table, index: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return table(index)


def hooked_later(table: Table, index: Tensor) -> Any:
    """The backward reads the shards, by their rules, on all ranks."""
    found = table(index)
    found.register_hook(lambda grad: grad * table.weight.detach().max())
    return found


def read_later(table: Table, index: Tensor) -> Any:
    """A product needs the full weight, which is gathered out of turn."""
    found = table(index)
    found.register_hook(lambda grad: grad + grad @ table.weight.t() @ table.weight)
    return found


UNREAD: dict[str, tuple[Way, Callable[..., Any]]] = {
    "look up": (look_up, as_it_is),
    "scaled": (scaled, as_it_is),
    "two outputs": (twice, as_it_is),
    "hooked later": (look_up, hooked_later),
}
READ: dict[str, tuple[Way, Callable[..., Any]]] = {
    "multiplied": (multiplied, as_it_is),
    "hooked": (hooked, as_it_is),
    "hooked on rank 0": (hooked_on_rank_0, as_it_is),
    "stashed": (stashed, as_it_is),
    "again inside": (again_inside(False), as_it_is),
    "again inside, reentrant": (again_inside(True), as_it_is),
    "again around": (look_up, again_around),
    "hooks around": (look_up, with_hooks_around),
    "read later": (look_up, read_later),
}
NOT_PLANNED = (again_around, read_later)  # calls that a backward makes are in no plan


def train(
    way: Way, around: Callable[..., Any], stage: int, tied: bool = False
) -> tuple[list[float], int]:
    """Losses, and how often a step gathers the table; a steady step is as planned."""
    torch.manual_seed(0)
    model = zerocore.shard(Model(way, tied), stage=stage, units=[Table, nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        index = torch.arange(step, step + 6) + dist.get_rank()
        with zerocore.record_events(model) as events:
            loss = model(index, around).square().mean()
            loss.backward(retain_graph=step == 1)
            if step == 1:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    actual = [(e.op, e.unit, e.nbytes, e.pool_nbytes) for e in events]
    if stage == 3 and around not in NOT_PLANNED:
        assert actual == planned_events(model)
    gathers = [e for e in events if e.op == "all_gather" and e.unit.startswith("table")]
    return losses, len(gathers)


def compare_all() -> dict[str, int]:
    """How often stage 3 gathers the table in a step; losses are those of stage 2."""
    found = {}
    for name, case in {**UNREAD, **READ}.items():
        expected, _ = train(*case, stage=2)
        losses, found[name] = train(*case, stage=3)
        assert losses == expected, name
    return found


def test_what_is_not_read_is_not_gathered() -> None:
    """A step gathers the table for its forward, and again only where its backward may read it."""
    for found in run_ranks(compare_all, 2):
        assert found == dict.fromkeys(UNREAD, 1) | dict.fromkeys(READ, 2)


def compare_tied() -> list[tuple[str, str]]:
    expected, _ = train(look_up, as_it_is, stage=2, tied=True)
    losses, gathers = train(look_up, as_it_is, stage=3, tied=True)
    assert losses == expected
    assert gathers == 2  # for the lookup and for the head, whose backward comes right after
    torch.manual_seed(0)
    model = zerocore.shard(Model(look_up, True), stage=3, units=[Table, nn.Linear], prefetch=0)
    for _ in range(2):
        with zerocore.record_events(model) as events:
            model(torch.arange(6), as_it_is).sum().backward()
    return [(e.op, e.unit) for e in events if e.op in ("all_gather", "reduce_scatter")]


def test_calls_of_a_tied_table_are_looked_at_one_by_one() -> None:
    tied, first, second = "table + head", "blocks.0", "blocks.1"
    gathers = [tied, first, second, tied, second, first]
    expected = [
        *(("all_gather", unit) for unit in gathers[:5]),
        ("reduce_scatter", second),
        ("all_gather", first),
        ("reduce_scatter", first),
        ("reduce_scatter", tied),
    ]
    for found in run_ranks(compare_tied, 2):
        assert found == expected
