"""Measures the host time that sharding adds to a block: zerocore beside FSDP2 in one run.

Usage: python benchmarks/host_overhead.py
"""

from __future__ import annotations

import os
from dataclasses import asdict
from statistics import median
from typing import Annotated

import typer
from rich.progress import track

from bench.host.cell import ALL_PHASES, CONTROL, PHASES, Cell, CellTimes, measure_in_fresh_process
from bench.lib.results import Results
from bench.lib.systems import is_installed
from bench.lib.tables import Table

NAMES = {"fsdp2": "FSDP2", "zerocore": "zerocore", "fully_shard": "fully_shard"}
TWO_MESHES = "two_meshes"
REFERENCE, SMALL, LARGE = "fsdp2", 9, 32
NOTES = (
    "Microseconds per block above the plain model: median over the rounds of the difference to "
    "the plain model in the same round. A round takes each system in turn: one step to warm up and "
    "the fastest of three; a row's rounds come from several processes. The garbage collector runs "
    "between rounds only.",
    "With zero_grad: with the time to drop gradients. A plain model frees them there; a "
    "sharded one has freed the full gradients in the backward.",
    "zerocore: zerocore.shard, flat shards. fully_shard: zerocore.fsdp's, DTensors as FSDP2's.",
    "two meshes: zerocore.shard with every other block on another mesh of as many ranks.",
    "plain again: a second plain model, measured in the same way: the error of the measurement.",
    "c10d floor: two all-gathers and a reduce-scatter of the block's size, called on the group "
    "itself.",
)

Times = dict[int, CellTimes]


def overhead_table(results: Times, systems: list[str]) -> Table:
    """Shows the time that each system adds per block, and zerocore's ratios."""
    names = [NAMES[system] for system in systems]
    columns = ["parameters per block", "plain", *(f"{n} fwd + bwd" for n in names)]
    ours = [system for system in systems if system != REFERENCE]
    ratios = [f"{NAMES[system]} / FSDP2" for system in ours]
    table = Table("us per block above plain", [*columns, *ratios, "floor", "plain again"])
    for num_params, found in results.items():
        plain = sum(min(found.times["plain"][phase]) for phase in PHASES)
        cells = [str(num_params), f"{plain:.0f}"]
        cells += [_phases(found, system) for system in systems]
        cells += [_ratio_to_reference(found, system) for system in ours]
        cells += [f"{found.floor():.1f}"]
        table.add(*cells, f"{found.total_above_plain(CONTROL):.1f}")
    return table


def _phases(found: CellTimes, system: str) -> str:
    if system not in found.times:
        return "not installed"
    parts = " + ".join(f"{found.above_plain(system, phase):.1f}" for phase in PHASES)
    return f"{parts} = {found.total_above_plain(system):.1f}"


def _ratio_to_reference(found: CellTimes, system: str) -> str:
    if not {system, REFERENCE} <= set(found.times):
        return "-"
    return f"{found.total_above_plain(system) / found.total_above_plain(REFERENCE):.3f}"


def growth_table(results: Times, systems: list[str]) -> Table:
    """Shows how the cost grows with the number of parameters, and its ratio to the floor."""
    columns = ["system", f"{SMALL}: us", f"{LARGE}: us", "ratio", f"{SMALL}: / floor"]
    table = Table(f"{SMALL} parameters per block, and {LARGE}", columns)
    for system in systems:
        cells = [results.get(SMALL), results.get(LARGE)]
        found = [cell for cell in cells if cell and system in cell.times]
        if len(found) < 2:
            table.add(NAMES[system], "not measured")
            continue
        floor = found[0].floor()
        for phases, label in ((PHASES, ""), (ALL_PHASES, ", with zero_grad")):
            medians = [cell.total_above_plain(system, phases) for cell in found]
            table.add(f"{NAMES[system]}{label}", *_growth(medians, floor))
    return table


def mesh_table(results: Times) -> Table:
    """Compares blocks on two meshes with the same blocks on one."""
    table = Table("zerocore.shard, us per block above plain", ["parameters per block", "one mesh"])
    table.columns += ["two meshes", "two / one, median over the rounds"]
    for num_params, found in results.items():
        if {"zerocore", TWO_MESHES} <= set(found.times):
            one, two = found.rounds_above_plain("zerocore"), found.rounds_above_plain(TWO_MESHES)
            ratio = median(b / a for a, b in zip(one, two, strict=True))
            table.add(str(num_params), f"{median(one):.1f}", f"{median(two):.1f}", f"{ratio:.3f}")
    return table


def _growth(totals: list[float], floor: float) -> list[str]:
    small, large = totals
    return [f"{small:.1f}", f"{large:.1f}", f"{large / small:.2f}", f"{small / floor:.1f}"]


def main(
    params: Annotated[str, typer.Option(help="Parameters per block.")] = "1,4,9,16,32",
    systems: Annotated[str, typer.Option(help="Systems beside the plain one.")] = ",".join(NAMES),
    rounds: Annotated[int, typer.Option(help="Rounds over the systems in a process.")] = 10,
    passes: Annotated[int, typer.Option(help="Processes for each row.")] = 8,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints the host's time of forward and backward above the plain model's."""
    # Set here, as torch reads it when the new process starts.
    os.environ["OMP_NUM_THREADS"] = "1"
    wanted = systems.split(",")
    if not set(wanted) <= set(NAMES):
        raise typer.BadParameter(f"systems are {', '.join(NAMES)}")
    installed = tuple(system for system in wanted if is_installed(system))
    installed += (TWO_MESHES,) * ("zerocore" in installed)
    counts = [int(count) for count in params.split(",")]
    cells = [Cell(count, installed, device=device, num_rounds=rounds) for count in counts]
    theme = "host_overhead" if device == "cpu" else f"host_overhead_{device}"
    with Results(theme, save) as results:
        times: Times = {}
        # All rows in each pass, so that a drift of the machine affects all alike.
        for cell in track(cells * passes, description="measuring", transient=True):
            found = times.setdefault(cell.num_params, CellTimes())
            found.extend(measure_in_fresh_process(cell))
            tables = [overhead_table(times, wanted), mesh_table(times), growth_table(times, wanted)]
            tables[-1].notes = list(NOTES)
            us_per_block = {count: each.times for count, each in times.items()}
            raw = {"cells": [asdict(each) for each in cells], "us_per_block": us_per_block}
            results.write(tables, raw)


if __name__ == "__main__":
    typer.run(main)
