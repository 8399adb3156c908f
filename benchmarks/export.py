"""Times exports of full weights by zerocore and FSDP2, in turns on real ranks, and compares parking
of a model's state with plain copies.

Usage: python benchmarks/export.py --ranks 2
       python benchmarks/export.py on-nodes --rate 4gbit     # root; Linux with ip and tc
"""

from __future__ import annotations

import json
import os
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from bench.export.run import (
    FULLY_SHARD,
    LABELS,
    MIB,
    PER_PARAM,
    RAW,
    SHARD,
    STATE_DICT,
    Block,
    export_on_this_rank,
    park_on_this_rank,
    planned_peak,
)
from bench.lib.nodes import nodes_class, run_on_nodes
from bench.lib.ranks import run_on_ranks
from bench.lib.results import Results
from bench.lib.tables import Table
from bench.network.report import bits_per_second

TIMEOUT_S = 400.0
Found = dict[str, list[tuple[float, float]]]
NOTES = (
    "Each way gives every rank all weights in the dtype that layers compute with, one tensor, "
    "bucket or dict at a time, and drops them. In a round each way takes its turn; median over the "
    "rounds and ranks, ratios within a round. bf16 is over fp32 weights: FSDP2 gathers fp32 and "
    "casts.",
    "MiB: the peak of the process's resident memory, less the memory before.",
    f"{RAW}: the same bytes by torch.distributed, into existing memory.",
    "Wanted: time <= 0.4 of the better one of FSDP2's two ways.",
)


def export_table(results: dict[str, list[Found]], title: str) -> Table:
    """Shows time, memory, and the ratio to FSDP2's faster way, a row a way and dtype."""
    table = Table(title, ["dtype", "way", "ms", "MiB", "of FSDP2's faster"])
    for dtype, by_rank in results.items():
        labels = (*LABELS, RAW)
        times = {label: [median(t) for t in _by_round(by_rank, label, 0)] for label in labels}
        faster = min((PER_PARAM, STATE_DICT), key=lambda label: median(times[label]))
        for label in labels:
            peak = median(median(each) for each in _by_round(by_rank, label, 1))
            share = median(a / b for a, b in zip(times[label], times[faster], strict=True))
            table.add(dtype, label, f"{median(times[label]):.1f}", f"{peak:.0f}", f"{share:.2f}")
    return table


def _by_round(by_rank: list[Found], label: str, figure: int) -> list[tuple[float, ...]]:
    rows = ([each[figure] for each in rank[label]] for rank in by_rank)
    return list(zip(*rows, strict=True))


def park_table(times: dict[str, list[float]], nbytes: int) -> Table:
    """Shows the time of each move, and its ratio to a copy."""
    table = Table(f"parking {nbytes / 1e9:g} GB on one rank", ["what", "ms", "of the copy's"])
    for name, beside in (("park", "copy"), ("return", "copy to new")):
        share = median(a / b for a, b in zip(times[name], times[beside], strict=True))
        table.add(name, f"{median(times[name]):.0f}", f"{share:.2f}")
        table.add(beside, f"{median(times[beside]):.0f}", "1.00")
    table.notes = ["On the CPU, where the device's memory is the host's. Wanted: park <= 1.1."]
    return table


app = typer.Typer(add_completion=False)
Width = Annotated[int, typer.Option(help="Width of the model.")]
Depth = Annotated[int, typer.Option(help="Blocks of the model.")]
MaxMib = Annotated[int, typer.Option(help="MiB of a bucket.")]
Rounds = Annotated[int, typer.Option(help="Turns of each way.")]


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    width: Width = 1024,
    depth: Depth = 8,
    max_mib: MaxMib = 64,
    rounds: Rounds = 10,
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints the time and memory of exports and of parking."""
    if context.invoked_subcommand is not None:
        return
    sizes = (width, depth)
    found: dict[str, list[Found]] = {}
    peaks: dict[str, tuple[float, float]] = {}
    nbytes = 10**9
    raw: dict[str, Any] = {"ranks": ranks, "width": width, "depth": depth, "max_mib": max_mib}
    title = f"{depth} blocks of width {width}, {ranks} ranks, gloo, buckets of {max_mib} MiB"
    with Results("export", save) as results:
        for dtype in ("fp32", "bf16"):
            own = (*sizes, dtype, max_mib * MIB)
            found[dtype] = run_on_ranks(export_on_this_rank, ranks, (*own, rounds), TIMEOUT_S)
            peaks[dtype] = run_on_ranks(planned_peak, ranks, own, TIMEOUT_S)[0]
            raw |= {"exports": found, "peaks_mib": peaks}
            tables = [export_table(found, title)]
            tables[0].notes = [*NOTES, peaks_note(peaks)]
            results.write(tables, raw)
        parking = run_on_ranks(park_on_this_rank, 1, (nbytes, rounds), TIMEOUT_S)[0]
        results.write([*tables, park_table(parking, nbytes)], {**raw, "parking_ms": parking})


def peaks_note(peaks: dict[str, tuple[float, float]]) -> str:
    """Returns a note with the peaks of the plan and of the run, by dtype."""
    planned = ", ".join(f"{dtype}: {a:.3f} MiB and {b:.3f}" for dtype, (a, b) in peaks.items())
    return (
        f"Peak of {SHARD.label} by the plan, and of the pool in the run: {planned}. "
        f"{FULLY_SHARD.label} copies rows to their places, so it holds a unit twice."
    )


@app.command(hidden=True)
def rank(width: int, depth: int, dtype: str, max_nbytes: int, rounds: int) -> None:
    """Runs one rank of ``on-nodes``, which starts it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = export_on_this_rank(width, depth, dtype, max_nbytes, rounds)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    os._exit(0)  # skips the normal exit, like ranks on one host


@app.command()
def on_nodes(
    rate: Annotated[str, typer.Option(help="Rate of a node's link, in tc's units.")] = "4gbit",
    nodes: Annotated[int, typer.Option(help="Network namespaces, a rank each.")] = 2,
    width: Width = 1024,
    depth: Depth = 8,
    max_mib: MaxMib = 64,
    rounds: Rounds = 5,
) -> None:
    """Times exports of ranks in network namespaces, and compares them with the wire's time."""
    if (make_nodes := nodes_class()) is None:
        return
    numel = depth * sum(param.numel() for param in Block(width).parameters())
    wires: dict[str, float] = {}
    found: dict[str, list[Found]] = {}
    title = f"{nodes} nodes, {rate}: {depth} blocks of width {width}"
    with Results(f"export_{rate}") as results, make_nodes(nodes, rate) as network:
        for number, (dtype, nbytes) in enumerate((("fp32", 4), ("bf16", 2))):
            own = [str(each) for each in (width, depth, dtype, max_mib * MIB, rounds)]
            arguments = [__file__, "rank", *own]
            found[dtype] = [run_on_nodes(network, arguments, 29600 + number, TIMEOUT_S)]
            wires[dtype] = 8e3 * nbytes * numel * (nodes - 1) / nodes / bits_per_second(rate)
            table = export_table(found, title)
            of = ", ".join(f"{dtype} {ms:.0f} ms" for dtype, ms in wires.items())
            wire = f"The bytes that a rank receives, at {rate}: {of}."
            table.notes = [*NOTES[:-1], wire]
            results.write([table], {"exports": found, "wire_ms": wires})


if __name__ == "__main__":
    app()
