"""Compares AdamW with torch's fused one and a copy on large tensors, and with FSDP2 on small ones.

Usage: python benchmarks/optimizer.py; Muon is measured by benchmarks/muon.py
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from bench.kernels.contests import OWN, Contest
from bench.lib.results import Results
from bench.lib.systems import is_installed
from bench.lib.tables import Table
from bench.lib.timing import ratio, time_in_turns
from bench.optimizer.cell import (
    FSDP2,
    LOCAL_NUMEL,
    PLAIN,
    SmallCell,
    measure_in_fresh_process,
)
from bench.optimizer.contests import large_tensors

# Smallest wanted ratio for large tensors, by device, weights and the other call.
GOALS = {
    ("cpu", "fp32", "torch fused"): 0.95,
    ("cuda", "fp32", "torch fused"): 0.95,
    ("cuda", "bf16 model weight", "torch fused + cast"): 1.18,  # 0.85 of its time
    ("cuda", "bf16 model weight", "copy_"): 0.9,
    ("cuda", "bf16 model weight", "elementwise kernel"): 0.9,
}
# Largest wanted ratio for small tensors.
SMALL_GOALS = {PLAIN: 1.1, FSDP2: 0.2}
LARGE_NOTES = (
    "GB/s: bytes of one pass over all memory that a step touches (weight, gradient and two moments "
    "read, weight, moments and model weight written) per second, even if several passes are "
    "made; a copy moves as many bytes in all. Ratio: zerocore's GB/s / the other's.",
    "Medians over rounds in which all systems take turns.",
)
SMALL_NOTES = (
    f"A clip to a global norm of 1 and a step; 512 parameters, some {LOCAL_NUMEL} elements of "
    "each on a rank, one thread. Median over rounds of the fastest of three. The collectives of "
    "the group return at once: this is the work of one process.",
)


def large_table(contests: list[Contest], device: str, threads: int) -> Table:
    """Compares zerocore's step with each other one."""
    columns = ["weights", "MB moved", "ms", "GB/s", "beside", "its ms", "its GB/s"]
    columns += ["ratio", "wanted"]
    table = Table(f"{device}: large tensors", columns, notes=list(LARGE_NOTES))
    for contest in contests:
        for name in contest.seconds:
            if name != OWN:
                own, other = (
                    [f"{contest.micros(n) / 1e3:.2f}", f"{contest.rate(n):.1f}"]
                    for n in (OWN, name)
                )
                bandwidth = f"{1 / ratio(contest.seconds, OWN, name):.2f}"
                head = [contest.name, f"{contest.nbytes / 1e6:.0f}"]
                goal = GOALS.get((device, contest.name, name))
                wanted = "" if goal is None else f">= {goal}"
                table.add(*head, *own, name, *other, bandwidth, wanted)
    if device == "cpu":
        table.notes.append(f"Threads: {threads} (memcpy: 1).")
    if not is_installed("deepspeed"):
        table.notes.append("DeepSpeed is not installed.")
    return table


def small_table(results: dict[int, dict[str, list[float]]], device: str) -> Table:
    """Shows a clip and a step of 512 small tensors."""
    table = Table(f"{device}: 512 small tensors, clip and step", ["system"])
    table.notes = list(SMALL_NOTES)
    for ranks in results:
        label = f"{ranks} rank{'s' if ranks > 1 else ''}"
        table.columns += [f"{label}: ms", "/ plain", "/ FSDP2"]
    for name in next(iter(results.values())):
        cells = []
        for found in results.values():
            cells.append(f"{median(found[name]) * 1e3:.2f}")
            cells += [f"{ratio(found, name, other):.2f}" for other in SMALL_GOALS]
        table.add(name, *cells)
    wanted = ["", *(f"<= {goal}" for goal in SMALL_GOALS.values())]
    table.add("wanted of zerocore", *wanted * len(results))
    return table


def measure(
    cells: list[SmallCell], numel: int, device: str, rounds: int, threads: int, results: Results
) -> None:
    """Measures small tensors, then contests one after the other, so that one holds memory."""
    raw: dict[str, Any] = {"device": torch.cuda.get_device_name()} if device == "cuda" else {}
    small: dict[int, dict[str, list[float]]] = {}
    large: list[Contest] = []

    def write() -> None:
        figures = [{**asdict(contest), "calls": None} for contest in large]
        by_size = {str(count): found for count, found in small.items()}
        tables = [large_table(large, device, threads), small_table(small, device)]
        results.write(tables, {**raw, "threads": threads, "large": figures, "small": by_size})

    for cell in track(cells, "small tensors", transient=True):
        small[cell.world_size] = measure_in_fresh_process(cell)
        write()
    for contest in large_tensors(numel, device):
        contest.seconds = time_in_turns(contest.calls, device, rounds)
        contest.calls = {}
        large.append(contest)
        write()


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = "",
    millions: Annotated[int, typer.Option(help="Of parameters; default 16, on CUDA 256.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of a step of large tensors on a CPU.")] = 1,
    ranks: Annotated[str, typer.Option(help="Sizes of the group for small tensors.")] = "1,8",
    rounds: Annotated[int, typer.Option(help="Rounds in which each system takes its turn.")] = 15,
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints the time of a step of AdamW."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(threads)
    cells = [SmallCell(int(count), device, 2 * rounds) for count in ranks.split(",")]
    numel = (millions or {"cpu": 16}.get(device, 256)) * 10**6
    with Results("optimizer", save) as results:
        measure(cells, numel, device, rounds, threads, results)


if __name__ == "__main__":
    typer.run(main)
