"""Times gathers of zerocore's two interfaces and of FSDP2, in turns on real ranks.

Usage: python benchmarks/gather.py --ranks 2

`zerocore.shard` gathers flat shards in place; `zerocore.fsdp` shards by rows like FSDP2, and copies
the rows out after one gather of all parameters.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated

import typer
from rich.progress import track

from bench.gather.run import FORWARDS, MIB, NUM_PARAMS, NUM_UNITS, gather_on_this_rank, medians
from bench.lib.ranks import run_on_ranks
from bench.lib.results import Results
from bench.lib.systems import System
from bench.lib.tables import Table
from bench.lib.timing import ratio

SHARD = System("zerocore", 3, "zerocore stage 3")
FULLY_SHARD = System("fully_shard", 3, "zerocore.fsdp")
FSDP2 = System("fsdp2", 3, "FSDP2")
SYSTEMS = [SHARD, FULLY_SHARD, FSDP2]
SIZES_MIB = (0.2, 1.0, 4.0, 16.0, 64.0)
TIMEOUT_S = 180.0
NOTES = (
    f"Milliseconds a unit: a forward without gradients of {NUM_UNITS} units of {NUM_PARAMS} "
    "parameters that compute nothing, so only gathers, hooks and copies take time. In a round "
    f"each system takes its turn, the fastest of {FORWARDS} forwards counts; median over the "
    "rounds, ratios within a round.",
    "Wanted: zerocore.fsdp / shard <= 1.35.",
)

Times = dict[str, list[float]]


def gather_table(results: dict[float, Times], ranks: int) -> Table:
    """Shows the time of each system and two ratios, a row a size."""
    columns = ["MiB a unit", *(system.label for system in SYSTEMS), "fsdp / shard", "fsdp / FSDP2"]
    table = Table(f"gathering a unit, ms, {ranks} ranks, gloo", columns)
    for size, times in results.items():
        cells = [f"{median(times[system.label]):.3f}" for system in SYSTEMS]
        own = [ratio(times, FULLY_SHARD.label, other.label) for other in (SHARD, FSDP2)]
        table.add(f"{size:g}", *cells, *(f"{value:.2f}" for value in own))
    return table


def main(
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    rounds: Annotated[int, typer.Option(help="Turns of each system.")] = 20,
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints the time to gather a unit, by its size."""
    found = {}
    with Results("gather", save) as results:
        for size in track(SIZES_MIB, description="measuring", transient=True):
            args = (SYSTEMS, int(size * MIB), rounds)
            found[size] = medians(run_on_ranks(gather_on_this_rank, ranks, args, TIMEOUT_S))
            table = gather_table(found, ranks)
            table.notes = list(NOTES)
            results.write([table], {"ranks": ranks, "ms_per_unit": found})


if __name__ == "__main__":
    typer.run(main)
