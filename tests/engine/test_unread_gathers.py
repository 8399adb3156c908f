"""Gathers that nobody reads: a lookup in an embedding without hooks is not gathered again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks
from zerocore.planning.prediction import planned_events

WIDTH, WORDS, STEPS = 8, 32, 4
Attach = Callable[
    [nn.Embedding], Any
]  # hooks; may return the handle of one that is not the table's
Around = Callable[[nn.Embedding, Tensor], Tensor]  # calls the table


class Scaled(nn.Embedding):
    """Not a lookup by its class."""

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index) * self.weight[0]


class Model(nn.Module):
    """A table, two blocks and a head, which may be the table again."""

    def __init__(self, make: type[nn.Embedding], tied: bool) -> None:
        super().__init__()
        self.table = make(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, index: Tensor, around: Around) -> Tensor:
        x = around(self.table, index)
        for block in self.blocks:
            x = torch.tanh(block(x))
        result: Tensor = self.head(x)
        return result


def multiply(module: Any, _args: Any, output: Tensor) -> Tensor:
    return output * module.weight[0]


def nothing(table: nn.Embedding) -> None:
    pass


def after(table: nn.Embedding) -> None:
    table.register_forward_hook(multiply)


def after_on_rank_0(table: nn.Embedding) -> None:
    if dist.get_rank() == 0:
        after(table)


def in_backward(table: nn.Embedding) -> None:
    table.register_full_backward_pre_hook(lambda m, grads: (grads[0] * m.weight.norm(),))


def everywhere(table: nn.Embedding) -> Any:
    return register_module_forward_hook(
        lambda m, args, out: multiply(m, args, out) if m is table else None
    )


def replaced(table: Any) -> None:
    plain = table.forward
    table.forward = lambda index: plain(index) * table.weight[0]


def as_it_is(table: nn.Embedding, index: Tensor) -> Tensor:
    return table(index)


def again(table: nn.Embedding, index: Tensor) -> Tensor:
    found: Tensor = checkpoint(table, index, use_reentrant=False)
    return found


def again_reentrant(table: nn.Embedding, index: Tensor) -> Tensor:
    one = torch.ones(1, requires_grad=True)  # such a checkpoint needs an input with a gradient
    found: Tensor = checkpoint(lambda one: table(index) * one, one, use_reentrant=True)
    return found


def saved_on_the_host(table: nn.Embedding, index: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return table(index)


def hooked_later(table: nn.Embedding, index: Tensor) -> Tensor:
    """The backward reads the shards, by their rules, on all ranks."""
    found = table(index)
    found.register_hook(lambda grad: grad * table.weight.detach().max())
    return found


def read_later(table: nn.Embedding, index: Tensor) -> Tensor:
    """A product needs the full weight, which is gathered out of turn."""
    found = table(index)
    found.register_hook(lambda grad: grad + grad @ table.weight.t() @ table.weight)
    return found


# The table's class, its hooks, the call, and how often a step gathers it.
CASES: dict[str, tuple[type[nn.Embedding], Attach, Around, int]] = {
    "lookup": (nn.Embedding, nothing, as_it_is, 1),
    "saved on the host": (nn.Embedding, nothing, saved_on_the_host, 1),
    "hooked later": (nn.Embedding, nothing, hooked_later, 1),
    "another class": (Scaled, nothing, as_it_is, 2),
    "forward hook": (nn.Embedding, after, as_it_is, 2),
    "forward hook on rank 0": (nn.Embedding, after_on_rank_0, as_it_is, 2),
    "backward hook": (nn.Embedding, in_backward, as_it_is, 2),
    "hook of all modules": (nn.Embedding, everywhere, as_it_is, 2),
    "replaced forward": (nn.Embedding, replaced, as_it_is, 2),
    "again": (nn.Embedding, nothing, again, 2),
    "again, reentrant": (nn.Embedding, nothing, again_reentrant, 2),
    "read later": (nn.Embedding, nothing, read_later, 2),
}
NOT_PLANNED = (again, again_reentrant, read_later)  # calls that a backward makes are in no plan


def train(
    make: type[nn.Embedding], attach: Attach, around: Around, stage: int, tied: bool = False
) -> tuple[list[float], int]:
    """Losses, and how often a step gathers the table; a steady step is as planned."""
    torch.manual_seed(0)
    units = [nn.Embedding, nn.Linear]
    model: Any = zerocore.shard(Model(make, tied), stage=stage, units=units)
    handle = attach(model.table)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        index = torch.arange(step, step + 6) + dist.get_rank()
        with zerocore.reporting.record_events(model) as events:
            loss = model(index, around).square().mean()
            loss.backward(retain_graph=step == 1)
            if step == 1:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if handle is not None:
        handle.remove()
    actual = [(e.op, e.unit, e.nbytes, e.pool_nbytes) for e in events]
    if stage == 3 and around not in NOT_PLANNED:
        assert actual == planned_events(model)
    gathers = [e for e in events if e.op == "all_gather" and e.unit.startswith("table")]
    return losses, len(gathers)


def compare_all() -> None:
    """Losses are those of stage 2."""
    for name, (*case, count) in CASES.items():
        print(name, flush=True)
        expected, _ = train(*case, stage=2)
        losses, gathers = train(*case, stage=3)
        assert losses == expected, name
        assert gathers == count, name


def test_what_is_not_read_is_not_gathered() -> None:
    """A step gathers the table for its forward, and again only where its backward may read it."""
    run_ranks(compare_all, 2)


def compare_one_rank() -> None:
    for name, (*case, _) in CASES.items():
        assert train(*case, stage=3)[0] == train(*case, stage=2)[0], name


def test_one_rank_and_three_read_what_they_need() -> None:
    run_ranks(compare_one_rank, 1)
    run_ranks(compare_one_rank, 3)


def hook_for_a_while() -> list[int]:
    """A hook on an embedding makes its weight be gathered for the backward, until it is removed."""
    torch.manual_seed(0)
    model: Any = zerocore.shard(
        Model(nn.Embedding, False), stage=3, units=[nn.Embedding, nn.Linear]
    )
    found, handle = [], None
    for step in range(6):
        if step == 2 and dist.get_rank() == 1:
            handle = model.table.register_forward_hook(multiply)
        if step == 4 and handle is not None:
            handle.remove()
        with zerocore.reporting.record_events(model) as events:
            model(torch.arange(6), as_it_is).sum().backward()
        found.append(sum(e.op == "all_gather" and e.unit == "table" for e in events))
    return found


def test_a_hook_that_comes_and_goes_on_one_rank() -> None:
    assert run_ranks(hook_for_a_while, 2) == [[1, 1, 2, 2, 1, 1]] * 2


def compare_tied() -> list[tuple[str, str]]:
    case = (nn.Embedding, nothing, as_it_is)
    expected, _ = train(*case, stage=2, tied=True)
    losses, gathers = train(*case, stage=3, tied=True)
    assert losses == expected
    assert gathers == 2  # for the lookup and for the head, whose backward comes right after
    torch.manual_seed(0)
    units = [nn.Embedding, nn.Linear]
    model = zerocore.shard(
        Model(nn.Embedding, True),
        stage=3,
        units=units,
        communication=zerocore.Communication(prefetch=0),
    )
    for _ in range(2):
        with zerocore.reporting.record_events(model) as events:
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
