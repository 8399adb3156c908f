"""Times a round of control messages on 2 to 256 real endpoints, beside an all-reduce of gloo.

Usage: python benchmarks/control_plane.py

In a round every rank sends 128 bytes to all others, as at the end of each forward. Endpoints are
processes of this machine and share its cores, so a round takes the time of all ranks' work. The
columns of CPU time, messages and sockets show a rank's cost in a large job.
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
    "Measured on the CPU, over loopback; medians over the ranks, which share all cores. "
    "Hops are dependent messages; ring: gloo's all-reduce, over a full mesh of connections.",
    "Two ranks use an all-reduce in both columns: these differ as two runs of the same work do "
    "on a busy machine.",
)


@dataclass(frozen=True)
class Figures:
    """Figures of one rank: wall and CPU microseconds of a round, and sockets that it opened."""

    round_us: float
    cpu_us: float
    sockets: int


def sockets() -> int:
    """Counts the open sockets of this process."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(folder / name) for name in os.listdir(folder) if (folder / name).exists()]
    return sum(link.startswith("socket:") for link in links)


def measure(make: Callable[[], Callable[[], None]], num_rounds: int) -> Figures:
    """Measures one rank; `make` returns the function that a round calls."""
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
    """Makes a group that connects only the ranks that control messages need."""
    from zerocore._C import connect_control

    os.environ[LAZY] = "1"
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    del os.environ[LAZY]
    return lambda: connect_control(group.group_name)


def ring() -> Callable[[], None]:
    """Makes a group that connects all ranks at once, and returns its all-reduce."""
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    message = torch.zeros(NUMEL, dtype=torch.long)

    def play() -> None:
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group)

    return play


def on_this_rank(num_rounds: int) -> dict[str, dict[str, float]]:
    """Measures this rank, by kind of round."""
    del os.environ[LAZY]
    figures = {"dissemination": measure(dissemination, num_rounds)}
    if dist.get_world_size() <= MOST_IN_FULL_MESH:
        figures["ring"] = measure(ring, num_rounds)
    return {name: asdict(each) for name, each in figures.items()}


def run(size: int, num_rounds: int) -> dict[str, list[Figures]]:
    """Measures all ranks, by kind of round; raises RuntimeError if a rank failed."""
    os.environ[LAZY] = "1"
    try:
        ranks = run_forked(lambda: on_this_rank(num_rounds), size)
    finally:
        del os.environ[LAZY]
    return {name: [Figures(**rank[name]) for rank in ranks] for name in ranks[0]}


def table_of(results: dict[int, dict[str, list[Figures]]]) -> Table:
    """Makes a row for each number of ranks."""
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
    largest: Annotated[int, typer.Option(help="Ranks of the last row; rows double from 2.")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds of 2 ranks; more ranks make fewer.")] = 400,
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints a round's time, by the number of ranks."""
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
