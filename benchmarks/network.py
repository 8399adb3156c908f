"""Times steps of 2 to 8 nodes over a slow network, of zerocore and its peers in turns.

Nodes are network namespaces on a switch; tc limits the rate at which each sends. It needs root,
and Linux with ip and tc.

python benchmarks/network.py speed --rates 1gbit,4gbit,10gbit
python benchmarks/network.py speed --ranks-a-node 2 --only 3     near ranks (hpZ), too
python benchmarks/network.py faults     a rank is killed, stopped or cut off: when the others end
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bench.lib.nodes import nodes_class, run_on_nodes
from bench.lib.results import Results
from bench.lib.systems import is_installed
from bench.lib.tables import Table
from bench.network.faults import measure_faults
from bench.network.report import network_table
from bench.network.run import run_rank

RUN_TIMEOUT_S = 1800.0
NOTES = (
    "Times are medians of rank 0's steps, with torch's fused AdamW; all systems took turns in the "
    "same processes, and ratios are ratios of the medians.",
    "Sent: bytes that left node 0's interface in a step. Wire: those bytes at the link's rate.",
    "Compute: a plain model's forward and backward at the same time on all ranks, and the system's "
    "own update. Hidden by length: 1 - (step - compute) / wire. Hidden by timeline: 1 - the "
    "runtime's exposed waits / wire. The processor's work for sockets counts as exposed in both.",
    "Floor: a plain model's forward and backward while it sends as many bytes: gradients from the "
    "backward on, all other bytes in any order; and the system's own update.",
)
app = typer.Typer(add_completion=False, help=__doc__)


@app.command(hidden=True)
def rank(rounds: int, near: int, only: str) -> None:
    """Runs one rank of ``speed``, which starts it."""
    run_rank(rounds, near, only)


@app.command()
def speed(
    nodes: Annotated[int, typer.Option(min=2, max=8, help="Nodes of the network.")] = 2,
    rates: Annotated[str, typer.Option(help="Rates of a node's link, in tc's units.")] = "4gbit",
    ranks_a_node: Annotated[int, typer.Option(min=1, help="More than 1 adds hpZ.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of all systems, 2 steps each.")] = 6,
    only: Annotated[str, typer.Option(help="Stages, such as 3 or 0,2.")] = "0,2,3",
) -> None:
    """Prints step times, ratios to the named peer and hidden shares; writes a dated file."""
    if (make_nodes := nodes_class()) is None:
        return
    tables: list[Table] = []
    raw: dict[str, Any] = {"ranks_a_node": ranks_a_node, "nodes": nodes}
    each = "" if ranks_a_node == 1 else f" of {ranks_a_node} ranks"
    arguments = [__file__, "rank", str(rounds), str(ranks_a_node), only]
    notes = [*NOTES, *([] if is_installed("deepspeed") else ["DeepSpeed is not installed here."])]
    with Results(f"network_{nodes}x{ranks_a_node}") as results:
        for number, rate in enumerate(rates.split(",")):
            port = 29600 + number
            with make_nodes(nodes, rate) as network:
                raw[rate] = run_on_nodes(network, arguments, port, RUN_TIMEOUT_S, ranks_a_node)
            for table in tables:
                table.notes = []
            tables.append(network_table(f"{nodes} nodes{each}, {rate}", rate, raw[rate]))
            tables[-1].notes = notes
            results.write(tables, raw)


@app.command()
def faults(
    times: Annotated[int, typer.Option(min=1, help="Runs of each fault.")] = 3,
    only: Annotated[str, typer.Option(help="Part of kind/part of a step/rank.")] = "",
    at_a_time: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
) -> None:
    """Prints the times until the other ranks end; writes a dated file."""
    if nodes_class() is None:
        return
    with Results("network_faults") as results:
        raw, table = measure_faults(times, only, at_a_time)
        results.write([table], {"faults": raw})


if __name__ == "__main__":
    app()
