"""Compares idle collectives on the emulated link with its model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _links import EMULATED_WORLD_SIZE, EmulatedLink, synchronize
from _tables import Table

MIB = 2**20
# MiB of the full tensor and GB/s: as fast as this machine's memory traffic fits into the time.
CPU_CASES = ((1, 0.2), (4, 0.5), (16, 0.5), (64, 1.0), (256, 1.0), (1024, 1.0))
CUDA_CASES = tuple((size, 370.0) for size in (1, 4, 16, 64, 256, 1024))
LATENCY_S = 20e-6
REPEATS = 5


def measure_accuracy(link: EmulatedLink, cases: Sequence[tuple[int, float]]) -> list[list[Any]]:
    """For each case: MiB, GB/s, and for all-gather and reduce-scatter model and median ms."""
    emulated = link.zerocore.emulated
    kinds = link.zerocore._C.Traffic
    rows = []
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
        "emulated: an idle collective against the model",
        ["MiB", "GB/s", "all-gather: model", "ms", "off %", "reduce-scatter: model", "ms", "off %"],
    )
    for size, bandwidth, *pairs in rows:
        cells = []
        for model, took in zip(pairs[::2], pairs[1::2], strict=True):
            cells += [f"{model:.3f}", f"{took:.3f}", f"{100 * (took / model - 1):+.2f}"]
        table.add(f"{size}", f"{bandwidth:g}", *cells)
    table.notes = [
        f"Median of {REPEATS}, from the call to the return of wait(), with what waking a thread "
        "takes; wanted: within 3 %."
    ]
    return table
