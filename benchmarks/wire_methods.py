"""Measures methods to gather, reduce and sum over gloo, by the number of ranks and the size.

Usage: python benchmarks/wire_methods.py

csrc/plan/wire_methods.h chooses a method by this table. All ranks are processes of this machine and
share its cores, so compare CPU time. A size is the sum of all shards: each rank
receives about as many bytes, however many ranks there are.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Annotated

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
import typer
from torch import Tensor

from bench.lib.forked import run_forked
from bench.lib.results import Results
from bench.lib.tables import Table

RANKS = (2, 3, 4, 8, 16, 24)
KIB = (16, 256, 1024, 4096)
ROUNDS, WARM_UP, TAG = 2, 2, 77
NOTES = (
    "Wall ms / CPU ms of a rank, for one call; the mean of the ranks, the best of "
    f"{ROUNDS} rounds. Over loopback.",
    "all-gather, reduce-scatter, all-reduce: gloo's own. broadcasts: each rank's shard in turn, in "
    "place. copies: an all-to-all of copies of the shard. pairs: a send to each rank and a receive "
    "from each, called from Python. exchange: an all-to-all and a local sum. exchange + "
    "copies: gathers these sums by copies, instead of an all-reduce.",
)

Found = dict[str, dict[str, list[tuple[float, float]]]]  # by KiB and method: wall, CPU


class Ways:
    """Every method over the same buffers."""

    def __init__(self, nbytes: int) -> None:
        self.backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.numel = max(nbytes // 4 // self.size, 1)
        self.full, self.parts = (torch.zeros(self.numel * self.size) for _ in range(2))
        self.methods: dict[str, Callable[[], object]] = {
            "all-gather": self.all_gather,
            "broadcasts": self.broadcasts,
            "copies": self.copies,
            "pairs": self.pairs,
            "reduce-scatter": self.reduce_scatter,
            "exchange": self.exchange,
            "all-reduce": self.all_reduce,
            "exchange + copies": lambda: (self.exchange(), self.copies()),
        }

    def shard(self, rank: int) -> Tensor:
        """Returns that rank's shard of the buffer."""
        return self.full.narrow(0, rank * self.numel, self.numel)

    def all_gather(self) -> None:
        options = c10d.AllgatherOptions()
        self.backend._allgather_base(self.full, self.shard(self.rank), options).wait()

    def broadcasts(self) -> None:
        works = []
        for root in range(self.size):
            options = c10d.BroadcastOptions()
            options.rootRank = root
            works.append(self.backend.broadcast([self.shard(root)], options))
        for work in works:
            work.wait()

    def copies(self) -> None:
        self._all_to_all(self.full, self.shard(self.rank).repeat(self.size))

    def pairs(self) -> None:
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        works = [self.backend.recv([self.shard(peer)], peer, TAG) for peer in reversed(peers)]
        works += [self.backend.send([self.shard(self.rank)], peer, TAG) for peer in peers]
        for work in works:
            work.wait()

    def reduce_scatter(self) -> None:
        options = c10d.ReduceScatterOptions()
        self.backend._reduce_scatter_base(self.shard(self.rank), self.full, options).wait()

    def exchange(self) -> None:
        self._all_to_all(self.parts, self.full)
        self.parts.view(self.size, self.numel).sum(0)

    def all_reduce(self) -> None:
        self.backend.allreduce([self.full], c10d.AllreduceOptions()).wait()

    def _all_to_all(self, received: Tensor, sent: Tensor) -> None:
        self.backend.alltoall_base(received, sent, [], [], c10d.AllToAllOptions()).wait()


def times(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Returns the wall and CPU milliseconds of a call on this rank."""
    dist.barrier()
    used, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(repeats):
        call()
    seconds, now = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return seconds / repeats * 1e3, cpu / repeats * 1e3


def on_this_rank() -> Found:
    """Measures all methods in turn, at every size."""
    found: Found = {}
    for kib in KIB:
        ways = Ways(kib * 1024)
        repeats = max(3, 200 // ways.size // max(1, kib // 256))
        for call in ways.methods.values():
            times(call, WARM_UP)
        for _ in range(ROUNDS):
            for name, call in ways.methods.items():
                found.setdefault(str(kib), {}).setdefault(name, []).append(times(call, repeats))
    return found


def over_ranks(ranks: list[Found]) -> Found:
    """Returns each round's median wall time and mean CPU time of the ranks."""
    found: Found = {}
    for kib, ways in ranks[0].items():
        for name in ways:
            rounds = zip(*(rank[kib][name] for rank in ranks), strict=True)
            found.setdefault(kib, {})[name] = [
                (round(median(t[0] for t in each), 4), round(mean(t[1] for t in each), 4))
                for each in rounds
            ]
    return found


def table_of(size: int, found: Found) -> Table:
    """Makes a row for each size."""
    table = Table(f"{size} ranks", ["KiB of all shards", *found[str(KIB[0])]])
    for kib, ways in found.items():
        cells = []
        for rounds in ways.values():
            wall, cpu = (min(times) for times in zip(*rounds, strict=True))
            cells.append(f"{wall:.2f} / {cpu:.2f}")
        table.add(kib, *cells)
    return table


def main(
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints a table for each number of ranks."""
    torch.set_num_threads(1)
    tables, raw = [], {}
    with Results("wire_methods", save) as results:
        for size in RANKS:
            raw[size] = over_ranks(run_forked(on_this_rank, size))
            tables.append(table_of(size, raw[size]))
            if size == RANKS[-1]:
                tables[-1].notes = list(NOTES)
            results.write(tables, {"ranks": raw})


if __name__ == "__main__":
    typer.run(main)
