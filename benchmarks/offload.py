"""Compares steps with and without offload, and AdamW on the CPU by its number of threads.

Usage: python benchmarks/offload.py
       python benchmarks/offload.py --parts steps
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from bench.kernels.contests import OWN
from bench.lib.results import Results
from bench.lib.systems import is_installed
from bench.lib.tables import Table
from bench.lib.timing import fastest, ratio
from bench.offload.adamw import (
    DEEPSPEED,
    MEMORY,
    OWN_THREADS,
    TORCH,
    AdamWCell,
    measure_in_fresh_process,
)
from bench.offload.steps import measure_steps, steps_table

PEER_GOAL, MEMORY_GOAL = 0.95, 0.9
ADAMW_NOTES = (
    "GB/s: bytes read plus bytes written (28 a parameter in fp32) per time. Each thread has a core "
    "to itself. Medians over rounds in which all systems take turns; ratios are medians of the "
    "ratios in a round.",
    "Memory: the fastest of a copy, a scale in place and a triad of as many bytes by as many "
    "threads. Reads that the processor makes of memory before it writes there are "
    "not counted.",
)


def adamw_table(cells: dict[AdamWCell, dict[str, list[float]]]) -> Table:
    """Shows each system at each number of threads."""
    columns = [
        "threads",
        "system",
        "ms",
        "GB/s",
        "of torch's rate",
        "of DeepSpeed's",
        "of memory's",
    ]
    table = Table("AdamW on the CPU, fp32", columns, notes=list(ADAMW_NOTES))
    for cell, seconds in cells.items():
        best = fastest(seconds, list(MEMORY))
        for name in (OWN, OWN_THREADS, TORCH, DEEPSPEED, *MEMORY):
            if name not in seconds:
                continue
            time = median(seconds[name])
            rate = f"{cell.nbytes / time / 1e9:.1f}"
            peers = [peer if peer in seconds else None for peer in (TORCH, DEEPSPEED, best)]
            shares = (f"{ratio(seconds, peer, name):.2f}" if peer else "" for peer in peers)
            table.add(f"{cell.threads}", name, f"{time * 1e3:.2f}", rate, *shares)
        table.add(f"{cell.threads}", "wanted", "", "", "", f">= {PEER_GOAL}", f">= {MEMORY_GOAL}")
    if not is_installed("deepspeed"):
        table.notes.append("DeepSpeed is not installed.")
    return table


def measure_adamw(
    counts: list[int], millions: int, rounds: int
) -> tuple[list[Table], dict[str, Any]]:
    """Measures AdamW at each number of threads up to the number of cores."""
    usable = [count for count in counts if count <= len(os.sched_getaffinity(0))]
    cells = [AdamWCell(count, millions * 10**6, rounds) for count in usable]
    steps = {cell: measure_in_fresh_process(cell) for cell in cells}
    torch.set_num_threads(max(usable))
    raw = {str(cell.threads): seconds for cell, seconds in steps.items()}
    return [adamw_table(steps)], {"millions": millions, "adamw": raw}


def measure_training(rounds: int) -> tuple[list[Table], dict[str, Any]]:
    """Measures steps of whole systems, over gloo."""
    found = measure_steps(rounds)
    return [steps_table(found)], {"steps": {s.label: asdict(each) for s, each in found.items()}}


def main(
    threads: Annotated[str, typer.Option(help="Numbers of AdamW's threads.")] = "1,2",
    millions: Annotated[int, typer.Option(help="Millions of parameters of AdamW.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds in which each system takes its turn.")] = 9,
    step_rounds: Annotated[int, typer.Option(help="Rounds of training steps.")] = 2,
    parts: Annotated[str, typer.Option(help="Parts to measure: steps, adamw.")] = "steps,adamw",
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints the speed of AdamW on the host, and the time of training steps with offload."""
    counts = [int(count) for count in threads.split(",")]
    measures: dict[str, Callable[[], tuple[list[Table], dict[str, Any]]]] = {
        "steps": lambda: measure_training(step_rounds),
        "adamw": lambda: measure_adamw(counts, millions, rounds),
    }
    wanted = parts.split(",")
    if not set(wanted) <= set(measures):
        raise typer.BadParameter(f"parts are {', '.join(measures)}")
    tables: list[Table] = []
    raw: dict[str, Any] = {}
    with Results("offload", save) as results:
        for part in track(wanted, "offload", transient=True):
            found, measured = measures[part]()
            tables += found
            raw |= measured
            results.write(tables, raw)


if __name__ == "__main__":
    typer.run(main)
