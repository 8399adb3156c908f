"""Compares idle collectives on the emulated link with its model.

python benchmarks/link_accuracy.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _links import EMULATED_WORLD_SIZE, EmulatedLink, open_link, synchronize
from _results import write_results
from _tables import Table, make_console

MIB = 2**20
# MiB of the full tensor and GB/s. On the CPU at most as fast as the memory traffic fits into the
# time, and slower where waking two threads would be more than a few percent.
CPU_CASES = ((1, 0.1), (4, 0.25), (16, 0.5), (64, 1.0), (256, 1.0), (1024, 1.0))
CUDA_CASES = tuple((size, 370.0) for size in (1, 4, 16, 64, 256, 1024))
LATENCY_S = 20e-6
WARMUP = 10
REPEATS = 5
WANTED_PERCENT = 3


def measure_accuracy(link: EmulatedLink, cases: Sequence[tuple[int, float]]) -> list[list[Any]]:
    """For each case: MiB, GB/s, and for all-gather and reduce-scatter model and median ms."""
    emulated = link.zerocore.emulated
    kinds = link.zerocore._C.Traffic
    rows = []
    link.emulation.link = emulated.link("inf", 5e-3)
    for _ in range(WARMUP):
        dist.barrier()
    for size, bandwidth in cases:
        link.emulation.link = emulated.link(bandwidth * 1e9, LATENCY_S)
        full = torch.zeros(size * MIB // 4, device=link.device)
        own = torch.zeros(full.numel() // EMULATED_WORLD_SIZE, device=link.device)
        row: list[Any] = [size, bandwidth]
        for kind, call in (
            (kinds.ALL_GATHER, lambda f=full, o=own: dist.all_gather_into_tensor(f, o)),
            (kinds.REDUCE_SCATTER, lambda f=full, o=own: dist.reduce_scatter_tensor(o, f)),
        ):
            nbytes = full.numel() * 4
            model = link.emulation.link.duration_ns(kind, nbytes, EMULATED_WORLD_SIZE) / 1e6
            row += [model, median(_time(link, call) for _ in range(REPEATS))]
        rows.append(row)
    link.free()
    return rows


def _time(link: EmulatedLink, call: Any) -> float:
    synchronize(link.device)
    start = time.perf_counter()
    call()
    synchronize(link.device)
    return (time.perf_counter() - start) * 1e3


def accuracy_table(rows: list[list[Any]]) -> Table:
    """Model and measurement of each size, and how far apart they are."""
    table = Table(
        "emulated: an idle collective against the model, ms",
        ["MiB", "GB/s", "gather: model", "took", "off %", "scatter: model", "took", "off %"],
    )
    for size, bandwidth, *pairs in rows:
        cells = []
        for model, took in zip(pairs[::2], pairs[1::2], strict=True):
            cells += [f"{model:.3f}", f"{took:.3f}", f"{100 * (took / model - 1):+.2f}"]
        table.add(f"{size}", f"{bandwidth:g}", *cells)
    table.notes = [
        f"All-gather and reduce-scatter; median of {REPEATS}, from the call to the return of "
        f"wait(), with what waking threads takes; wanted: within {WANTED_PERCENT} %."
    ]
    return table


def main(
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Measures 1 MiB to 1 GiB and prints how far off the model they are."""
    link = open_link()
    if not isinstance(link, EmulatedLink):
        raise typer.BadParameter("run it as one process, not under torchrun")
    rows = measure_accuracy(link, CPU_CASES if link.device.type == "cpu" else CUDA_CASES)
    table = accuracy_table(rows)
    table.show(make_console())
    if save:
        theme = f"link_accuracy_{link.device.type}"
        write_results(theme, {"rows": rows}, table.markdown())
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
