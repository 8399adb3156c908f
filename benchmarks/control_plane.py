"""Times a round of control messages on 2 to 256 real endpoints, beside an all-reduce of gloo.

Usage: python benchmarks/control_plane.py

In a round every rank tells all others 128 bytes, as at the end of each forward. All endpoints are
processes of this machine and share its cores, so a round's time is that of all ranks' work: what
a rank costs in a large job is in the columns of processor time, messages and sockets.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from bench.lib.forked import TIMEOUT, run_forked
from bench.lib.results import Results
from bench.lib.systems import import_zerocore
from bench.lib.tables import Table

LAZY = "TORCH_GLOO_LAZY_INIT"
MOST_IN_FULL_MESH = 64  # ranks of the all-reduce
WARM_UP = 5
NUMEL = 5  # int64, as the message at the end of a forward had
NOTES = (
    "Measured on the CPU, over loopback; medians over the ranks, whose cores all share. "
    "Hops are dependent messages; ring: gloo's all-reduce, over a full mesh of connections.",
    "Two ranks take an all-reduce in both columns: their difference is that between two runs of "
    "one thing on a busy machine.",
)


@dataclass(frozen=True)
class Figures:
    """Of one rank: microseconds a round, those of its processor, and sockets that it opened."""

    round_us: float
    cpu_us: float
    sockets: int


def sockets() -> int:
    """Open sockets of this process."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(folder / name) for name in os.listdir(folder) if (folder / name).exists()]
    return sum(link.startswith("socket:") for link in links)


def measure(make: Callable[[], Callable[[], None]], num_rounds: int) -> Figures:
    """Figures of one rank; `make` returns what a round calls."""
    before = sockets()
    play = make()
    for _ in range(WARM_UP):
        play()
    used, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(num_rounds):
        play()
    seconds, now = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Figures(seconds / num_rounds * 1e6, cpu / num_rounds * 1e6, sockets() - before)


def dissemination() -> Callable[[], None]:
    """A group that connects as control messages need it."""
    from zerocore._C import connect_control

    os.environ[LAZY] = "1"
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    del os.environ[LAZY]
    return lambda: connect_control(group.group_name)


def ring() -> Callable[[], None]:
    """A group that is connected at once, and its all-reduce."""
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    message = torch.zeros(NUMEL, dtype=torch.long)

    def play() -> None:
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group)

    return play


def on_this_rank(num_rounds: int) -> dict[str, dict[str, float]]:
    """Figures of this rank by what it called."""
    del os.environ[LAZY]
    figures = {"dissemination": measure(dissemination, num_rounds)}
    if dist.get_world_size() <= MOST_IN_FULL_MESH:
        figures["ring"] = measure(ring, num_rounds)
    return {name: asdict(each) for name, each in figures.items()}


def run(size: int, num_rounds: int) -> dict[str, list[Figures]]:
    """Figures of all ranks, by what they called. RuntimeError if a rank failed."""
    os.environ[LAZY] = "1"
    try:
        ranks = run_forked(lambda: on_this_rank(num_rounds), size)
    finally:
        del os.environ[LAZY]
    return {name: [Figures(**rank[name]) for rank in ranks] for name in ranks[0]}


def table_of(results: dict[int, dict[str, list[Figures]]]) -> Table:
    """One row a number of ranks."""
    columns = ["ranks", "hops", "ms a round", "CPU us a rank", "sockets a rank"]
    columns += ["ring: hops", "ring: ms", "ring: CPU us", "ring: sockets"]
    table = Table("one round of control messages", columns)
    for size, systems in results.items():
        row = [str(size)]
        for name, hops in (("dissemination", (size - 1).bit_length()), ("ring", 2 * (size - 1))):
            if name not in systems:
                row += ["-"] * 4
                continue
            of = systems[name]
            row += [str(hops), f"{median(each.round_us for each in of) / 1e3:.2f}"]
            row += [
                f"{mean(each.cpu_us for each in of):.0f}",
                str(max(each.sockets for each in of)),
            ]
        table.add(*row)
    return table


def main(
    largest: Annotated[int, typer.Option(help="Ranks of the last row, from 2 by doubling.")] = 256,
    rounds: Annotated[int, typer.Option(help="Of 2 ranks; fewer of more ranks.")] = 400,
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints what a round takes, by the number of ranks."""
    import_zerocore()
    torch.set_num_threads(1)
    sizes = [2**power for power in range(1, largest.bit_length())]
    found: dict[int, dict[str, list[Figures]]] = {}
    raw: dict[int, dict[str, list[dict[str, Any]]]] = {}
    with Results("control_plane", save) as results:
        for size in sizes:
            found[size] = run(size, max(10, 2 * rounds // size))
            raw[size] = {name: [asdict(e) for e in each] for name, each in found[size].items()}
            table = table_of(found)
            table.notes = list(NOTES)
            results.write([table], {"ranks": raw})


if __name__ == "__main__":
    typer.run(main)
