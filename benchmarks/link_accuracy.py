"""Compares idle collectives on the emulated link with its model.

python benchmarks/link_accuracy.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from bench.lib.links import EMULATED_WORLD_SIZE, EmulatedLink, open_link, synchronize
from bench.lib.results import Results
from bench.lib.tables import Table

MIB = 2**20
# MiB of the full tensor and GB/s. On a CPU, slow enough that local memory traffic fits in.
CPU_CASES = tuple((size, 1.0) for size in (1, 4, 16, 64, 256, 1024))
CUDA_CASES = tuple((size, 370.0) for size in (1, 4, 16, 64, 256, 1024))
LATENCY_S = 20e-6
WARMUP = 10
REPEATS = 11
WANTED_PERCENT = 3


def measure_accuracy(link: EmulatedLink, cases: Sequence[tuple[int, float]]) -> Iterator[list[Any]]:
    """Yields each case's MiB, GB/s, and all-gather and reduce-scatter ms, modelled and measured."""
    make_link = link.zerocore.emulation.link
    kinds = link.zerocore._C.Traffic
    link.emulation.link = make_link("inf", 5e-3)
    for _ in range(WARMUP):
        dist.barrier()
    for size, bandwidth in cases:
        link.emulation.link = make_link(bandwidth * 1e9, LATENCY_S)
        full = torch.zeros(size * MIB // 4, device=link.device)
        own = torch.zeros(full.numel() // EMULATED_WORLD_SIZE, device=link.device)
        row: list[Any] = [size, bandwidth]
        for kind, call in (
            (
                kinds.ALL_GATHER,
                lambda f=full, o=own: dist.all_gather_into_tensor(f, o, async_op=True),
            ),
            (
                kinds.REDUCE_SCATTER,
                lambda f=full, o=own: dist.reduce_scatter_tensor(o, f, async_op=True),
            ),
        ):
            nbytes = full.numel() * 4
            model = link.emulation.link.duration_ns(kind, nbytes, EMULATED_WORLD_SIZE) / 1e6
            row += [model, median(_time(link, call) for _ in range(REPEATS))]
        yield row


def measure_free(link: EmulatedLink) -> float:
    """Measures the milliseconds of a tiny gather on an infinitely fast link."""
    own = torch.zeros(1, device=link.device)
    full = torch.zeros(EMULATED_WORLD_SIZE, device=link.device)
    link.free()
    call = partial(dist.all_gather_into_tensor, full, own, async_op=True)
    return median(_time(link, call) for _ in range(WARMUP * REPEATS))


def _time(link: EmulatedLink, call: Any) -> float:
    """Returns the milliseconds of a collective from issue to completion, by its own times.

    On a GPU, the time between events of the stream that calls and waits.
    """
    synchronize(link.device)
    if link.device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call().wait()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))
    work = call()
    work.wait()
    return float(work._get_duration())


def accuracy_table(rows: list[list[Any]], free_ms: float) -> Table:
    """Shows the model and the measurement of each size, and the difference."""
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
        f"All-gather and reduce-scatter; median of {REPEATS} durations from issue to completion "
        f"(on a GPU between events of the stream that waits); wanted: within {WANTED_PERCENT} %.",
        f"A gather of {EMULATED_WORLD_SIZE} floats on an infinitely fast link: "
        f"{free_ms * 1e3:.1f} us.",
    ]
    return table


def main(
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Measures 1 MiB to 1 GiB and prints the differences from the model."""
    link = open_link()
    if not isinstance(link, EmulatedLink):
        raise typer.BadParameter("run it as one process, not under torchrun")
    rows: list[list[Any]] = []
    with Results(f"link_accuracy_{link.device.type}", save) as results:
        free_ms = measure_free(link)
        cases = CPU_CASES if link.device.type == "cpu" else CUDA_CASES
        for row in measure_accuracy(link, cases):
            rows.append(row)
            results.write([accuracy_table(rows, free_ms)], {"rows": rows, "free_ms": free_ms})
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
