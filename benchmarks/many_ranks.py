"""Measures the CPU time of a step on 2 to 24 real ranks, with DDP and FSDP2 in the same processes.

Usage: python benchmarks/many_ranks.py

The model is tiny, so messages take all the time: collectives, whose cost hardly changes, and
control messages, whose number grows with the number of ranks.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from statistics import mean, median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from bench.lib.forked import run_forked
from bench.lib.results import Results
from bench.lib.systems import System, import_zerocore, wrap_model
from bench.lib.tables import Table

WARM_UP = 25  # steps; in the first 17 ranks compare their collectives
BATCH = 4
NOTES = (
    "CPU ms a step of one rank: mean over the ranks, median over the rounds, in which each system "
    "takes its turn. Measured on the CPU, over loopback, with ranks that share the cores.",
    "zerocore chooses the units: one of all layers, as they are small. FSDP2 has a unit for each "
    "layer, and so does zerocore by layer. Promised: with static_graph=True.",
    "Wanted: stage 0 at most 1.3 of DDP at 24 ranks.",
)
Found = dict[str, list[float]]


class Chain(nn.Module):
    """Layers of one width."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


SYSTEMS = (
    System("ddp", 0, "DDP"),
    System("zerocore", 0, "stage 0", finds_units=True),
    System("zerocore", 0, "stage 0, promised", finds_units=True, static_graph=True),
    System("zerocore", 0, "stage 0, by layer"),
    System("fsdp2", 3, "FSDP2"),
    System("zerocore", 3, "stage 3", finds_units=True),
    System("zerocore", 3, "stage 3, promised", finds_units=True, static_graph=True),
    System("zerocore", 3, "stage 3, by layer"),
)
LABELS = [system.label for system in SYSTEMS]


def make_step(system: System, depth: int, width: int) -> Callable[[], None]:
    """Makes a training step of a new model."""
    torch.manual_seed(0)
    chain = Chain(depth, width)
    model = wrap_model(system, chain, chain.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, width)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def used_seconds() -> float:
    """Returns the CPU time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def on_this_rank(depth: int, width: int, rounds: int, num_steps: int) -> Found:
    """Returns the CPU ms of a step, by system and round."""
    steps = {system.label: make_step(system, depth, width) for system in SYSTEMS}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    found: Found = {name: [] for name in LABELS}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            begin = used_seconds()
            for _ in range(num_steps):
                step()
            found[name].append((used_seconds() - begin) / num_steps * 1e3)
    return found


def table_of(results: dict[int, list[Found]], title: str) -> Table:
    """Shows each system's time and its ratio to its peer's, a row a number of ranks."""
    table = Table(title, ["ranks", *LABELS])
    for size, ranks in results.items():
        rounds = {
            name: [mean(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]
            for name in LABELS
        }
        row = [str(size)]
        for name, times in rounds.items():
            peer = rounds["FSDP2" if "3" in name else "DDP"]
            ratio = median(a / b for a, b in zip(times, peer, strict=True))
            shown = f"{median(times):.2f}"
            row.append(f"{shown} ({ratio:.2f})" if name.startswith("stage") else shown)
        table.add(*row)
    return table


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,4,8,16,24",
    depth: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the model.")] = 32,
    rounds: Annotated[int, typer.Option(help="Turns of each system.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of a turn.")] = 40,
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints the CPU time of a step, by the number of ranks."""
    import_zerocore()
    torch.set_num_threads(1)
    title = f"{depth} layers of width {width}, gloo: CPU ms a step (of the peer)"
    found = {}
    with Results("many_ranks", save) as results:
        for size in map(int, ranks.split(",")):
            found[size] = run_forked(lambda: on_this_rank(depth, width, rounds, steps), size)
            table = table_of(found, title)
            table.notes = list(NOTES)
            results.write([table], {"cpu_ms": found, "depth": depth, "width": width})


if __name__ == "__main__":
    typer.run(main)
